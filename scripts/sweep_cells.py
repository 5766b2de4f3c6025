"""The records of the sweep over draft lengths: one per length and concurrency, written and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import experiment_cells
from benchmark_report import AR
from experiment_cells import Measured
from load import Window
from sweep_report import Length

_NEEDED = {
    *("mode", "drafter", "num_draft_tokens", "concurrency", "requests", "failed", "tokens_per_second"),
    *("acceptance_length", "p50_ms", "p99_ms", "ttft_p50_ms", "tpot_p50_ms", "windows", "by_task"),
}


class SweepError(ValueError):
    """The lines of an earlier run cannot be read; the message says which and why."""


def make_cell(drafter: str, length: Length, concurrency: int, windows: Sequence[Window]) -> dict[str, Any]:
    """One line of results.  A fixed length is a mode of its own, "ngram k=4"; auto is the drafter's name."""
    measured = [Measured(window, None, {}) for window in windows]
    used = AR if length == 0 else drafter
    cell = experiment_cells.make_cell(used, concurrency, measured)
    mode = f"{drafter} k={length}" if length else cell["mode"]
    return cell | {"mode": mode, "drafter": used, "num_draft_tokens": length}


def read_cells(file: Path) -> list[dict[str, Any]]:
    """What an earlier run wrote.  Of equal cells the last counts.

    Raises:
        SweepError: the file cannot be read, or a line is none of the sweep.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from None
    cells: dict[tuple[int, Length], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cell = json.loads(line)
        except ValueError as error:
            raise SweepError(f"{file}:{number} is not JSON: {error}") from None
        if not isinstance(cell, dict) or (missing := _NEEDED - cell.keys()):
            fields = ", ".join(sorted(missing)) if isinstance(cell, dict) else "everything"
            raise SweepError(f"{file}:{number} is no line of a sweep: it lacks {fields}")
        cells[cell["concurrency"], cell["num_draft_tokens"]] = cell
    if not cells:
        raise SweepError(f"{file} holds no lines")
    if len(drafters := {cell["drafter"] for cell in cells.values()} - {AR}) > 1:
        raise SweepError(f"{file} holds sweeps of {', '.join(sorted(drafters))}; it must be one")
    return list(cells.values())
