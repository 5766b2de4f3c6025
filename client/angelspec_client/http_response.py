"""An HTTP/1.1 response out of the pieces in which it arrives (RFC 9112), for one request per connection."""

from __future__ import annotations

import http.client
import io

from angelspec_client.sse import EventDecoder


class ResponseReader:
    """What ``generate`` and ``generate_stream`` answer: texts that are each the JSON of one response."""

    def __init__(self) -> None:
        self.status = 0  # 0: the head is not there yet
        self.complete = False  # nothing more will come
        self._buffer = b""  # of the head, later of a transfer chunk
        self._chunked = False
        self._bytes_left: int | None = None  # of a body of known length
        self._events: EventDecoder | None = None  # of a stream of events, else the body is one text
        self._body = b""

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self._events is not None

    def feed(self, piece: bytes) -> list[str]:
        """The texts that this piece completes.

        Raises:
            ValueError: it is not HTTP.
        """
        if self.complete:
            return []
        if self.status == 0:
            head, end, piece = (self._buffer + piece).partition(b"\r\n\r\n")
            self._buffer = b"" if end else head
            if not end and not (b"HTTP/"[: len(head)] == head[:5]):
                raise ValueError("the answer is not HTTP")
            if not end:
                return []
            self._read_head(head)
        data = self._unchunk(piece) if self._chunked else self._count(piece)
        if self._events is not None:
            return self._events.feed(data)
        self._body += data
        return [self._body.decode("utf-8", "replace")] if self.complete else []

    def end(self) -> list[str]:
        """The same at the end of the connection, which may be the end of the answer."""
        if self.status == 0 or self._chunked or self._bytes_left:
            return []  # cut off
        was_complete, self.complete = self.complete, True
        return [] if was_complete or self._events else [self._body.decode("utf-8", "replace")]

    def _read_head(self, head: bytes) -> None:
        first, _, fields = head.partition(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError("the answer is not HTTP")
        self.status = int(rest[:3])
        headers = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
        self._chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
        if not self._chunked and "Content-Length" in headers:
            self._bytes_left = int(headers["Content-Length"])
        if headers.get_content_type() == "text/event-stream":
            self._events = EventDecoder()

    def _count(self, piece: bytes) -> bytes:
        if self._bytes_left is not None:
            self._bytes_left -= len(piece)
            self.complete = self._bytes_left <= 0
        return piece

    def _unchunk(self, piece: bytes) -> bytes:
        """The data of the transfer chunks that are there as a whole."""
        buffer, at, data = self._buffer + piece, 0, b""
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line_end].partition(b";")[0], 16)
            begin, end = line_end + 2, line_end + 2 + size
            if size == 0:
                self.complete = True
                break
            if len(buffer) < end + 2:
                break
            data += buffer[begin:end]
            at = end + 2
        self._buffer = buffer[at:]
        return data
