"""The client without a server: request encoding, answers, server-sent events, errors, retry."""

import asyncio
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from angelspec_client import (
    AsyncStream,
    ConnectionFailed,
    HttpClient,
    InvalidRequest,
    Options,
    RequestCancelled,
    RequestTimeout,
    ServerBusy,
    ServerError,
    Stream,
)
from angelspec_client import errors as client_errors
from angelspec_client.grpc_client import decode, encode
from angelspec_client.http_client import read_response
from angelspec_client.progress import LONGEST_BACKOFF_S, Policy, backoff_s
from angelspec_client.protocol import build_request, read_chunk, read_json, to_json, to_tensors
from angelspec_client.sse import read_events

LAST = {
    "text_output": ["c"],
    "output_ids": [3],
    "finish_reason": ["length"],
    "num_input_tokens": [7],
    "num_output_tokens": [3],
    "seed": [2**64 - 1],
    "total_draft_tokens": [4],
    "total_accepted_draft_tokens": [1],
}
CHUNK = {"text_output": ["ab"], "output_ids": [1, 2]}


def request(prompt="hi", stream=True, **options):
    return build_request(prompt, None, None, stream, Options(**options))


# Requests


def test_every_option_reaches_its_tensor_in_wire_shape():
    tensors = {
        tensor.name: tensor
        for tensor in to_tensors(
            request(
                max_tokens=5,
                temperature=1,
                top_k=np.int64(3),
                top_p=0.5,
                min_p=0.1,
                seed=2**64 - 1,
                stop=["a", "é"],
                ignore_eos=True,
                drafter="ngram",
                num_draft_tokens=0,
            )
        )
    }
    expected = {
        "text_input": ("BYTES", [[b"hi"]]),
        "stream": ("BOOL", [[True]]),
        "max_tokens": ("INT32", [[5]]),
        "temperature": ("FP32", [[1.0]]),
        "top_k": ("INT32", [[3]]),
        "top_p": ("FP32", [[0.5]]),
        "min_p": ("FP32", [[np.float32(0.1)]]),
        "seed": ("UINT64", [[2**64 - 1]]),
        "stop_words": ("BYTES", [[b"a", "é".encode()]]),
        "ignore_eos": ("BOOL", [[True]]),
        "exclude_input_in_output": ("BOOL", [[True]]),
        "drafter": ("BYTES", [[b"ngram"]]),
        "num_draft_tokens": ("INT32", [[0]]),
    }
    assert {name: (t.datatype, t.array.tolist()) for name, t in tensors.items()} == expected


def test_options_left_out_are_not_sent():
    names = {tensor.name for tensor in to_tensors(request())}
    assert names == {"text_input", "stream", "exclude_input_in_output"}


def test_json_body_holds_scalars_lists_id_and_parameters():
    body = json.loads(
        to_json(
            request(stop="x", seed=2**64 - 1, request_id="r", parameters={"tag": "t", "n": 1}, stream=False)
        )
    )
    assert body == {
        "text_input": "hi",
        "stream": False,
        "stop_words": ["x"],
        "seed": 2**64 - 1,
        "exclude_input_in_output": True,
        "id": "r",
        "parameters": {"tag": "t", "n": 1},
    }


def test_messages_travel_as_json_text_and_token_ids_as_a_row():
    messages = [{"role": "user", "content": "naïve 你好"}]
    (text,) = (
        t for t in to_tensors(build_request(None, messages, None, True, Options())) if t.name == "messages"
    )
    assert json.loads(text.array[0, 0].decode()) == messages
    (ids,) = (
        t for t in to_tensors(build_request(None, None, (1, 2, 3), True, Options())) if t.name == "input_ids"
    )
    assert ids.array.dtype == np.int32
    assert ids.array.tolist() == [[1, 2, 3]]


def test_protobuf_carries_the_tensors_id_and_parameters():
    parameters = {"s": "x", "i": 3, "f": 1.5, "b": True}
    message = encode(request(max_tokens=5, request_id="r", parameters=parameters), "angelspec")
    assert (message.model_name, message.id) == ("angelspec", "r")
    shapes = {i.name: (i.datatype, list(i.shape)) for i in message.inputs}
    assert shapes["max_tokens"] == ("INT32", [1, 1])
    contents = dict(zip(shapes, message.raw_input_contents, strict=True))
    assert contents["max_tokens"] == np.int32(5).tobytes()
    assert contents["text_input"] == b"\x02\x00\x00\x00hi"
    sent = {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in message.parameters.items()}
    assert sent == parameters


@pytest.mark.parametrize(
    ("prompt", "messages", "ids"), [(None, None, None), ("a", None, [1]), ("a", [{}], None), ("", None, [])]
)
def test_exactly_one_kind_of_prompt_is_needed(prompt, messages, ids):
    with pytest.raises(InvalidRequest, match="exactly one"):
        build_request(prompt, messages, ids, True, Options())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 99999999999}, "max_tokens must be in -2147483648..2147483647, got 99999999999"),
        ({"seed": -1}, "seed must be in 0..18446744073709551615, got -1"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"drafter": 3}, "drafter must be a string"),
        ({"stop": ["a", 3]}, "stop_words must be a string, got 3"),
        ({"drafter": "\ud800"}, "not text"),
        ({"parameters": {"timeout": 3}}, "'timeout' is reserved"),
        ({"parameters": {"triton_grpc_error": True}}, "'triton_grpc_error' is reserved"),
        ({"parameters": {"max_tokens": 3}}, "an input of the model"),
        ({"parameters": {"a": [1]}}, "must be a string, a number or a boolean"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_with_the_value(options, text):
    with pytest.raises(InvalidRequest, match=text.replace(".", r"\.")):
        request(**options)


def test_ranges_are_left_to_the_server_but_json_has_no_nan():
    nan = request(temperature=float("nan"), max_tokens=-5)
    assert np.isnan(next(t for t in to_tensors(nan) if t.name == "temperature").array).all()
    with pytest.raises(InvalidRequest, match="finite"):
        to_json(nan)


def test_messages_that_are_not_json_are_refused():
    with pytest.raises(InvalidRequest, match="messages cannot be written as JSON"):
        build_request(None, [{"role": "user", "content": object()}], None, True, Options())


# Answers


def test_json_and_protobuf_answers_read_the_same():
    response = service_pb2.ModelStreamInferResponse()
    types = {"text_output": "BYTES", "finish_reason": "BYTES", "seed": "UINT64"}
    dtypes = {"BYTES": np.object_, "UINT64": np.uint64, "INT32": np.int32}
    for name, values in LAST.items():
        datatype = types.get(name, "INT32")
        array = np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtypes[datatype])
        response.infer_response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        response.infer_response.raw_output_contents.append(raw)
    event = {name: values[0] for name, values in LAST.items()} | {"model_name": "angelspec"}
    chunk = read_chunk(decode(response, False), 1.0)
    assert chunk == read_chunk(read_json(event), 1.0)
    assert chunk.usage.seed == 2**64 - 1
    assert chunk.token_ids == (3,)


@pytest.mark.parametrize("value", [[], 5, [5, 6]])
def test_json_output_ids_may_be_a_scalar_a_list_or_empty(value):
    chunk = read_chunk(read_json({"text_output": "", "output_ids": value}), 0.0)
    assert chunk.token_ids == tuple(value if isinstance(value, list) else [value])
    assert chunk.usage is None


def test_a_last_chunk_without_counts_is_a_server_error():
    with pytest.raises(ServerError, match="num_input_tokens"):
        read_chunk({"text_output": [""], "finish_reason": ["eos"]}, 0.0)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")), max_size=5))
def test_events_are_read_back_as_written(texts):
    lines = []
    for text in texts:
        lines += [b": comment\n", f"data: {text}\n".encode(), b"\n"]
    assert list(read_events(lines)) == texts


def test_events_join_data_lines_and_drop_what_is_cut_off():
    lines = [b"data: a\r\n", b"data:b\r\n", b"id: 1\r\n", b"\r\n", b"\n", b"data: half"]
    assert list(read_events(lines)) == ["a\nb"]


# Errors


@pytest.mark.parametrize(
    ("message", "received", "kind"),
    [
        ("UNAVAILABLE: 256 requests are waiting", False, ServerBusy),
        ("INTERNAL: the target failed", False, ServerError),
        ("CANCELLED: by the server", True, RequestCancelled),
        ("INVALID_ARG: no", False, InvalidRequest),
        ("the queue is full", False, ServerBusy),
        ("Exceeds maximum queue size", False, ServerBusy),
        (
            "Server is stopping, scheduler for model has stopped accepting new inference requests",
            False,
            ServerBusy,
        ),
        ("Stub process 'angelspec_0_0' is not healthy.", False, ServerError),
        ("Request for unknown model: 'x' is not found", False, InvalidRequest),
        ("max_tokens must be at least 1, got 0", False, InvalidRequest),
        ("the same text once the answer has begun", True, ServerError),
    ],
)
def test_error_texts_map_to_types(message, received, kind):
    assert type(client_errors.from_message(message, received)) is kind


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, '{"error": "temperature must be in 0..100"}', InvalidRequest),
        (400, '{"error": "UNAVAILABLE: the queue is full"}', ServerBusy),
        (404, '{"error": "unknown model"}', InvalidRequest),
        (501, '{"error": "not supported"}', InvalidRequest),
        (503, '{"error": "not ready"}', ServerBusy),
        (500, '{"error": "broken"}', ServerError),
        (200, '{"error": "generate expects model to produce exactly 1 response"}', ServerError),
        (502, "<html>bad gateway</html>", ServerError),
        (200, "<html>hello</html>", ServerError),
        (200, "[1]", ServerError),
    ],
)
def test_http_errors_raise_also_with_status_200(status, body, kind):
    with pytest.raises(kind):
        read_response(body, status)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("UNAVAILABLE", ConnectionFailed),
        ("DEADLINE_EXCEEDED", RequestTimeout),
        ("CANCELLED", RequestCancelled),
        ("INTERNAL", ServerError),
    ],
)
def test_a_call_that_grpc_ends_maps_to_types(status, kind):
    assert type(client_errors.from_grpc_status(status, "last error: refused", "host:1")) is kind


def test_a_stream_error_in_protobuf_raises():
    with pytest.raises(InvalidRequest, match="top_p"):
        decode(service_pb2.ModelStreamInferResponse(error_message="top_p must be in 0..1"), False)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(InvalidRequest, match="url must be like"):
        HttpClient(url)


# Streams over scripted calls


class ScriptedCall:
    """A call that answers from a list: outputs, an error, or None for the end."""

    def __init__(self, script):
        self.script = list(script)
        self.closed = False

    def receive(self):
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else (answer, time.perf_counter())

    def close(self):
        self.closed = True


class AsyncScriptedCall(ScriptedCall):
    async def receive(self):
        await asyncio.sleep(0)
        return super().receive()

    async def arrive(self):
        await asyncio.sleep(0)
        return ()


def run(scripts, policy, kind):
    """Read a whole generation from one scripted call per attempt; (generation or error, calls made)."""
    calls = []

    def connect(_):
        calls.append((ScriptedCall if kind is Stream else AsyncScriptedCall)(scripts[len(calls)]))
        return calls[-1]

    async def read_async():
        return await AsyncStream(connect, policy).read()

    try:
        result = Stream(connect, policy).read() if kind is Stream else asyncio.run(read_async())
    except client_errors.AngelSpecError as error:
        result = error
    return result, calls


both = pytest.mark.parametrize("kind", [Stream, AsyncStream])


@both
def test_chunks_are_joined_to_a_generation(kind):
    generation, calls = run([[CHUNK, LAST, None]], Policy(), kind)
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("abc", (1, 2, 3), "length")
    assert generation.acceptance_length == pytest.approx(3 / 2)
    assert 0 <= generation.ttft_s <= generation.duration_s
    assert not calls[0].script  # read to its end
    assert calls[0].closed


@both
def test_a_busy_server_is_asked_again_as_often_as_allowed(kind):
    busy = [ServerBusy("full")]
    generation, calls = run([busy, busy, [LAST, None]], Policy(retries=2), kind)
    assert generation.text == "c"
    assert len(calls) == 3
    error, calls = run([busy, busy, [LAST, None]], Policy(retries=1), kind)
    assert isinstance(error, ServerBusy)
    assert len(calls) == 2
    assert all(call.closed for call in calls)


@both
@pytest.mark.parametrize(
    "script", [[CHUNK, ServerBusy("full")], [ServerError("broken")], [InvalidRequest("no")]]
)
def test_nothing_else_is_sent_again(kind, script):
    error, calls = run([script], Policy(retries=5), kind)
    assert error is not None
    assert len(calls) == 1


@both
def test_the_timeout_bounds_the_retries(kind):
    error, calls = run([[ServerBusy("full")]] * 100, Policy(timeout_s=0.2, retries=99), kind)
    assert isinstance(error, ServerBusy | RequestTimeout)
    assert len(calls) < 20


@both
def test_an_answer_that_ends_early_is_an_error(kind):
    error, _ = run([[CHUNK, None]], Policy(), kind)
    assert isinstance(error, ServerError)


def test_leaving_a_loop_cancels():
    call = ScriptedCall([CHUNK, CHUNK])
    for _ in Stream(lambda _: call, Policy()):
        break
    assert call.closed


def test_closing_ends_the_iteration_and_no_generation_is_made_up():
    call = ScriptedCall([CHUNK, CHUNK])
    with Stream(lambda _: call, Policy()) as stream:
        next(stream)
    assert call.closed
    assert list(stream) == []
    assert [chunk.text for chunk in stream.chunks] == ["ab"]
    with pytest.raises(ServerError, match="not complete"):
        _ = stream.generation


def test_nothing_is_sent_before_the_first_chunk_is_asked_for():
    with Stream(lambda _: pytest.fail("connected"), Policy()):
        pass


def test_backoff_is_random_and_bounded():
    for attempt in range(12):
        delays = [backoff_s(attempt) for _ in range(50)]
        assert all(0 <= delay <= min(LONGEST_BACKOFF_S, 0.1 * 2**attempt) for delay in delays)
        assert len(set(delays)) > 1
