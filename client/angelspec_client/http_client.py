"""Client over HTTP: Triton's generate and generate_stream.

Every request has a connection of its own, because closing it is how a request is cancelled.  Triton
notices that only when it writes: a stream ends with its next chunk, but ``generate`` with its one
response runs to its end on the server.  Where that matters use ``stream(...).read()``.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from angelspec_client.client import DEFAULT_MODEL, Client
from angelspec_client.errors import (
    InvalidRequest,
    RequestTimeout,
    ServerError,
    from_http_status,
    unreachable,
)
from angelspec_client.progress import Response
from angelspec_client.protocol import Outputs, Request, read_json, to_json
from angelspec_client.sse import read_events

DEFAULT_URL = "http://127.0.0.1:8000"


class HttpClient(Client):
    """Synchronous client over HTTP.

    url: http(s)://host:port, the scheme may be left out.  timeout and retries as in GrpcClient.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        super().__init__(model, timeout, retries)
        parts = split_url(url)
        self._connection = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._netloc = parts.netloc
        self._path = model_path(parts, model)

    def close(self) -> None:
        """Nothing to give up: a connection lives as long as its request."""

    def _connect(self, request: Request, timeout_s: float | None) -> _HttpCall:
        connection = self._connection(self._netloc, timeout=timeout_s)
        path = f"{self._path}/{'generate_stream' if request.stream else 'generate'}"
        return _HttpCall(connection, self._netloc, path, to_json(request), timeout_s)


class _HttpCall:
    def __init__(
        self,
        connection: http.client.HTTPConnection,
        server: str,
        path: str,
        body: bytes,
        timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._server = server
        self._path = path
        self._body = body
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._outputs: Iterator[Outputs] | None = None

    def receive(self) -> Response | None:
        try:
            if self._outputs is None:
                self._outputs = self._send()
            outputs = next(self._outputs, None)
            return None if outputs is None else (outputs, time.perf_counter())
        except TimeoutError:
            raise RequestTimeout(f"no complete answer from {self._server} within the timeout") from None
        except OSError as error:
            raise unreachable(self._server, error.strerror or error) from None
        except http.client.BadStatusLine:
            raise unreachable(self._server, "the answer is not HTTP; is it the gRPC port?") from None
        except (http.client.HTTPException, ValueError, AttributeError):
            # The latter two are http.client's way to read from a response that was closed meanwhile.
            raise unreachable(self._server, "it was closed before the answer was complete") from None

    def close(self) -> None:
        # Shutting down first also wakes a thread that is reading, and tells the server at once.
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._response is not None:
            self._response.close()

    def _send(self) -> Iterator[Outputs]:
        self._connection.request(
            "POST", self._path, self._body, {"Content-Type": "application/json", "Connection": "close"}
        )
        self._socket = self._connection.sock
        self._wait()
        response = self._response = self._connection.getresponse()
        if response.headers.get_content_type() == "text/event-stream":
            texts: Iterator[str] = read_events(self._lines(response.readline))
        else:
            texts = iter((response.read().decode("utf-8", "replace"),))
        return (read_response(text, response.status) for text in texts)

    def _lines(self, readline: Callable[[], bytes]) -> Iterator[bytes]:
        while True:
            self._wait()
            line = readline()
            if not line:
                return
            yield line

    def _wait(self) -> None:
        """Let the next read last as long as the request may still take."""
        if self._deadline is not None and self._socket is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)


def split_url(url: str) -> SplitResult:
    """The parts of a server's address.  Raises InvalidRequest: it is none."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"url must be like {DEFAULT_URL}, got '{url}'")
    return parts


def model_path(url: SplitResult, model: str) -> str:
    """Where a model is on the server."""
    return f"{url.path.rstrip('/')}/v2/models/{quote(model, safe='')}"


def read_response(text: str, status: int) -> Outputs:
    """The outputs in the JSON text of one response or event.

    Raises:
        AngelSpecError: it is an error, whatever the status says, or not what Triton answers.
    """
    try:
        event: Any = json.loads(text)
    except ValueError:
        event = None
    if isinstance(event, dict) and "error" in event:
        raise from_http_status(status, str(event["error"]))
    if status != 200:
        raise from_http_status(status, f"the server answered HTTP {status}")
    if not isinstance(event, dict):
        raise ServerError(f"the server's answer is not a JSON object: {text[:80]!r}")
    return read_json(event)
