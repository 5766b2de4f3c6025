"""Helpers of the tests that talk to a real server."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import server_processes
from angelspec_client import Generation, Stream
from server import ServerOptions, TritonServer

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "List the numbers from one to ten, then list them again."}]


class Endpoint:
    """Raw HTTP of a running server, to see what a client without our library sees."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.options.grpc_port}"

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.options.http_port}"

    def generate(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST /generate: (status, JSON)."""
        url = self.options.url(self.options.http_port, "v2/models/angelspec/generate")
        try:
            with urllib.request.urlopen(url, json.dumps(fields).encode(), timeout=120) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def open_stream(self, **fields: Any) -> tuple[http.client.HTTPConnection, Iterator[dict[str, Any]]]:
        """POST /generate_stream: the connection, to be cut, and its events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.options.http_port, timeout=120)
        body = json.dumps({"stream": True, **fields})
        connection.request("POST", "/v2/models/angelspec/generate_stream", body)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        assert reply.headers["Content-Type"].startswith("text/event-stream")

        def events() -> Iterator[dict[str, Any]]:
            for line in reply:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:].decode("utf-8", errors="strict"))

        return connection, events()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples; ``label`` must occur in a sample's labels."""
        url = self.options.url(self.options.metrics_port, "metrics")
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
        samples = re.findall(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in samples if label in labels)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def read_while_killing(server: TritonServer, model: str, streams: Sequence[Stream]) -> list[Generation]:
    """Read streams to their end, killing a model's process once all have begun; afterwards it has another."""
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(stream.read) for stream in streams]
        wait_until(lambda: all(len(stream.chunks) > 5 for stream in streams))
        assert not any(future.done() for future in running)
        victim = stub_pid(server, model)
        os.kill(victim, signal.SIGKILL)
        results = [future.result(timeout=120) for future in running]
    assert stub_pid(server, model) != victim
    return results


def stub_pid(server: TritonServer, model: str) -> int:
    """Process id of a model's process."""
    return server_processes.stub_pid(server.pid, model)
