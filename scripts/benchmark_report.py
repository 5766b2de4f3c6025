"""What the benchmark reports: one cell per mode and concurrency, and a table of them."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from angelspec_client.metrics import summarize
from load import Window

AR = "none"
"""The drafter name of plain autoregressive decoding."""


@dataclass(frozen=True)
class Answers:
    """The first answer to every request, to compare later ones with."""

    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the number of the request

    def compare(self, window: Window) -> None:
        """Count in the window how many answers agree with the first ones, and keep those that are new."""
        for number, generation in window.generations.items():
            if number in self.token_ids:
                window.compared += 1
                window.identical += self.token_ids[number] == generation.token_ids
            else:
                self.token_ids[number] = generation.token_ids


def make_cell(
    mode: str, concurrency: int, windows: Sequence[Window], baseline: Sequence[Window]
) -> dict[str, Any]:
    """The figures of a mode at a concurrency.

    Counts and percentiles are over all windows, tokens_per_second is the median of the windows, and
    speedup the median of their ratios to the window of plain decoding next to them; None without one.
    """
    rates = [window.tokens_per_second for window in windows]
    ratios = [
        rate / base.tokens_per_second for rate, base in zip(rates, baseline, strict=False) if base.generations
    ]
    summary = summarize([g for window in windows for g in window.generations.values()])
    figures = {
        "mode": "ar" if mode == AR else mode,
        "drafter": mode,
        "concurrency": concurrency,
        **asdict(summary),
        "duration_s": sum(window.duration_s for window in windows),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_windows": rates,
        "speedup": statistics.median(ratios) if ratios else None,
        "identical": sum(window.identical for window in windows),
        "compared": sum(window.compared for window in windows),
        "errors": sum(len(window.errors) for window in windows),
    }
    return rounded(figures)


def make_table(cells: Sequence[dict[str, Any]]) -> Table:
    """The cells for people, as a Markdown table: p50 in ms, accept in output tokens per step."""
    table = Table(box=MARKDOWN)
    headers = ("C", "mode", "tokens/s", "speed-up", "accept", "latency", "p99", "TTFT", "ITL", "TPOT")
    for header in (*headers, "errors", "identical"):
        table.add_column(header, justify="left" if header == "mode" else "right", no_wrap=True)
    for cell in cells:
        times = ("p50_ms", "p99_ms", "ttft_p50_ms", "itl_p50_ms", "tpot_p50_ms")
        table.add_row(
            str(cell["concurrency"]),
            cell["mode"],
            f"{cell['tokens_per_second']:.1f}",
            "" if cell["speedup"] is None else f"{cell['speedup']:.2f}",
            f"{cell['acceptance_length']:.2f}",
            *("" if cell[name] is None else f"{cell[name]:.1f}" for name in times),
            str(cell["errors"]),
            f"{cell['identical']}/{cell['compared']}",
        )
    return table


def describe_machine() -> dict[str, Any]:
    """The machine the client runs on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }


def to_line(record: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def rounded(value: Any) -> Any:
    """Four decimals are enough, and JSON has no NaN."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
