"""The records of the sweep over draft lengths: one per length and concurrency, written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import benchmark_report
from angelspec_client import Generation
from angelspec_client.metrics import summarize
from benchmark_report import AR
from load import Window
from sweep_report import Length, show_length

_NEEDED = {
    *("mode", "drafter", "num_draft_tokens", "concurrency", "requests", "failed", "tokens_per_second"),
    *("acceptance_length", "p50_ms", "p99_ms", "ttft_p50_ms", "tpot_p50_ms", "windows", "by_task"),
}


class SweepError(ValueError):
    """The lines of an earlier run cannot be read; the message says which and why."""


def make_cell(drafter: str, length: Length, concurrency: int, windows: Sequence[Window]) -> dict[str, Any]:
    """One line of results.  A fixed length is a mode of its own, "ngram k=4"; auto is the drafter's name."""
    cell = benchmark_report.make_cell(AR if length == 0 else drafter, concurrency, windows, [])
    for name in ("tokens_per_second_windows", "speedup"):
        del cell[name]
    failed, requests = cell.pop("errors"), sum(len(window.requests) for window in windows)
    if length:
        cell["mode"] = f"{drafter} k={show_length(length)}"
    tasks = dict.fromkeys(request.task for window in windows for request in window.requests.values())
    return cell | {
        "num_draft_tokens": length,
        "requests": requests,
        "failed": failed,
        "error_rate": failed / requests,
        "by_task": {task: _figures(windows, task) for task in tasks},
        "windows": [_window_record(window, list(tasks)) for window in windows],
    }


def generations_of(window: Window, task: str) -> list[Generation]:
    """The generations of one task."""
    return [g for number, g in window.generations.items() if window.requests[number].task == task]


def _figures(windows: Sequence[Window], task: str) -> dict[str, Any]:
    summary = asdict(summarize([g for window in windows for g in generations_of(window, task)]))
    wanted = ("requests", "output_tokens", "acceptance_length", "p50_ms", "ttft_p50_ms", "tpot_p50_ms")
    return {name: _rounded(summary[name]) for name in wanted}


def _window_record(window: Window, tasks: Sequence[str]) -> dict[str, Any]:
    by_task = {}
    for task in tasks:
        found = generations_of(window, task)
        by_task[task] = {
            "output_tokens": sum(generation.num_output_tokens for generation in found),
            "request_seconds": _rounded(sum(generation.duration_s for generation in found)),
        }
    return {
        "tokens_per_second": _rounded(window.tokens_per_second),
        "duration_s": _rounded(window.duration_s),
        "requests": len(window.requests),
        "failed": len(window.errors),
        "output_tokens": window.output_tokens,
        "by_task": by_task,
    }


def _rounded(value: float) -> float | None:
    """Four decimals are enough, and JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None


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
