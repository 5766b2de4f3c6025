"""The state of one running request, whatever carries it: clock, attempts, chunks so far."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from angelspec_client.errors import RequestTimeout, ServerBusy, ServerError
from angelspec_client.protocol import Outputs, read_chunk
from angelspec_client.results import Chunk, Generation, assemble

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0


Response = tuple[Outputs, float]
"""What one response brought, and when it arrived, by ``time.perf_counter``."""


class Call(Protocol):
    """One attempt at a request on some transport."""

    def receive(self) -> Response | None:
        """The next response, None at the end.  Raises an AngelSpecError."""

    def close(self) -> None:
        """Cancel the request unless it has ended.  May be called twice and from any thread."""


class AsyncCall(Protocol):
    """The same for asyncio; close returns at once."""

    async def receive(self) -> Response | None: ...

    async def arrive(self) -> Sequence[Response]:
        """Let all of the answer arrive first, where that saves waking up for each response.

        Returns the responses that are there then.  Raises nothing: the rest, and how the answer ended, is
        for receive to say.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Policy:
    """How long a request may take and how often a busy server is asked again."""

    timeout_s: float | None = None  # for the whole request, retries included
    retries: int = 0  # only while the server is busy and nothing was received


class Progress:
    """What both kinds of stream keep: the clock, the chunks so far, the attempts left."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._start = time.perf_counter()
        self._attempt = 0
        self.chunks: list[Chunk] = []

    @property
    def complete(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].usage is not None

    def remaining_s(self) -> float | None:
        if self._policy.timeout_s is None:
            return None
        left = self._start + self._policy.timeout_s - time.perf_counter()
        if left <= 0:
            raise RequestTimeout(f"no complete answer within {self._policy.timeout_s:g} s")
        return left

    def add(self, response: Response | None) -> Chunk:
        if response is None:
            raise ServerError("the server ended the answer before it was complete")
        outputs, arrived_at = response
        self.chunks.append(read_chunk(outputs, arrived_at - self._start))
        return self.chunks[-1]

    def backoff_s(self, error: ServerBusy) -> float:
        """Seconds to wait before the next attempt; raises the error when there is none."""
        left = self.remaining_s()
        delay = backoff_s(self._attempt)
        if self.chunks or self._attempt >= self._policy.retries or (left is not None and delay >= left):
            raise error
        self._attempt += 1
        return delay

    def generation(self) -> Generation:
        if not self.complete:
            raise ServerError("the generation is not complete")
        return assemble(tuple(self.chunks))


def backoff_s(attempt: int) -> float:
    """A random delay up to a bound that doubles with every attempt, so that clients spread out."""
    return random.uniform(0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**attempt))
