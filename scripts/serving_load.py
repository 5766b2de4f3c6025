"""Requests that the measurements of a running server send, over the client library's streams.

Prompts are random token ids: their length is exact, and no two share a prefix by accident.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_client import AsyncGrpcClient, AsyncStream, Generation

NUM_IDS = 8000
"""Prompts use the token ids below this, but not the first few, which may be special ones."""
FIRST_ID = 100
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Prompts:
    """Random prompts, different on every call."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def tokens(self, count: int) -> list[int]:
        """So many token ids."""
        return self._random.integers(FIRST_ID, NUM_IDS, count).tolist()

    def length(self, low: int, high: int) -> int:
        """A length between low and high, short ones more often."""
        return int(np.exp(self._random.uniform(np.log(low), np.log(high))))


@dataclass
class Arrivals:
    """When the tokens of one stream arrived, by ``time.perf_counter``."""

    times_s: list[float] = field(default_factory=list)  # of every chunk with tokens
    counts: list[int] = field(default_factory=list)  # tokens in it

    async def follow(self, stream: AsyncStream) -> None:
        """Note all chunks of a stream until it ends."""
        async for chunk in stream:
            if chunk.token_ids:
                self.times_s.append(time.perf_counter())
                self.counts.append(len(chunk.token_ids))

    def gaps(self, begin: float, end: float) -> NDArray[np.float64]:
        """Seconds before each token whose gap touches the time from begin to end.  [num_tokens]"""
        times, counts = np.array(self.times_s), np.array(self.counts, np.int64)
        touches = (times[1:] > begin) & (times[:-1] < end)
        counts = counts[1:][touches]
        return np.repeat(np.diff(times)[touches] / counts, counts)


async def time_to_first_token(client: AsyncGrpcClient, tokens: Sequence[int], drafter: str = "none") -> float:
    """Seconds until the one token that is asked for arrives."""
    async with client.stream(input_ids=tokens, max_tokens=1, drafter=drafter, **OPTIONS) as stream:
        return (await stream.read()).ttft_s


async def measure_prefix(
    client: AsyncGrpcClient, prompts: Prompts, num_tokens: int, repeats: int, ending: int = 8
) -> list[tuple[float, float]]:
    """(cold, warm) times to the first token of prompts with the same long prefix and another ending."""
    pairs = []
    for _ in range(repeats):
        prefix = prompts.tokens(num_tokens)
        cold = await time_to_first_token(client, [*prefix, *prompts.tokens(ending)])
        warm = await time_to_first_token(client, [*prefix, *prompts.tokens(ending)])
        pairs.append((cold, warm))
    return pairs


@dataclass(frozen=True)
class Fairness:
    """Inter-token seconds of running streams, and what the long prompt beside them waited."""

    alone: NDArray[np.float64]  # [num_tokens] while nothing else ran
    beside: NDArray[np.float64]  # [num_tokens] while a long prompt was computed
    ttft_s: list[float]  # of the long prompts


async def measure_fairness(
    client: AsyncGrpcClient,
    prompts: Prompts,
    num_streams: int,
    num_tokens: int,
    repeats: int,
    drafter: str,
    pause_s: float = 2.0,
) -> Fairness:
    """Let streams run, and send long prompts beside them, with as long pauses between."""
    streams = [
        client.stream(input_ids=prompts.tokens(16), max_tokens=4000, drafter=drafter, **OPTIONS)
        for _ in range(num_streams)
    ]
    arrivals = [Arrivals() for _ in streams]
    tasks = [asyncio.create_task(a.follow(s)) for a, s in zip(arrivals, streams, strict=True)]
    while any(len(each.times_s) < 5 for each in arrivals):
        await asyncio.sleep(0.05)
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
    alone, beside, ttft_s = [], [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        await asyncio.sleep(pause_s)
        middle = time.perf_counter()
        ttft_s.append(await time_to_first_token(client, prompts.tokens(num_tokens)))
        end = time.perf_counter()
        await asyncio.sleep(0.5)  # the gap that the first token fell into ends
        alone += [each.gaps(begin, middle - 0.001) for each in arrivals]
        beside += [each.gaps(middle, end) for each in arrivals]
    for stream in streams:
        stream.close()
    await asyncio.gather(*tasks, return_exceptions=True)  # they were cancelled
    return Fairness(np.concatenate(alone), np.concatenate(beside), ttft_s)


async def run_round(
    client: AsyncGrpcClient, prompts: Prompts, concurrency: int, num_requests: int, longest: int
) -> list[Generation]:
    """Requests of mixed lengths, so many at a time; every one must end well."""
    waiting = iter(range(num_requests))
    generations = []

    async def work() -> None:
        for _ in waiting:
            tokens, count = prompts.tokens(prompts.length(16, longest)), prompts.length(8, 64)
            async with client.stream(input_ids=tokens, max_tokens=count, **OPTIONS) as stream:
                generations.append(await stream.read())

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return generations


async def measure_overhead(
    client: AsyncGrpcClient, stats_url: str, prompts: Prompts, num_streams: int, tokens: int = 96
) -> tuple[float, float]:
    """Seconds of a step outside the target, and of a whole step, while so many streams decode without drafts.

    stats_url: where Triton counts the target's requests and the time they took.
    """
    streams = [Arrivals() for _ in range(num_streams)]
    options = OPTIONS | {"max_tokens": tokens, "drafter": "none"}
    begun = [client.stream(input_ids=prompts.tokens(20), **options) for _ in streams]
    tasks = [asyncio.create_task(each.follow(stream)) for each, stream in zip(streams, begun, strict=True)]
    seen = []
    for count in (tokens // 4, 3 * tokens // 4):  # all have begun, none has ended
        while any(sum(each.counts) < count for each in streams):
            await asyncio.sleep(0.001)
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(stats_url).read())
        (model,) = json.loads(text)["model_stats"]
        success = model["inference_stats"]["success"]
        seen.append((time.perf_counter(), success["count"], success["ns"] * 1e-9))
    await asyncio.gather(*tasks)
    (begin, steps_before, busy_before), (end, steps, busy) = seen
    num_steps = steps - steps_before
    return (end - begin - (busy - busy_before)) / num_steps, (end - begin) / num_steps
