"""The comparison with other servers: its figures against hand-made streams, its errors, its options."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import peers_options
import peers_report
import peers_servers
import peers_stream
from angelspec_client.sse import EventDecoder
from checks import free_ports
from peers_stream import Reply, StreamError, Task
from serving import wait_until

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "Hi"}]


def openai_event(text=None, finish_reason=None, usage=None):
    choices = [] if text is None else [{"delta": {"content": text}, "finish_reason": finish_reason}]
    return {"choices": choices, "usage": usage and {"completion_tokens": usage, "prompt_tokens": 5}}


def angelspec_event(text="", finish_reason=None, usage=None):
    last = {"finish_reason": finish_reason, "num_output_tokens": usage, "num_input_tokens": 5}
    return {"text_output": text, "output_ids": [1], **(last if finish_reason else {})}


def scripted(kind, events, max_tokens=3):
    """The reply to events that come at given times of a fake clock; sent at time 10."""
    now = [10.0]

    async def pieces():
        for seconds, event in events:
            now[0] = seconds
            yield b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"

    reply = Reply(start=10.0)
    asyncio.run(peers_stream.read_stream(kind, pieces(), max_tokens, reply, lambda: now[0]))
    reply.end = now[0]
    return reply


def stream_of(kind, times, finish_reason="length", tokens=3):
    """Events with text at the given times, the last of them ending the generation."""
    make = openai_event if kind == "openai" else angelspec_event
    events = [(at, make("x")) for at in times[:-1]]
    if kind == "openai":
        tail = [(times[-1], make("x", finish_reason)), (times[-1] + 5, make(usage=tokens))]
        return [(10.1, make("")), *events, *tail, (times[-1] + 5, b"[DONE]")]
    return [*events, (times[-1], make("x", finish_reason, tokens))]


# Figures


@pytest.mark.parametrize("kind", peers_stream.KINDS)
def test_figures_of_a_scripted_stream(kind):
    reply = scripted(kind, stream_of(kind, [10.5, 10.7, 11.3]))
    assert (reply.tokens, reply.prompt_tokens, reply.text) == (3, 5, "xxx")
    assert peers_report.tpot_s(reply) == pytest.approx(0.4)  # not the time of the usage that follows
    window = peers_report.summarize([reply])
    assert window["ttft_p50_ms"] == pytest.approx(500)
    assert window["tpot_p50_ms"] == pytest.approx(400)
    assert window["itl_p99_ms"] == pytest.approx(200 + 0.99 * 400)
    assert window["duration_s"] == pytest.approx(reply.end - 10)
    assert (window["counted_by"], window["tokens_per_event"]) == ("server", 1.0)


def test_a_finish_without_text_ends_the_time_per_token():
    events = [(11, openai_event("x")), (12, openai_event("x")), (14, openai_event("", "length"))]
    reply = scripted("openai", [*events, (14, openai_event(usage=3))])
    assert peers_report.tpot_s(reply) == pytest.approx(1.5)


def test_a_server_that_does_not_count_sends_one_token_with_every_event():
    events = [(11 + n, openai_event("x", "length" if n == 2 else None)) for n in range(3)]
    reply = scripted("openai", events)
    assert (reply.output_tokens, reply.tokens) == (None, 3)
    assert peers_report.summarize([reply])["counted_by"] == "events"


def test_several_tokens_in_an_event_are_counted_by_usage():
    reply = scripted("angelspec", stream_of("angelspec", [11, 12], tokens=5), max_tokens=5)
    assert peers_report.tpot_s(reply) == pytest.approx(0.25)
    assert peers_report.summarize([reply])["tokens_per_event"] == 2.5


def test_throughput_is_tokens_of_good_requests_over_the_whole_time():
    good = scripted("openai", stream_of("openai", [11, 12, 13]))
    bad = Reply(start=8.0, end=28.0, error="HTTP 500")
    window = peers_report.summarize([good, bad])
    assert window["tokens_per_second"] == pytest.approx(3 / 20)
    assert (window["requests"], window["failed"], window["first_error"]) == (2, 1, "HTTP 500")
    assert peers_report.summarize([bad])["tokens_per_second"] is None


def test_ratios_are_per_window_and_shown_with_their_spread():
    def windows(server, *rates):
        shared = {"server": server, "concurrency": 4, "failed": 0, "requests": 8}
        return [
            {**shared, "tokens_per_second": rate, "tpot_p50_ms": 1.0, "ttft_p50_ms": 1.0, "itl_p99_ms": None}
            for rate in rates
        ]

    ours, peer = windows("ours", 20.0, 30.0, 40.0), windows("peer", 10.0, 20.0, None)
    assert peers_report.ratios(ours, peer, "tokens_per_second") == [2.0, 1.5]
    assert peers_report.show_ratio([2.0, 1.5, 1.7]) == "1.70 (1.50-2.00)"
    assert peers_report.make_table([*ours, *peer]).row_count == 2


# What counts as failed


@pytest.mark.parametrize("kind", peers_stream.KINDS)
@pytest.mark.parametrize(
    ("finish_reason", "tokens", "message"),
    [("stop", 3, "'stop' instead of 'length'"), ("length", 2, "2 tokens instead of 3")],
)
def test_a_generation_that_ends_otherwise_than_asked_fails(kind, finish_reason, tokens, message):
    with pytest.raises(StreamError, match=message):
        scripted(kind, stream_of(kind, [11, 12, 13], finish_reason, tokens))


@pytest.mark.parametrize("kind", peers_stream.KINDS)
@pytest.mark.parametrize(
    ("event", "message"),
    [({"error": "full"}, "full"), ({"error": {"message": "full"}}, "full"), (b"[1]", "no JSON object")],
)
def test_an_error_event_fails(kind, event, message):
    with pytest.raises(StreamError, match=message):
        scripted(kind, [(11, event)])


def test_a_stream_that_is_cut_fails():
    with pytest.raises(StreamError, match="None"):
        scripted("openai", [(11, openai_event("x"))])


@pytest.mark.parametrize(
    ("path", "timeout", "message"),
    [("busy", 5, "HTTP 503: full"), ("slow", 0.2, "not finished within 0.2 s"), ("good", 5, None)],
)
def test_errors_of_a_real_connection_are_kept_in_the_reply(path, timeout, message):
    async def answer(request):
        if request.path.startswith("/busy"):
            return web.Response(status=503, text="full")
        assert (await request.json())["ignore_eos"] is True
        response = web.StreamResponse()
        await response.prepare(request)
        for _, event in stream_of("openai", [11, 12, 13])[:-1]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(1.0 if request.path.startswith("/slow") else 0.0)
        return response

    async def ask():
        app = web.Application()
        app.router.add_post("/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/{path}"
            reply = await peers_stream.send(session, "openai", url, "m", Task(MESSAGES, 3), timeout)
        await runner.cleanup()
        return reply

    reply = asyncio.run(ask())
    assert reply.error == message
    assert reply.end > reply.start


def test_nobody_listening_is_an_error_of_the_reply():
    async def ask():
        async with aiohttp.ClientSession() as session:
            return await peers_stream.send(session, "openai", "http://127.0.0.1:9", "m", Task(MESSAGES, 3), 5)

    assert asyncio.run(ask()).error


# Server-sent events

texts = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6)


@given(texts, st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_survive_any_cutting_of_the_stream(events, newline, data):
    lines = [line for text in events for line in (": ping", f"data: {text}", "id: 1", "")]
    raw = "".join(line + newline for line in lines).encode()
    decoder, found = EventDecoder(), []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        found += decoder.feed(raw[:size])
        raw = raw[size:]
    assert found == events


def test_data_lines_of_an_event_are_joined_and_a_cut_event_is_dropped():
    assert EventDecoder().feed(b"data: a\ndata:b\n\ndata: c\n") == ["a\nb"]


# Requests and options


def test_both_kinds_are_asked_for_the_same():
    task = Task(MESSAGES, 128, {"drafter": "none"})
    ours, peer = (peers_stream.request_body(kind, "m", task) for kind in peers_stream.KINDS)
    assert json.loads(ours["messages"]) == peer["messages"] == MESSAGES
    shared = {"max_tokens": 128, "temperature": 0.0, "stream": True, "ignore_eos": True, "drafter": "none"}
    assert shared.items() <= ours.items()
    assert shared.items() <= peer.items()


def read(*arguments):
    return peers_options.read_plan(["--server", "a=angelspec:http://127.0.0.1:8000", *arguments], "")


def test_servers_get_their_models_commands_and_bodies():
    arguments = ["--server", "b=openai:http://h:1:org/m", "--start", "b=run -p 1", "--body", 'a={"seed": 1}']
    ours, peer = read(*arguments).servers
    assert (ours.kind, ours.url, ours.model, ours.command) == (
        "angelspec",
        "http://127.0.0.1:8000",
        "angelspec",
        None,
    )
    assert (peer.url, peer.model, peer.command) == ("http://h:1", "org/m", "run -p 1")
    assert (ours.extra, peer.extra) == ({"seed": 1}, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "b=grpc:http://h:1"], "KIND angelspec or openai"),
        (["--server", "a=openai:http://h:1"], "given twice"),
        (["--start", "b=run"], "the name of a --server"),
        (["--body", "a=[1]"], "a JSON object"),
        (["--windows", "0"], "must be at least"),
    ],
)
def test_senseless_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        read(*arguments)
    assert message in capsys.readouterr().err


# Processes

LISTENER = """
import socket, time
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
time.sleep(60)
"""

# Answers a request for one token at once, and no longer one.  Writes its process id into a file.
SLOW_SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0 if body["max_tokens"] == 1 else 60)
        self.send_response(200)
        self.end_headers()
        choice = {"delta": {"content": "x"}, "finish_reason": "length"}
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")

server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
open(sys.argv[2], "w").write(str(os.getpid()))
server.serve_forever()
"""


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for_state(pid, states):
    deadline = time.monotonic() + 10
    while state(pid) not in states:
        assert time.monotonic() < deadline, f"process {pid} is {state(pid)}"
        time.sleep(0.01)


def sleeper(name, tmp_path):
    """A started server that never listens: a shell and a process below it."""
    server = peers_servers.PeerServer(name, "openai", "http://127.0.0.1:9", "m", "sh -c 'sleep 60 & wait'")
    peers_servers.start(server, tmp_path / name)
    deadline = time.monotonic() + 10
    while len(server.pids()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return server


def test_servers_that_are_not_measured_are_frozen_and_all_are_stopped(tmp_path):
    servers = [sleeper(name, tmp_path) for name in ("a", "b")]
    pids = [server.pids() for server in servers]
    with peers_servers.frozen(servers, servers[0]):
        for pid in pids[1]:
            wait_for_state(pid, "T")
        assert all(state(pid) != "T" for pid in pids[0])
    for pid in pids[1]:
        wait_for_state(pid, "SR")
    os.kill(max(pids[0]), signal.SIGSTOP)
    for server in servers:
        peers_servers.stop(server)
    assert not any(os.path.exists(f"/proc/{pid}") and state(pid) != "Z" for both in pids for pid in both)


def test_a_terminated_comparison_wakes_and_stops_its_servers(tmp_path):
    """The first server answers, slowly; the second listens and is frozen meanwhile."""
    servers = tmp_path / "server.py"
    servers.write_text(SLOW_SERVER)
    options = []
    for name, port in zip("ab", free_ports(2), strict=True):
        options += ["--server", f"{name}=openai:http://127.0.0.1:{port}"]
        options += ["--start", f"{name}={sys.executable} {servers} {port} {tmp_path / name}"]
    script = str(ROOT / "scripts" / "benchmark_peers.py")
    process = subprocess.Popen([sys.executable, script, "--freeze", "--concurrency", "1", *options])
    try:
        wait_until(lambda: (tmp_path / "b").exists() and state(int((tmp_path / "b").read_text())) == "T", 60)
        process.terminate()
        assert process.wait(30) == 130
        pids = [int((tmp_path / name).read_text()) for name in "ab"]
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        process.kill()


def test_a_running_server_is_found_by_its_port():
    process = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE)
    try:
        port = int(process.stdout.readline())
        server = peers_servers.PeerServer("a", "openai", f"http://127.0.0.1:{port}", "m")
        assert server.pids() == {process.pid}
    finally:
        process.kill()
        process.wait()


def test_a_server_that_exits_or_cannot_be_run_is_named(tmp_path):
    async def wait(server):
        async with aiohttp.ClientSession() as session:
            await peers_servers.wait_until_ready(session, server, 10)

    server = peers_servers.PeerServer("b", "openai", "http://127.0.0.1:9", "m", "false")
    peers_servers.start(server, tmp_path / "log")
    with pytest.raises(peers_servers.PeerError, match="b: it exited with status 1"):
        asyncio.run(wait(server))
    peers_servers.stop(server)
    server.command = "no-such-program"
    with pytest.raises(peers_servers.PeerError, match="cannot run"):
        peers_servers.start(server, tmp_path / "log")
