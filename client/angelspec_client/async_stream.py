"""The counterpart of stream for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from angelspec_client.errors import AngelSpecError, RequestCancelled, ServerBusy
from angelspec_client.progress import AsyncCall, Policy, Progress, Response
from angelspec_client.results import Chunk, Generation

if TYPE_CHECKING:
    from typing import Self


class AsyncStream(AsyncIterator[Chunk]):
    """The same as Stream for asyncio; use ``async with``, or ``aclose`` when leaving early."""

    def __init__(self, connect: Callable[[float | None], AsyncCall], policy: Policy) -> None:
        self._connect = connect
        self._policy = policy
        self._progress: Progress | None = None
        self._call: AsyncCall | None = None
        self._closed = False
        self._whole = False  # nobody looks at the chunks before the last one is there

    async def __anext__(self) -> Chunk:
        """Raises an AngelSpecError: see errors."""
        progress = self._progress = self._progress or Progress(self._policy)
        if self._closed or progress.complete:
            await self._finish()
            raise StopAsyncIteration
        try:
            return progress.add(await self._receive(progress))
        except BaseException as error:
            cancelled = self._closed and isinstance(error, AngelSpecError)  # elsewhere, while waiting here
            self.close()
            if cancelled:
                raise RequestCancelled("the request was cancelled by this client") from None
            raise

    async def read(self) -> Generation:
        """Wait for the rest and return the whole generation."""
        self._whole = True
        async for _ in self:
            pass
        return self.generation

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What has arrived so far, also after an error."""
        return tuple(self._progress.chunks) if self._progress else ()

    @property
    def generation(self) -> Generation:
        """The whole generation, after its last chunk."""
        return (self._progress or Progress(self._policy)).generation()

    def close(self) -> None:
        """Cancel the request on the server unless it has ended."""
        self._closed = True
        if self._call is not None:
            self._call.close()

    async def aclose(self) -> None:
        """The same as close, for contextlib.aclosing."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _finish(self) -> None:
        if not self._closed and self._call is not None:
            with contextlib.suppress(AngelSpecError):
                await self._call.receive()
        self.close()

    async def _receive(self, progress: Progress) -> Response | None:
        while not self._closed:
            if self._call is None:
                self._call = self._connect(progress.remaining_s())
                arrived = await self._call.arrive() if self._whole else ()
                if self._closed:  # elsewhere, while waiting here
                    break
                for response in arrived[:-1]:
                    progress.add(response)
                if arrived:
                    return arrived[-1]
            try:
                return await self._call.receive()
            except ServerBusy as error:
                delay = progress.backoff_s(error)
            self._call.close()
            self._call = None
            await asyncio.sleep(delay)
        raise RequestCancelled("the request was cancelled by this client")
