"""Server-sent events, as far as Triton's generate_stream uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def read_events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream of lines (WHATWG HTML, section 9.2.6).

    Several data lines of one event are joined by newlines; comments and other fields are skipped.  An
    event that the end of the stream cuts off is dropped, as the standard says.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
