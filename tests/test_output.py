"""Streaming text: valid UTF-8, stop strings across boundaries, the same whatever arrives at once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.output import IncrementalDecoder, OutputStream, StopMatcher
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.core.request import FinishReason, TokenEvent


def decode_bytes(token_ids) -> str:
    """A byte-level vocabulary: token i is byte i."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def request(**more) -> GenerationRequest:
    return GenerationRequest((1,), SamplingParams(), 100, **more)


def groups_of(data: bytes, cuts: list[int]) -> list[tuple[int, ...]]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [tuple(data[a:b]) for a, b in itertools.pairwise(bounds)]


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=30))
def test_characters_appear_whole_however_their_bytes_arrive(text, cuts):
    decoder, shown = IncrementalDecoder(decode_bytes), ""
    for group in groups_of(text.encode(), cuts):
        new = decoder.push(group)
        assert "\ufffd" not in new or "\ufffd" in text
        shown += new
    assert shown + decoder.flush() == text


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=30))
def test_bytes_that_are_no_text_give_what_decoding_at_once_gives(data, cuts):
    decoder, shown = IncrementalDecoder(decode_bytes), ""
    for group in groups_of(data, cuts):
        shown += decoder.push(group)
    shown += decoder.flush()
    shown.encode()
    assert shown == decode_bytes(data)


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=30),
)
def test_nothing_from_the_first_stop_string_on_is_shown(text, stop, cuts):
    matcher, shown, stopped = StopMatcher(stop), "", False
    for group in groups_of(text.encode(), cuts):
        new, stopped = matcher.push(decode_bytes(group))
        shown += new
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    assert stopped == bool(ends)
    if len(stop) == 1:
        assert shown == (text[: ends[0]] if ends else text)
    assert not any(s in shown for s in stop)
    assert text.startswith(shown)


@given(
    text=st.text("ab€", min_size=1, max_size=20),
    stop=st.text("ab€", min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    streaming=st.booleans(),
)
def test_a_stop_string_gives_the_same_text_and_tokens_however_many_come_in_a_step(
    text, stop, cuts, streaming
):
    def run(groups):
        stream, chunks = OutputStream(request(stop=(stop,), stream=streaming), decode_bytes), []
        for i, group in enumerate(groups):
            reason = FinishReason.LENGTH if i == len(groups) - 1 else None
            if chunk := stream.push(TokenEvent(0, group, reason)):
                chunks.append(chunk)
        assert stream.finished
        assert streaming or len(chunks) == 1
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert chunks[-1].num_output_tokens == len(ids)
        return "".join(chunk.text for chunk in chunks), ids, chunks[-1].finish_reason

    data = text.encode()
    assert run(groups_of(data, cuts)) == run([(byte,) for byte in data])


def test_every_chunk_that_is_not_the_last_has_text():
    stream = OutputStream(request(), decode_bytes)
    first, rest = "€".encode()[:2], "€".encode()[2:]
    assert stream.push(TokenEvent(0, tuple(first))) is None
    chunk = stream.push(TokenEvent(0, tuple(rest)))
    assert (chunk.text, chunk.token_ids) == ("€", tuple("€".encode()))


def test_accepted_drafts_behind_a_stop_string_are_not_counted():
    stream = OutputStream(request(stop=("b",)), decode_bytes)
    chunk = stream.push(TokenEvent(0, tuple(b"abcde"), None, num_draft_tokens=4, num_accepted_tokens=4))
    assert (chunk.text, chunk.finish_reason) == ("a", FinishReason.STOP)
    assert (chunk.num_output_tokens, chunk.num_accepted_tokens) == (2, 1)


def test_the_prompt_is_repeated_only_when_asked():
    stream = OutputStream(request(echo=True, prompt_text="Q: "), decode_bytes)
    assert stream.push(TokenEvent(0, tuple(b"x"))).text == "Q: x"
    assert stream.push(TokenEvent(0, tuple(b"y"))).text == "y"


def test_an_error_still_carries_what_was_generated():
    stream = OutputStream(request(stream=False), decode_bytes)
    assert stream.push(TokenEvent(0, tuple(b"ab"))) is None
    chunk = stream.push(TokenEvent(0, (), FinishReason.ERROR, "the target failed"))
    assert (chunk.text, chunk.finish_reason, chunk.error) == ("ab", FinishReason.ERROR, "the target failed")
    assert stream.push(TokenEvent(0, tuple(b"c"))) is None
