"""One running request: chunks as they arrive, retry before the first one, cancellation on leaving."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from angelspec_client.errors import AngelSpecError, RequestCancelled, ServerBusy
from angelspec_client.progress import Call, Policy, Progress, Response
from angelspec_client.results import Chunk, Generation

if TYPE_CHECKING:
    from typing import Self


class Stream(Iterator[Chunk]):
    """Iterator over the chunks of one generation.

    The request is sent when the first chunk is asked for.  ``close``, leaving the ``with`` block and
    dropping the iterator cancel it on the server.
    """

    def __init__(self, connect: Callable[[float | None], Call], policy: Policy) -> None:
        self._connect = connect
        self._policy = policy
        self._progress: Progress | None = None
        self._call: Call | None = None
        self._closed = False

    def __next__(self) -> Chunk:
        """Raises an AngelSpecError: see errors."""
        progress = self._progress = self._progress or Progress(self._policy)
        if self._closed or progress.complete:
            self._finish()
            raise StopIteration
        try:
            return progress.add(self._receive(progress))
        except BaseException as error:
            cancelled = self._closed and isinstance(error, AngelSpecError)  # elsewhere, while waiting here
            self.close()
            if cancelled:
                raise RequestCancelled("the request was cancelled by this client") from None
            raise

    def read(self) -> Generation:
        """Wait for the rest and return the whole generation."""
        for _ in self:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _finish(self) -> None:
        # Reading on to the end of the call instead of resetting it keeps proxies content.
        if not self._closed and self._call is not None:
            with contextlib.suppress(AngelSpecError):
                self._call.receive()
        self.close()

    def _receive(self, progress: Progress) -> Response | None:
        while not self._closed:
            if self._call is None:
                self._call = self._connect(progress.remaining_s())
            try:
                return self._call.receive()
            except ServerBusy as error:
                delay = progress.backoff_s(error)
            self._call.close()
            self._call = None
            time.sleep(delay)
        raise RequestCancelled("the request was cancelled while waiting to be sent again")
