"""The asyncio client over HTTP: responses in pieces of any size, and a scripted server that misbehaves."""

import asyncio
import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_client import (
    AngelSpecError,
    AsyncHttpClient,
    ConnectionFailed,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
)
from angelspec_client.http_response import ResponseReader

LAST = {
    "finish_reason": "length",
    "num_input_tokens": 7,
    "num_output_tokens": 3,
    "seed": 5,
    "total_draft_tokens": 4,
    "total_accepted_draft_tokens": 1,
    "text_output": "c",
    "output_ids": 3,
}
CHUNK = {"text_output": "ab", "output_ids": [1, 2]}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def transfer_chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(record):
    return transfer_chunk(b"data: " + json.dumps(record).encode() + b"\n\n")


def whole(status, body, kind="application/json"):
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# Responses in pieces


def feed(message, cuts):
    """The texts of a message that arrives cut at the given places."""
    reader, texts = ResponseReader(), []
    places = [0, *sorted(cut % (len(message) + 1) for cut in cuts), len(message)]
    for begin, end in itertools.pairwise(places):
        texts += reader.feed(message[begin:end])
    return texts, reader


cuts = st.lists(st.integers(0, 10_000), max_size=40)


@given(cuts, st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=6))
def test_a_stream_of_events_reads_the_same_however_it_is_cut(cuts, texts):
    records = [{"text_output": text} for text in texts]
    texts, reader = feed(STREAM_HEAD + b"".join(map(event, records)) + END, cuts)
    assert [json.loads(text) for text in texts] == records
    assert reader.complete
    assert reader.status == 200


@given(cuts)
def test_an_answer_of_known_length_reads_the_same_however_it_is_cut(cuts):
    texts, reader = feed(whole(400, '{"error": "größer"}'.encode()), cuts)
    assert texts == ['{"error": "größer"}']
    assert (reader.complete, reader.status) == (True, 400)


@given(cuts)
def test_an_answer_without_a_length_ends_with_the_connection(cuts):
    texts, reader = feed(b"HTTP/1.1 502 Bad\r\n\r\nnope", cuts)
    assert (texts, reader.complete) == ([], False)
    assert reader.end() == ["nope"]
    assert reader.complete


@pytest.mark.parametrize("message", [STREAM_HEAD + event(CHUNK), whole(200, b"abc")[:-1], b"HTTP/1.1 2"])
def test_an_answer_that_is_cut_off_is_never_complete(message):
    reader = ResponseReader()
    reader.feed(message)
    assert reader.end() == []
    assert not reader.complete


@pytest.mark.parametrize("message", [b"\x00\x00\x12\x04", b"PRI * HTTP/2.0\r\n\r\n", b"SSH-2.0\r\n\r\n"])
def test_what_is_not_http_is_refused(message):
    with pytest.raises(ValueError, match="not HTTP"):
        ResponseReader().feed(message)


# A scripted server


def talk(script, use):
    """Serve every connection by ``script(writer, request)``, and run ``use(client, connections)``."""
    connections = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        connections.append({"head": head, "body": json.loads(await reader.readexactly(length))})
        try:
            await script(writer)
            connections[-1]["left"] = await asyncio.wait_for(reader.read(), 5) == b""
        except ConnectionError:
            connections[-1]["left"] = True
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, AsyncHttpClient(f"127.0.0.1:{port}") as client:
            result = await use(client, connections)
            await asyncio.sleep(0.05)  # let the server notice what the client did last
            return result

    return asyncio.run(main()), connections


def sends(*pieces, pause=0.0, close=True):
    async def script(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        if close:
            writer.close()

    return script


async def read(client, _):
    try:
        return await client.stream("hi", max_tokens=3).read()
    except AngelSpecError as error:
        return error


async def iterate(client, _):
    try:
        return [chunk.text async for chunk in client.stream("hi", max_tokens=3)]
    except AngelSpecError as error:
        return error


def test_a_stream_is_read_whole_or_chunk_by_chunk():
    script = sends(STREAM_HEAD, event(CHUNK), event(LAST) + END)
    generation, connections = talk(script, read)
    assert (generation.text, generation.token_ids, generation.seed) == ("abc", (1, 2, 3), 5)
    assert connections[0]["body"]["max_tokens"] == 3
    assert b"POST /v2/models/angelspec/generate_stream HTTP/1.1\r\n" in connections[0]["head"]
    assert talk(script, iterate)[0] == ["ab", "c"]


def test_a_whole_generation_still_knows_when_each_chunk_arrived():
    script = sends(STREAM_HEAD + event(CHUNK), event(CHUNK), event(LAST), END, pause=0.1)
    generation, _ = talk(script, read)
    first, second, third = (chunk.time_s for chunk in generation.chunks)
    assert 0 < first < 0.09
    assert second - first == pytest.approx(0.1, abs=0.05)
    assert third - second == pytest.approx(0.1, abs=0.05)


def test_a_server_that_keeps_the_connection_open_does_not_delay_the_end():
    begin = time.monotonic()
    generation, connections = talk(sends(STREAM_HEAD, event(LAST) + END, close=False), read)
    assert generation.text == "c"
    assert time.monotonic() - begin < 2
    assert connections[0]["left"]


@pytest.mark.parametrize("use", [read, iterate])
@pytest.mark.parametrize(
    ("pieces", "kind", "text"),
    [
        ([STREAM_HEAD, event(CHUNK), event({"error": "the target failed"}) + END], ServerError, "failed"),
        ([whole(400, b'{"error": "top_p must be in 0..1"}')], InvalidRequest, "top_p"),
        ([STREAM_HEAD, event(CHUNK)], ConnectionFailed, "closed before"),
        ([STREAM_HEAD, event(CHUNK) + END], ServerError, "ended the answer"),
        ([], ConnectionFailed, "closed before"),
        ([b"\x00\x00\x12\x04\x00\x00"], ConnectionFailed, "not HTTP"),
        ([whole(502, b"<html>", "text/html")], ServerError, "HTTP 502"),
    ],
)
def test_failures_are_told_apart(use, pieces, kind, text):
    error, _ = talk(sends(*pieces), use)
    assert isinstance(error, kind)
    assert text in str(error)


def test_a_timeout_bounds_the_whole_request():
    async def use(client, _):
        with pytest.raises(RequestTimeout, match="within the timeout"):
            await client.stream("hi", timeout=0.2).read()

    _, connections = talk(sends(STREAM_HEAD, event(CHUNK), pause=5.0, close=False), use)
    assert len(connections) == 1


def test_leaving_a_stream_closes_its_connection():
    async def use(client, _):
        async with client.stream("hi") as stream:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    _, connections = talk(sends(STREAM_HEAD, event(CHUNK), close=False), use)
    assert connections[0]["left"]


def test_closing_wakes_who_reads_the_whole():
    async def use(client, _):
        stream = client.stream("hi")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        with pytest.raises(RequestCancelled):
            await stream.read()

    talk(sends(STREAM_HEAD, event(CHUNK), close=False), use)


def test_no_server_is_a_failed_connection():
    async def use():
        async with AsyncHttpClient("127.0.0.1:9") as client:
            await client.stream("hi").read()

    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:9"):
        asyncio.run(use())


def test_a_generation_in_one_piece():
    async def use(client, _):
        return await client.generate("hi")

    generation, connections = talk(sends(whole(200, json.dumps(LAST).encode())), use)
    assert generation.text == "c"
    assert b"/v2/models/angelspec/generate HTTP/1.1" in connections[0]["head"]
