"""The servers of a comparison: what was asked for, their processes, starting, freezing and stopping them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from peers_stream import DEFAULT_MODELS, KINDS, Task, send

_SPEC = re.compile(r"(?P<kind>[a-z]+):(?P<url>https?://[^/:]+(?::\d+)?)/?(?::(?P<model>.+))?")
_STOP_TIMEOUT = 60.0  # seconds a server gets to stop by itself; ours lets running requests finish
_GRACE = 5.0  # seconds what it leaves behind gets to end
_PROBE_TIMEOUT = 120.0  # seconds for one token, the first compilation included
_VERSION_PATHS = ("version", "props", "v2")  # of vLLM, llama.cpp and Triton


class PeerError(RuntimeError):
    """A server cannot be used; the message says which and why."""


@dataclass
class PeerServer:
    """One server: where it listens and, if this script started it, its process."""

    name: str
    kind: str  # angelspec or openai
    url: str
    model: str
    command: str | None = None  # starts it; None: it runs already
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of its requests
    process: subprocess.Popen[bytes] | None = None

    def pids(self) -> frozenset[int]:
        """The process that was started, or else the one that listens on the port, and all below it."""
        root = _listener(urlsplit(self.url).port) if self.process is None else self.process.pid
        if root is None:
            return frozenset()
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(root).children(recursive=True)
            return frozenset((root, *(process.pid for process in tree)))
        return frozenset()


def parse_server(text: str) -> PeerServer:
    """NAME=KIND:URL[:model].

    Raises:
        PeerError: it is not of this form, or there is no such kind.
    """
    name, _, spec = text.partition("=")
    match = _SPEC.fullmatch(spec)
    if not name or match is None or match["kind"] not in KINDS:
        kinds = " or ".join(KINDS)
        raise PeerError(
            f"--server must be NAME=KIND:URL[:model] with KIND {kinds} and URL like http://127.0.0.1:8000, "
            f"got '{text}'"
        )
    return PeerServer(name, match["kind"], match["url"], match["model"] or DEFAULT_MODELS[match["kind"]])


def start(server: PeerServer, log: Path) -> None:
    """Run the server's command in a session of its own, its output in a file.

    Raises:
        PeerError: the command cannot be run.
    """
    assert server.command is not None
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            server.process = subprocess.Popen(
                shlex.split(server.command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise PeerError(f"{server.name}: cannot run '{server.command}': {error.strerror}") from None


async def wait_until_ready(session: aiohttp.ClientSession, server: PeerServer, seconds: float) -> None:
    """Wait until one token has been generated.

    Raises:
        PeerError: the server exited, or gave no token in time.
    """
    deadline = time.monotonic() + seconds
    task = Task([{"role": "user", "content": "Hello"}], 1, server.extra)
    while True:
        reply = await send(session, server.kind, server.url, server.model, task, _PROBE_TIMEOUT)
        # A first token may be one without text; a finished generation is all that is asked for here.
        if reply.error is None or reply.finish_reason == "length":
            return
        if server.process is not None and (code := server.process.poll()) is not None:
            raise PeerError(f"{server.name}: it exited with status {code}")
        if server.command is None or time.monotonic() > deadline:
            raise PeerError(f"{server.name}: it generates nothing: {reply.error}")
        await asyncio.sleep(1.0)


async def version(session: aiohttp.ClientSession, server: PeerServer) -> str | None:
    """What the server says of its version, if it does."""
    for path in _VERSION_PATHS:
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, ValueError):
            limit = aiohttp.ClientTimeout(total=10.0)
            async with session.get(f"{server.url}/{path}", timeout=limit) as response:
                answer = await response.json() if response.status == 200 else None
            if isinstance(answer, dict) and (found := answer.get("version") or answer.get("build_info")):
                return str(found)
    return None


def stop(server: PeerServer) -> None:
    """Stop what ``start`` started, with all processes below it."""
    if server.process is None:
        return
    below = [psutil.Process(pid) for pid in server.pids() if psutil.pid_exists(pid)]
    _signal((process.pid for process in below), signal.SIGCONT)
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(_STOP_TIMEOUT)
    for number in (signal.SIGTERM, signal.SIGKILL):
        below = [process for process in below if process.is_running()]
        _signal((process.pid for process in below), number)
        below = psutil.wait_procs(below, timeout=_GRACE)[1]
    server.process.wait()
    server.process = None


@contextmanager
def frozen(servers: Sequence[PeerServer], except_for: PeerServer) -> Iterator[None]:
    """Stop the processes of all servers but one (SIGSTOP) for as long as the block takes."""
    running = except_for.pids()
    pids = frozenset(pid for server in servers for pid in server.pids()) - running
    try:
        _signal(pids, signal.SIGSTOP)
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def maybe_frozen(
    freeze: bool, servers: Sequence[PeerServer], except_for: PeerServer
) -> AbstractContextManager[None]:
    """``frozen`` if asked for."""
    return frozen(servers, except_for) if freeze else contextlib.nullcontext()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _listener(port: int | None) -> int | None:
    """The oldest process that listens on a port of this machine, as far as this user may see."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    found.append((process.create_time(), process.pid))
    return min(found)[1] if found else None
