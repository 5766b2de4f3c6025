"""The real server with the real target, as clients see it: every protocol, every kind of bad input."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from angelspec_client import AsyncGrpcClient, AsyncHttpClient, GrpcClient, HttpClient, InvalidRequest
from serving import CHAT, PROMPT, Endpoint, wait_until

GREEDY = {"max_tokens": 24, "temperature": 0.0, "seed": 5, "ignore_eos": True}
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "seed": 1234, "ignore_eos": True}


@pytest.fixture(scope="module")
def endpoint(server) -> Endpoint:
    return Endpoint(server.options)


@pytest.fixture(scope="module")
def client(endpoint):
    with GrpcClient(endpoint.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def http_client(endpoint):
    with HttpClient(endpoint.http) as client:
        yield client


# ---------------------------------------------------------------------- the same text everywhere


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_protocol_and_every_drafter_gives_the_same_text(client, http_client, endpoint, options):
    plain = client.generate(messages=CHAT, drafter="none", **options)
    assert plain.num_output_tokens == len(plain.token_ids) == 24
    assert plain.total_draft_tokens == 0

    async def run_async():
        found = []
        for aio in (AsyncGrpcClient(endpoint.grpc), AsyncHttpClient(endpoint.http)):
            async with aio:
                found.append(await aio.generate(messages=CHAT, **options))
                async with aio.stream(messages=CHAT, **options) as stream:
                    found.append(await stream.read())
                async with aio.stream(messages=CHAT, **options) as stream:
                    found += [stream.generation async for chunk in stream if chunk.usage]
        return found

    generations = [
        client.generate(messages=CHAT, **options),
        client.stream(messages=CHAT, **options).read(),
        http_client.generate(messages=CHAT, **options),
        http_client.stream(messages=CHAT, **options).read(),
        *asyncio.run(run_async()),
        *(client.generate(messages=CHAT, drafter="ngram", num_draft_tokens=k, **options) for k in (1, 3, 8)),
        *(
            client.generate(messages=CHAT, drafter="draft_model", num_draft_tokens=k, **options)
            for k in (1, 7)
        ),
    ]
    for generation in generations:
        assert (generation.text, generation.token_ids) == (plain.text, plain.token_ids)
        assert generation.finish_reason == "length"
        assert generation.seed == plain.seed
        assert generation.num_input_tokens == plain.num_input_tokens


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_as_its_own_drafter_is_always_right(client, options):
    def drafted(seed: int) -> int:
        long = {**options, "max_tokens": 160, "seed": seed}
        result = client.generate(messages=CHAT, drafter="draft_model", num_draft_tokens=4, **long)
        # The last step is cut to the tokens that are still wanted.
        assert result.total_accepted_draft_tokens == result.total_draft_tokens
        return result.total_draft_tokens

    # Its drafts cost as much as what they save, so they are tried now and then, and only likely tokens.
    assert any(drafted(seed) for seed in range(10))


def test_a_seed_is_drawn_and_returned_and_repeats_the_text(client):
    first = client.generate(PROMPT, max_tokens=16, temperature=1.5)
    other = client.generate(PROMPT, max_tokens=16, temperature=1.5)
    again = client.generate(PROMPT, max_tokens=16, temperature=1.5, seed=first.seed)
    assert first.seed != other.seed
    assert first.token_ids != other.token_ids
    assert again.token_ids == first.token_ids


def test_text_ids_and_messages_are_the_same_prompt_in_three_forms(client, tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    results = [
        client.generate(text, **GREEDY),
        client.generate(input_ids=ids, **GREEDY),
        client.generate(messages=CHAT, **GREEDY),
    ]
    assert len({result.token_ids for result in results}) == 1
    assert [result.num_input_tokens for result in results] == [len(ids)] * 3


# ---------------------------------------------------------------------- streaming


def test_a_stream_brings_text_in_every_chunk_and_the_usage_in_the_last(endpoint, tokenizer):
    connection, events = endpoint.open_stream(text_input=PROMPT, max_tokens=20, ignore_eos=True)
    chunks = list(events)
    connection.close()
    assert len(chunks) > 3
    assert all(chunk["text_output"] for chunk in chunks[:-1])
    assert not any("finish_reason" in chunk or "error" in chunk for chunk in chunks[:-1])
    last = chunks[-1]
    assert last["finish_reason"] == "length"
    assert last["num_output_tokens"] == 20
    assert last["num_input_tokens"] == len(tokenizer(PROMPT).input_ids)
    assert {"seed", "total_draft_tokens", "total_accepted_draft_tokens"} <= set(last)
    ids = [i for chunk in chunks for i in np.atleast_1d(chunk.get("output_ids", [])).tolist()]
    assert len(ids) == 20
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(c["text_output"] for c in chunks)


def test_characters_of_several_tokens_arrive_whole(endpoint):
    status, whole = endpoint.generate(text_input="Emoji: 🦄🌍🎉 🦄🌍🎉 🦄🌍🎉 🦄", max_tokens=24)
    connection, events = endpoint.open_stream(text_input="Emoji: 🦄🌍🎉 🦄🌍🎉 🦄🌍🎉 🦄", max_tokens=24)
    text = "".join(event["text_output"] for event in events)
    connection.close()
    assert status == 200
    assert text == whole["text_output"]
    assert "\ufffd" not in text[:-1]


def test_the_last_data_response_is_the_final_one(endpoint):
    """A tritonclient user who does not ask for an empty final response waits for this flag."""
    replies: list = []
    with triton_grpc.InferenceServerClient(endpoint.grpc) as raw:
        raw.start_stream(lambda result, error: replies.append((result, error)))
        text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[PROMPT.encode()]], object))
        limit = triton_grpc.InferInput("max_tokens", [1, 1], "INT32")
        limit.set_data_from_numpy(np.array([[5]], np.int32))
        raw.async_stream_infer("angelspec", [text, limit], enable_empty_final_response=True)
        raw.stop_stream()
    assert all(error is None for _, error in replies)
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in replies]
    assert finals[-1]
    assert not any(finals[:-1])
    assert replies[-1][0].as_numpy("finish_reason").shape == (1, 1)


def test_a_stop_string_across_tokens_ends_the_text_before_it(client, tokenizer):
    free = client.generate(messages=CHAT, **GREEDY)
    words = free.text.strip()
    stop = words[len(words) // 2 : len(words) // 2 + 6]  # begins and ends inside of tokens
    for drafter, k in (("none", 0), ("ngram", 8), ("draft_model", 8)):
        for result in (
            client.generate(
                messages=CHAT, stop=[stop, "never"], drafter=drafter, num_draft_tokens=k, **GREEDY
            ),
            client.stream(messages=CHAT, stop=stop, drafter=drafter, num_draft_tokens=k, **GREEDY).read(),
        ):
            assert result.finish_reason == "stop"
            assert result.text == free.text[: free.text.index(stop)]
            assert result.num_output_tokens == len(result.token_ids) < 24
            assert stop in tokenizer.decode(result.token_ids)


def test_the_end_of_sequence_token_ends_a_chat_answer(client):
    result = client.generate(messages=[{"role": "user", "content": "Say hi."}], max_tokens=200, temperature=0)
    assert result.finish_reason == "eos"
    assert "<|im_end|>" not in result.text
    longer = client.generate(
        messages=[{"role": "user", "content": "Say hi."}],
        max_tokens=result.num_output_tokens + 5,
        temperature=0,
        ignore_eos=True,
    )
    assert longer.finish_reason == "length"
    assert longer.token_ids[: result.num_output_tokens] == result.token_ids


def test_the_prompt_is_repeated_when_it_is_not_excluded(client):
    without = client.generate(PROMPT, **GREEDY)
    whole = client.generate(PROMPT, exclude_input_in_output=False, **GREEDY)
    assert whole.text == PROMPT + without.text


# ---------------------------------------------------------------------- leaving


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_leaving_a_grpc_stream_frees_the_sequence(client, endpoint, drafter):
    before = endpoint.metric("angelspec_requests_total", "cancelled")
    with client.stream(PROMPT, max_tokens=4000, ignore_eos=True, drafter=drafter) as stream:
        next(stream)
        next(stream)
    wait_until(lambda: endpoint.metric("angelspec_requests_running") == 0, 10)
    wait_until(lambda: endpoint.metric("angelspec_requests_total", "cancelled") == before + 1, 10)


def test_an_http_disconnect_frees_the_sequence(endpoint):
    before = endpoint.metric("angelspec_requests_total", "cancelled")
    connection, events = endpoint.open_stream(text_input=PROMPT, max_tokens=4000, ignore_eos=True)
    next(events)
    events.close()
    connection.sock.close() if connection.sock else None
    connection.close()
    wait_until(lambda: endpoint.metric("angelspec_requests_total", "cancelled") == before + 1, 10)
    wait_until(lambda: endpoint.metric("angelspec_requests_running") == 0, 10)


def test_a_deadline_ends_a_request_with_reason_timeout(endpoint):
    status, reply = endpoint.generate(
        text_input=PROMPT, max_tokens=4000, ignore_eos=True, parameters={"timeout": 300_000}
    )
    assert status == 200
    assert reply["finish_reason"] == "timeout"
    assert 0 < reply["num_output_tokens"] < 4000


# ---------------------------------------------------------------------- bad input

LONG = "word " * 9000

BAD_REQUESTS = {
    "no prompt": ({"max_tokens": 5}, "text_input"),
    "two prompts": ({"text_input": "a", "input_ids": [1]}, "one of"),
    "empty prompt": ({"text_input": ""}, "empty"),
    "long prompt": ({"text_input": LONG}, "context"),
    "ids outside the vocabulary": ({"input_ids": [1, 99999999]}, "99999999"),
    "messages that are no JSON": ({"messages": "hello"}, "messages"),
    "messages without roles": ({"messages": json.dumps([{"content": "x"}])}, "role"),
    "max_tokens 0": ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"text_input": "a", "max_tokens": -5}, "-5"),
    "temperature negative": ({"text_input": "a", "temperature": -0.1}, "temperature"),
    "top_p 0": ({"text_input": "a", "top_p": 0}, "top_p"),
    "top_p above 1": ({"text_input": "a", "top_p": 1.5}, "1.5"),
    "min_p above 1": ({"text_input": "a", "min_p": 2.0}, "min_p"),
    "top_k negative": ({"text_input": "a", "top_k": -7}, "top_k"),
    "unknown drafter": ({"text_input": "a", "drafter": "magic"}, "ngram"),
    "too many draft tokens": ({"text_input": "a", "num_draft_tokens": 99}, "99"),
    "empty stop string": ({"text_input": "a", "stop_words": [""]}, "stop_words"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused_with_a_helpful_text(endpoint, name):
    fields, expected = BAD_REQUESTS[name]
    status, reply = endpoint.generate(**fields)
    assert status == 400, reply
    message = reply["error"]
    assert expected in message
    assert len(message) < 400
    for leak in ("Traceback", ".py", "/dev/shm", "site-packages", str(endpoint.options.folder)):
        assert leak not in message


def test_not_a_number_is_refused(client):
    for field in ("temperature", "top_p", "min_p"):
        with pytest.raises(InvalidRequest, match=field):
            client.generate(PROMPT, **{field: float("nan")})
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate(PROMPT, temperature=float("inf"))


def test_a_wrong_tensor_type_is_refused(endpoint):
    status, reply = endpoint.generate(text_input=PROMPT, max_tokens="many")
    assert status >= 400
    assert reply["error"]


def test_a_token_limit_beyond_the_context_is_clamped_to_it(endpoint):
    """The HTTP endpoint wraps 99999999999 to some 32-bit number; any large one means "as much as fits"."""
    ids = [1] * 2036
    status, reply = endpoint.generate(input_ids=ids, max_tokens=99999999999, ignore_eos=True)
    assert status == 200
    assert reply["num_output_tokens"] == 2048 - 2036
    assert reply["finish_reason"] == "length"


def test_bad_requests_leave_others_alone(client, endpoint):
    expected = client.generate(PROMPT, **GREEDY)
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(client.generate, PROMPT, **GREEDY) for _ in range(6)]
        for name in list(BAD_REQUESTS) * 2:
            pool.submit(endpoint.generate, **BAD_REQUESTS[name][0])
        assert all(future.result().token_ids == expected.token_ids for future in good)


# ---------------------------------------------------------------------- many at once


def test_a_prefix_that_was_served_before_is_not_computed_again(client, endpoint):
    prefix = "A long story. " * 60
    cold = client.generate(prefix + "One.", **GREEDY)
    before = endpoint.metric("angelspec_cached_tokens_total")
    warm = client.generate(prefix + "One.", **GREEDY)
    wait_until(lambda: endpoint.metric("angelspec_cached_tokens_total") >= before + 160)
    assert warm.token_ids == cold.token_ids


def test_64_streams_at_once_each_get_their_own_text(endpoint):
    prompts = [f"Tell me a fact about the number {i}." for i in range(64)]
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8}

    async def run(concurrency: int, **more) -> list[tuple[int, ...]]:
        gate = asyncio.Semaphore(concurrency)
        async with AsyncGrpcClient(endpoint.grpc) as aio:

            async def one(i: int) -> tuple[int, ...]:
                async with gate, aio.stream(prompts[i], seed=i, **options, **more) as stream:
                    result = await stream.read()
                assert result.num_output_tokens == 12
                return result.token_ids

            return await asyncio.gather(*(one(i) for i in range(64)))

    together = asyncio.run(run(64))
    few = asyncio.run(run(4, drafter="none"))
    assert together == few
    wait_until(lambda: endpoint.metric("angelspec_requests_running") == 0, 10)


def test_requests_of_all_kinds_interleaved_with_cancellations_keep_their_texts(client):
    expected = client.generate(messages=CHAT, drafter="none", **SAMPLED).token_ids

    def work(i: int) -> bool:
        if i % 4 == 3:
            with client.stream(PROMPT, max_tokens=500, ignore_eos=True) as stream:
                next(stream)
                time.sleep(0.05 * (i % 3))
            return True
        drafter = ("none", "ngram", "draft_model")[i % 3]
        return (
            client.generate(messages=CHAT, drafter=drafter, num_draft_tokens=1 + i % 8, **SAMPLED).token_ids
            == expected
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(48)))


def test_metrics_count_what_was_served(client, endpoint):
    names = ("angelspec_output_tokens_total", "angelspec_prompt_tokens_total")
    before = [endpoint.metric(name) for name in names]
    result = client.generate(messages=CHAT, drafter="draft_model", num_draft_tokens=4, **GREEDY)
    wait_until(lambda: endpoint.metric(names[0]) >= before[0] + 24)
    assert endpoint.metric(names[1]) == before[1] + result.num_input_tokens
    accepted = "angelspec_spec_decode_num_accepted_tokens"
    per_pos = f"{accepted}_per_pos_total"
    wait_until(lambda: endpoint.metric(f"{accepted}_total") == endpoint.metric(per_pos) > 0)
    at = [endpoint.metric(per_pos, f'position="{k}"') for k in range(32)]
    assert endpoint.metric("angelspec_spec_decode_num_drafts_total") >= at[0]
    assert at == sorted(at, reverse=True), "a draft token counts only where all before it were accepted"
