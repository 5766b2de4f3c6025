"""Every family of bad values is refused with a text that helps; good ones come out as they went in."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.config import EngineConfig
from angelspec_backend.core.fields import INPUT_TYPES, InvalidRequest
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, RequestLimits, Unavailable, parse_request
from angelspec_backend.core.prompt import MAX_CHARACTERS_PER_TOKEN

LIMITS = RequestLimits(
    max_context=100,
    vocab_size=256,
    drafter_names=("ngram", "draft_model"),
    default_drafter="ngram",
    default_num_draft_tokens=4,
    default_max_tokens=16,
)
DTYPES = {"STRING": object, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": bool}


class Bytes:
    """A tokenizer whose tokens are the bytes of the text, with BOS 1."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode()

    def render(self, messages) -> str:
        if any(message["role"] == "alien" for message in messages):
            raise InvalidRequest("messages: unknown role")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def arrays(**values) -> dict[str, np.ndarray]:
    """Fields as Triton delivers them: [1, n], strings as bytes."""
    result = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        result[name] = np.array([items], DTYPES[INPUT_TYPES[name]])
    return result


def parse(**values) -> GenerationRequest:
    if not {"text_input", "input_ids", "messages"} & values.keys():
        values["text_input"] = "Hi"
    return parse_request(arrays(**values), LIMITS, Bytes())


def test_defaults_fill_what_is_absent():
    request = parse()
    assert request.prompt_token_ids == (1, *b"Hi")
    assert request.prompt_text == "Hi"
    assert request.max_tokens == 16
    assert request.stop == ()
    assert request.timeout_s is None
    assert (request.drafter, request.num_draft_tokens) == (0, 4)
    assert not (request.stream)
    assert not (request.echo)
    assert not (request.ignore_eos)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)


def test_values_arrive():
    request = parse(
        max_tokens=7,
        stream=True,
        temperature=0.5,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        stop_words=["a", "b", "a"],
        ignore_eos=True,
        exclude_input_in_output=False,
        drafter="draft_model",
        num_draft_tokens=32,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        frequency_penalty=0.0,
        presence_penalty=0.0,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.25, 0.125)
    assert sampling.seed == 2**64 - 1
    assert request.max_tokens == 7
    assert request.stop == ("a", "b")
    assert request.stream
    assert request.echo
    assert request.ignore_eos
    assert (request.drafter, request.num_draft_tokens) == (1, 32)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"max_tokens": 0}, ["max_tokens", "1..2147483647", "got 0"]),
        ({"max_tokens": -5}, ["max_tokens", "got -5", "wrap"]),
        ({"temperature": -0.1}, ["temperature", "in 0..100"]),
        ({"temperature": 101.0}, ["temperature", "101"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_p": 0.0}, ["top_p", "above 0 and at most 1"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"min_p": -0.5}, ["min_p", "in 0..1"]),
        ({"min_p": 2.0}, ["min_p", "2.0"]),
        ({"top_k": -2}, ["top_k", "-1..", "-2"]),
        ({"num_draft_tokens": 33}, ["num_draft_tokens", "0..32", "33"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens", "-1"]),
        ({"drafter": "eagle"}, ["drafter", "'eagle'", "none, ngram, draft_model"]),
        ({"drafter": "x" * 500}, ["drafter", "…"]),
        ({"stop_words": [""]}, ["stop_words", "1..256", "0"]),
        ({"stop_words": ["x" * 257]}, ["stop_words", "257"]),
        ({"stop_words": ["x"] * 17}, ["stop_words", "16", "17"]),
        ({"frequency_penalty": 0.5}, ["frequency_penalty", "not supported", "0.5"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty", "not supported"]),
        ({"text_input": ""}, ["prompt is empty", "text_input"]),
        ({"input_ids": []}, ["prompt is empty", "input_ids"]),
        ({"messages": ""}, ["prompt is empty", "messages"]),
        ({"input_ids": [5, 256]}, ["input_ids", "0..255", "256"]),
        ({"input_ids": [-1]}, ["input_ids", "-1"]),
        ({"text_input": "x" * 99}, ["prompt of 100 tokens", "context 100", "99"]),
        ({"input_ids": [5] * 100}, ["prompt of 100 tokens"]),
        ({"text_input": "x" * (100 * MAX_CHARACTERS_PER_TOKEN + 1)}, ["3201 characters", "at most 3200"]),
        ({"text_input": "a", "input_ids": [1]}, ["exactly one", "text_input and input_ids"]),
        ({"messages": "[{"}, ["messages", "not valid JSON"]),
        ({"messages": "[" * 3000}, ["messages", "not valid JSON", "nested"]),
        ({"messages": "{}"}, ["messages", "JSON list"]),
        ({"messages": "[]"}, ["messages", "JSON list"]),
        ({"messages": "[7]"}, ["messages[0]", "object", "7"]),
        ({"messages": '[{"content": "x"}]'}, ["messages[0].role", "None"]),
        ({"messages": '[{"role": "user", "content": 5}]'}, ["messages[0].content", "string", "5"]),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, ["messages", "surrogate"]),
        ({"messages": '[{"role": "alien", "content": ""}]'}, ["messages", "role"]),
        ({"text_input": b"\xff\xfe"}, ["text_input", "UTF-8", "byte 0"]),
        ({"text_input": ["a", "b"]}, ["text_input", "one value", "2"]),
        ({"max_tokens": []}, ["max_tokens", "one value", "0"]),
    ],
)
def test_bad_values_are_refused_with_what_why_and_the_range(values, texts):
    with pytest.raises(InvalidRequest) as caught:
        parse(**values)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_request_without_a_prompt_is_refused():
    with pytest.raises(
        InvalidRequest, match=r"exactly one of text_input, input_ids, messages .* none of them"
    ):
        parse_request({}, LIMITS, Bytes())


def test_unknown_fields_and_wrong_types_are_refused():
    with pytest.raises(InvalidRequest, match="unknown input 'max_token'; did you mean 'max_tokens'"):
        parse_request({"max_token": np.array([5])}, LIMITS, Bytes())
    with pytest.raises(InvalidRequest, match="max_tokens must be of type INT32, got float32"):
        parse_request({"max_tokens": np.array([5], np.float32)}, LIMITS, Bytes())
    with pytest.raises(InvalidRequest, match="text_input must be of type STRING"):
        parse_request({"text_input": np.array([5])}, LIMITS, Bytes())


@pytest.mark.parametrize("wanted", [97, 98, 1215752191, 2**31 - 1])
def test_max_tokens_is_clamped_to_the_context(wanted):
    assert parse(text_input="Hi", max_tokens=wanted).max_tokens == 97


def test_the_longest_prompt_leaves_one_token():
    assert parse(input_ids=[7] * 99).max_tokens == 1


@pytest.mark.parametrize("off", [{"drafter": "none"}, {"num_draft_tokens": 0}])
def test_either_switch_turns_speculation_off(off):
    request = parse(**off)
    assert (request.drafter, request.num_draft_tokens) == (NO_DRAFTER, 0)


@pytest.mark.parametrize("off", [0, -1, 256, 2**31 - 1])
def test_top_k_that_keeps_the_whole_vocabulary_is_off(off):
    assert parse(top_k=off).sampling.top_k == 0


def test_chat_messages_go_through_the_template_without_a_second_bos():
    request = parse(messages=json.dumps([{"role": "user", "content": "Hé"}]))
    assert request.prompt_text == "<user>Hé<assistant>"
    assert request.prompt_token_ids == tuple("<user>Hé<assistant>".encode())


def test_echo_of_token_ids_shows_their_text():
    assert parse(input_ids=list(b"abc"), exclude_input_in_output=False).prompt_text == "abc"


def test_absent_seeds_are_drawn_anew_and_fit_a_double():
    seeds = {parse().sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 2**53


def test_sampling_parameters_are_read_from_json_with_numbers_as_text():
    text = json.dumps(
        {"max_tokens": "9", "temperature": "0.5", "top_k": 3, "seed": 5, "stop": "END", "ignore_eos": True}
    )
    request = parse(sampling_parameters=text)
    assert request.max_tokens == 9
    assert request.stop == ("END",)
    assert request.ignore_eos
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 5)
    assert parse(sampling_parameters=text, max_tokens=4).max_tokens == 4, "the tensor wins"
    assert parse(sampling_parameters='{"stop": ["a", "b"], "seed": null}').stop == ("a", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"max_token": 5}', "unsupported 'max_token'; did you mean 'max_tokens'"),
        ('{"n": 2}', "unsupported 'n'; allowed: max_tokens"),
        ('{"max_tokens": "many"}', "max_tokens must be an integer, got 'many'"),
        ('{"max_tokens": 1.5}', "max_tokens must be an integer, got 1.5"),
        ('{"max_tokens": true}', "max_tokens must be an integer, got True"),
        ('{"temperature": NaN}', "temperature must be in 0..100, got nan"),
        ('{"temperature": "nan"}', "temperature must be in 0..100, got nan"),
        ('{"temperature": 1' + "0" * 400 + "}", "temperature must be in 0..100"),
        ('{"temperature": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"temperature": [1]}', "temperature must be a number"),
        ('{"seed": -1}', "seed must be in 0..18446744073709551615, got -1"),
        ('{"seed": 18446744073709551616}', "seed must be in"),
        ('{"stop": 5}', "stop_words must be strings"),
        ('{"stop": ["\\ud800"]}', "surrogate"),
        ('{"ignore_eos": "yes"}', "ignore_eos must be true or false"),
    ],
)
def test_bad_sampling_parameters_are_refused(text, expected):
    with pytest.raises(InvalidRequest) as caught:
        parse(sampling_parameters=text)
    assert expected in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["max_tokens", "temperature", "top_k", "top_p", "seed", "stop"]), json_values
    ),
    json_values,
)
def test_any_json_is_either_served_in_range_or_refused(parameters, messages):
    fields = arrays(sampling_parameters=json.dumps(parameters), messages=json.dumps(messages))
    try:
        request = parse_request(fields, LIMITS, Bytes())
    except InvalidRequest:
        return
    assert 1 <= request.max_tokens <= 100 - len(request.prompt_token_ids)
    assert 0 <= request.sampling.temperature <= 100
    assert 0 < request.sampling.top_p <= 1


@given(st.binary(max_size=40), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), st.floats(width=32))
def test_any_tensor_is_either_served_in_range_or_refused(text, ids, temperature):
    for prompt in ({"text_input": text}, {"input_ids": ids}):
        try:
            request = parse(**prompt, temperature=temperature)
        except InvalidRequest:
            continue
        assert all(0 <= token < 256 for token in request.prompt_token_ids)
        assert 0 <= request.sampling.temperature <= 100


def test_a_drafter_that_could_not_be_loaded_is_refused_by_name_and_left_out_as_the_default():
    limits = replace(LIMITS, default_drafter="ngram", failures={"ngram": "no such folder"})
    request = parse_request(arrays(text_input="a", num_draft_tokens=3), limits, Bytes())
    assert (request.drafter, request.num_draft_tokens) == (NO_DRAFTER, 0)
    with pytest.raises(Unavailable, match="drafter 'ngram' could not be loaded: no such folder"):
        parse_request(arrays(text_input="a", drafter="ngram"), limits, Bytes())


def test_limits_come_from_the_configuration_within_the_target():
    config = EngineConfig(drafters="ngram", num_draft_tokens=7, max_tokens=5, max_context=50)
    limits = RequestLimits.from_config(config, max_context=8192, vocab_size=10)
    assert limits == RequestLimits(50, 10, ("ngram",), "ngram", 7, 5)
    assert RequestLimits.from_config(EngineConfig(), 8192, 10).max_context == 8192
