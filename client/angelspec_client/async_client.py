"""What the clients for asyncio share: generate and stream over any transport."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from angelspec_client.async_stream import AsyncStream
from angelspec_client.options import Options
from angelspec_client.progress import AsyncCall, Policy
from angelspec_client.protocol import Messages, Request, build_request
from angelspec_client.results import Generation

if TYPE_CHECKING:
    from typing import Self


class AsyncClient(ABC):
    """A client of one server for asyncio; make it and use it inside one event loop."""

    def __init__(self, model: str, timeout: float | None, retries: int) -> None:
        self._model = model
        self._policy = Policy(timeout, retries)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Generation:
        """Generate, and wait for all of it.  As Client.generate."""
        request = build_request(prompt, messages, input_ids, False, Options(**options))
        async with self._start(request, timeout) as stream:
            return await stream.read()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncStream:
        """Generate, and iterate over the chunks as they come.  As Client.stream."""
        return self._start(build_request(prompt, messages, input_ids, True, Options(**options)), timeout)

    @abstractmethod
    async def close(self) -> None:
        """Give up the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    def _connect(self, request: Request, timeout_s: float | None) -> AsyncCall:
        """Send the request."""

    def _start(self, request: Request, timeout: float | None) -> AsyncStream:
        policy = self._policy if timeout is None else dataclasses.replace(self._policy, timeout_s=timeout)
        return AsyncStream(lambda remaining_s: self._connect(request, remaining_s), policy)
