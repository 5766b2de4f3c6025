"""Client over HTTP for asyncio: Triton's generate and generate_stream.

The cheapest of the clients per token: a whole generation is read, after its end, out of the pieces that
were kept with the times of their arrival.  Every request has a connection of its own, as in http_client,
which says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from typing import cast

from angelspec_client.async_client import AsyncClient
from angelspec_client.client import DEFAULT_MODEL
from angelspec_client.errors import AngelSpecError, RequestTimeout, unreachable
from angelspec_client.http_client import DEFAULT_URL, model_path, read_response, split_url
from angelspec_client.http_response import ResponseReader
from angelspec_client.progress import Response
from angelspec_client.protocol import Request, to_json


class AsyncHttpClient(AsyncClient):
    """Client over HTTP for asyncio.  Arguments as HttpClient."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        super().__init__(model, timeout, retries)
        self._url = split_url(url)
        self._path = model_path(self._url, model)

    async def close(self) -> None:
        """Nothing to give up: a connection lives as long as its request."""

    def _connect(self, request: Request, timeout_s: float | None) -> _AsyncHttpCall:
        body = to_json(request)
        head = (
            f"POST {self._path}/{'generate_stream' if request.stream else 'generate'} HTTP/1.1\r\n"
            f"Host: {self._url.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        secure = self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        return _AsyncHttpCall(self._url.hostname or "", port, secure, head.encode() + body, timeout_s)


_LAST_TRANSFER_CHUNK = b"\r\n0\r\n\r\n"


class _AsyncHttpCall(asyncio.Protocol):
    def __init__(self, host: str, port: int, secure: bool, message: bytes, timeout_s: float | None) -> None:
        self._host = host
        self._port = port
        self._secure = secure
        self._message = message
        self._timeout_s = timeout_s
        self._reader = ResponseReader()
        self._pieces: list[tuple[float, bytes]] = []  # as they arrived, not yet given to the reader
        self._texts: deque[tuple[float, str]] = deque()  # of responses, not yet received
        self._whole = False  # nobody waits for anything but the end
        self._error: AngelSpecError | None = None
        self._ended = False  # nothing more will arrive
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> Response | None:
        await self._open()
        self._read()
        while not self._texts:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            await self._wait()
            self._read()
        arrived_at, text = self._texts.popleft()
        return read_response(text, self._reader.status), arrived_at

    async def arrive(self) -> list[Response]:
        self._whole = True
        await self._open()
        while not self._ended:
            await self._wait()
            self._read()
        responses: list[Response] = []
        with contextlib.suppress(AngelSpecError):  # raised again where its text is received
            for arrived_at, text in self._texts:
                responses.append((read_response(text, self._reader.status), arrived_at))
        for _ in responses:
            self._texts.popleft()
        return responses

    def close(self) -> None:
        self._end(self._cut())

    async def _open(self) -> None:
        if self._transport is not None or self._ended:
            return
        loop = asyncio.get_running_loop()
        if self._timeout_s is not None:
            self._timer = loop.call_later(self._timeout_s, self._on_timeout)
        context = ssl.create_default_context() if self._secure else None
        opening = loop.create_connection(lambda: self, self._host, self._port, ssl=context)
        try:
            await asyncio.wait_for(opening, self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            self._on_timeout()
        except OSError as error:
            self._end(unreachable(self._server, error.strerror or error))

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _read(self) -> None:
        """Read the pieces that have arrived."""
        try:
            for arrived_at, piece in self._pieces:
                self._texts += [(arrived_at, text) for text in self._reader.feed(piece)]
        except ValueError:
            self._end(unreachable(self._server, "the answer is not HTTP; is it the gRPC port?"))
        self._pieces.clear()
        if self._reader.complete:
            self._end()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other event loops have types of their own
        if self._ended:  # it was closed meanwhile
            self._transport.abort()
        else:
            self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        in_the_middle = self._reader.is_stream and not data.endswith(_LAST_TRANSFER_CHUNK)
        if not (self._whole and in_the_middle):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read()
        if not self._ended:
            self._texts += ((time.perf_counter(), text) for text in self._reader.end())
            self._end(None if self._reader.complete else self._cut())

    def _on_timeout(self) -> None:
        self._end(RequestTimeout(f"no complete answer from {self._server} within the timeout"))

    def _end(self, error: AngelSpecError | None = None) -> None:
        if self._ended:
            return
        self._ended, self._error = True, error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cut(self) -> AngelSpecError:
        return unreachable(self._server, "it was closed before the answer was complete")

    @property
    def _server(self) -> str:
        return f"{self._host}:{self._port}"
