"""Closed-loop load on a running server: C requests in flight until all are answered.

    async def measure() -> Window:
        sender = connect("127.0.0.1:8000", "http")
        await warm_up(sender, requests, 16)
        return await run_window(sender, requests, 16)

    window = run_loop(measure())

Every request is streamed and carries its own options, so that one window may mix tasks, lengths and
drafters.  angelspec_client.metrics turns the generations of a window into figures.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from angelspec_client import AngelSpecError, AsyncGrpcClient, AsyncHttpClient, Generation, ServerError
from angelspec_client.async_client import AsyncClient

DEFAULT_SERVERS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
PROTOCOLS = tuple(DEFAULT_SERVERS)
WARM_UP_TOKENS = 8
MAX_WARM_UP_REQUESTS = 8
WHOLE = ("stop", "eos", "length")
"""Reasons to end of a generation that was not cut."""
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One request of a window."""

    number: int  # the same number is the same prompt and options but the drafter's, whatever the mode
    prompt: Sequence[Mapping[str, Any]]  # chat messages
    task: str = ""  # the set it comes from
    options: Mapping[str, Any] = field(default_factory=dict)  # as the client's Options


@dataclass
class Window:
    """What one mode did at one concurrency, once."""

    generations: dict[int, Generation] = field(default_factory=dict)  # by the number of the request
    errors: list[AngelSpecError] = field(default_factory=list)
    duration_s: float = 0.0
    compared: int = 0  # generations whose request had been answered before, in any mode
    identical: int = 0  # those of them with the same tokens
    requests: dict[int, Request] = field(default_factory=dict)  # all that were sent, by number
    cpu_s: float = 0.0  # processor time of this process meanwhile: what the load itself costs

    @property
    def output_tokens(self) -> int:
        """Of the requests that ended well."""
        return sum(generation.num_output_tokens for generation in self.generations.values())

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests over the time until the last was done."""
        return self.output_tokens / self.duration_s


class Sender(Protocol):
    """Sends one request and waits for all of it, streamed."""

    async def send(self, request: Request) -> Generation:
        """Raises AngelSpecError."""

    async def close(self) -> None:
        """Give the connection up."""


class ClientSender:
    """Sends over a client of the client library."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def send(self, request: Request) -> Generation:
        return await self._client.stream(messages=request.prompt, **request.options).read()

    async def close(self) -> None:
        await self._client.close()


def connect(server: str, protocol: str = "grpc", *, timeout: float = 600.0) -> Sender:
    """A sender to server, a host:port; make it and use it inside one event loop.

    protocol: grpc or http; http costs this process a sixth per token.  timeout: seconds per request.
    """
    client = AsyncHttpClient if protocol == "http" else AsyncGrpcClient
    return ClientSender(client(server, timeout=timeout))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the loop that costs least per token: uvloop's, where it is installed."""
    if find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


async def run_window(sender: Sender, requests: Sequence[Request], concurrency: int) -> Window:
    """Send all requests in their order, at most concurrency of them at a time.

    A request that does not bring all it asked for is an error of the window, not a generation.
    """
    window = Window(requests={request.number: request for request in requests})
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            try:
                generation = await sender.send(request)
                check_whole(generation, request)
            except AngelSpecError as error:
                window.errors.append(error)
            else:
                window.generations[request.number] = generation

    with garbage_kept():
        start, cpu_start = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        window.duration_s, window.cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return window


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Meanwhile no search for garbage, which would go through all answers again and again.

    It would be half of what the load costs, and stand still for milliseconds amid the measurement.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def warm_up(
    sender: Sender,
    requests: Sequence[Request],
    concurrency: int,
    *,
    limit: int = MAX_WARM_UP_REQUESTS,
    max_tokens: int = WARM_UP_TOKENS,
) -> None:
    """Send the first requests, at most limit, cut short.  Raises AngelSpecError when none is answered."""
    short = []
    for request in requests[: min(concurrency, limit)]:
        tokens = min(max_tokens, request.options.get("max_tokens", max_tokens))
        short.append(replace(request, options={**request.options, "max_tokens": tokens}))
    window = await run_window(sender, short, concurrency)
    if not window.generations:
        raise window.errors[0]


def check_whole(generation: Generation, request: Request) -> None:
    """Raises ServerError for a generation that was cut: by its reason to end, or by missing tokens."""
    if generation.finish_reason not in WHOLE:
        raise ServerError(f"a generation ended with '{generation.finish_reason}'")
    count, wanted = generation.num_output_tokens, request.options.get("max_tokens")
    if request.options.get("ignore_eos") and wanted is not None and count < wanted:
        raise ServerError(f"a generation has {count} of {wanted} tokens")
    if len(generation.token_ids) != count:
        raise ServerError(f"a generation of {count} tokens brought {len(generation.token_ids)}")
