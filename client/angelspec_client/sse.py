"""Server-sent events, as far as Triton's generate_stream uses them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_WHOLE_EVENT = re.compile(rb"data: ([^\r\n]*)\n\n")


class EventDecoder:
    """The data of events out of pieces of any size (WHATWG HTML, section 9.2.6).

    Several data lines of one event are joined by newlines; comments and other fields are skipped.  An
    event that the end of the stream cuts off is dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of each event that this piece completes."""
        if not (self._rest or self._data) and (whole := _WHOLE_EVENT.fullmatch(piece)):
            return [whole[1].decode("utf-8", "replace")]  # nearly always, and much cheaper
        events = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


def read_events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream of lines."""
    decoder = EventDecoder()
    for line in lines:
        yield from decoder.feed(line)
