"""Reading result lines: one JSON object a line.

Lines of others with the basic fields of report_cell.Cell can be read and mixed with our own.  Any line
that does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from report_cell import Cell

MAX_SHOWN_ERRORS = 10


class ResultsError(ValueError):
    """The files cannot be read; the message says which line and why."""


@dataclass(frozen=True)
class Line:
    """Where a cell was read."""

    file: str
    number: int
    cell: Cell


def read_lines(paths: Sequence[Path]) -> list[Line]:
    """All lines of all files.

    Raises:
        ResultsError: a file that cannot be read, no lines, or lines that are no cells: every one of them
            with its number and what is wrong, up to MAX_SHOWN_ERRORS.
    """
    lines: list[Line] = []
    errors: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ResultsError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                lines.append(Line(path.name, number, parse_cell(line)))
            except ResultsError as error:
                errors.append(f"{path}, line {number}: {error}")
    if errors:
        more = len(errors) - MAX_SHOWN_ERRORS
        shown = errors[:MAX_SHOWN_ERRORS] + ([f"and {more} lines more"] if more > 0 else [])
        raise ResultsError("\n".join(shown))
    if not lines:
        raise ResultsError(f"no result lines in {', '.join(str(path) for path in paths)}")
    return lines


def parse_cell(line: str) -> Cell:
    """One line.

    Raises:
        ResultsError: what is wrong with it, on one line.
    """
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ResultsError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise ResultsError(f"a JSON object is expected, not {str(value)[:40]!r}")
    try:
        return Cell.model_validate(value)
    except ValidationError as error:
        raise ResultsError("; ".join(_explain(dict(found)) for found in error.errors()[:3])) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ResultsError(f"{name} is not JSON; null is allowed where a figure is missing")


def _explain(found: dict[str, Any]) -> str:
    """'requests: input should be greater than or equal to 0, found -1'."""
    field = ".".join(str(part) for part in found["loc"])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "missing":
        return f"the field {field} is missing"
    if not field:
        return message
    return f"{field}: {message[0].lower()}{message[1:]}, found {str(found['input'])[:40]!r}"
