"""Which draft length is best: the choice under a latency limit, what it costs, and tables.

A length is the number of draft tokens of every step, 0 being plain decoding, or None: the server chooses
for each step ("auto").  A cell is a length at a concurrency; cells of one concurrency are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

Cell = Mapping[str, Any]
Length = int | None

COSTS = {"ttft_p50_ms": "TTFT", "p99_ms": "P99"}
"""Times that may get worse while tokens/s rise."""


@dataclass(frozen=True)
class Limit:
    """How slow the slowest requests may be: in ms, or as a multiple of plain decoding's P99."""

    max_p99_ms: float | None = None
    max_p99_ratio: float = 1.1  # counts only without max_p99_ms

    def p99_ms(self, cells: Sequence[Cell]) -> float | None:
        """The limit for the cells of one concurrency; None: plain decoding was not measured, so no limit."""
        if self.max_p99_ms is not None:
            return self.max_p99_ms
        plain = find_cell(cells, 0)
        return None if plain is None or plain["p99_ms"] is None else self.max_p99_ratio * plain["p99_ms"]


def find_cell(cells: Sequence[Cell], length: Length) -> Cell | None:
    """The cell of a length among those of one concurrency."""
    return next((cell for cell in cells if cell["num_draft_tokens"] == length), None)


def within(cell: Cell, limit_ms: float | None) -> bool:
    """Whether a cell keeps the limit: all requests ended well, and P99 is not above it."""
    if cell["failed"] or cell["p99_ms"] is None:
        return False
    return limit_ms is None or cell["p99_ms"] <= limit_ms


def choose_best(cells: Sequence[Cell], limit: Limit) -> Cell | None:
    """Of the cells of one concurrency the one with most tokens/s that keeps the limit; None: none does.

    Of equal ones the shortest draft.
    """
    limit_ms = limit.p99_ms(cells)
    allowed = [cell for cell in cells if within(cell, limit_ms)]
    return max(allowed, key=lambda cell: cell["tokens_per_second"], default=None)


def find_costs(cell: Cell, plain: Cell | None, tolerance: float = 0.03) -> dict[str, float]:
    """Times that a length makes worse although it raises tokens/s: name -> share by which.

    tolerance: shares that are noise, in tokens/s as in times.  Nothing if tokens/s do not rise.
    """
    if plain is None or cell is plain:
        return {}
    if cell["tokens_per_second"] <= (1 + tolerance) * plain["tokens_per_second"]:
        return {}
    costs = {}
    for field, name in COSTS.items():
        if cell[field] is not None and plain[field] and cell[field] > (1 + tolerance) * plain[field]:
            costs[name] = cell[field] / plain[field] - 1
    return costs


def speedups(cell: Cell, plain: Cell | None) -> list[float]:
    """tokens/s relative to plain decoding, window by window."""
    if plain is None:
        return []
    pairs = zip(cell["windows"], plain["windows"], strict=False)
    return [
        mine["tokens_per_second"] / its["tokens_per_second"]
        for mine, its in pairs
        if its["tokens_per_second"]
    ]


def task_speedup(cell: Cell, plain: Cell | None, task: str) -> float | None:
    """How much less time a token of a task takes than in plain decoding; None without figures.

    Requests of all tasks run together, so a task's time per token is the seconds of its requests over
    their output tokens.  The median of the windows.
    """
    if plain is None:
        return None
    ratios = []
    for mine, its in zip(cell["windows"], plain["windows"], strict=False):
        a, b = mine["by_task"].get(task), its["by_task"].get(task)
        if a and b and a["request_seconds"] and a["output_tokens"] and b["output_tokens"]:
            per_token = b["request_seconds"] / b["output_tokens"]
            ratios.append(per_token / (a["request_seconds"] / a["output_tokens"]))
    return statistics.median(ratios) if ratios else None


def by_concurrency(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    """The cells of each concurrency, in their order."""
    groups: dict[int, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["concurrency"], []).append(cell)
    return groups


def show_length(length: Length) -> str:
    """The length as a person writes it."""
    return "auto" if length is None else str(length)


def make_table(cells: Sequence[Cell], limit: Limit) -> Table:
    """All cells for people, as a Markdown table, and what is to be said of them."""
    table = Table(box=MARKDOWN)
    headers = ("C", "draft", "tokens/s", "speed-up", "accept", "TTFT ms", "TPOT ms", "p50 ms", "p99 ms")
    for header in (*headers, ""):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for concurrency, group in by_concurrency(cells).items():
        plain, best, limit_ms = find_cell(group, 0), choose_best(group, limit), limit.p99_ms(group)
        for cell in group:
            times = ("ttft_p50_ms", "tpot_p50_ms", "p50_ms", "p99_ms")
            table.add_row(
                str(concurrency),
                show_length(cell["num_draft_tokens"]),
                f"{cell['tokens_per_second']:.1f}",
                show_spread(speedups(cell, plain)),
                f"{cell['acceptance_length']:.2f}",
                *("" if cell[name] is None else f"{cell[name]:.1f}" for name in times),
                ", ".join(remarks(cell, plain, best, limit_ms)),
            )
    return table


def remarks(cell: Cell, plain: Cell | None, best: Cell | None, limit_ms: float | None) -> list[str]:
    """What is to be said of a cell, the flags among it."""
    said = ["best"] if cell is best else []
    if cell["failed"]:
        said.append(f"{cell['failed']} of {cell['requests']} failed")
    elif not within(cell, limit_ms):
        said.append("P99 over the limit")
    if costs := find_costs(cell, plain):
        said.append(f"faster, but {', '.join(f'{name} {share:+.0%}' for name, share in costs.items())}")
    return said


def make_task_table(cells: Sequence[Cell]) -> Table:
    """How much less time a token of each task takes than in plain decoding; the best length is starred."""
    lengths = list(dict.fromkeys(cell["num_draft_tokens"] for cell in cells))
    table = Table(box=MARKDOWN)
    for header in ("C", "set", *map(show_length, lengths)):
        table.add_column(header, justify="left" if header == "set" else "right", no_wrap=True)
    for concurrency, group in by_concurrency(cells).items():
        plain = find_cell(group, 0)
        for task in dict.fromkeys(task for cell in group for task in cell["by_task"]):
            found = {
                cell["num_draft_tokens"]: ratio
                for cell in group
                if (ratio := task_speedup(cell, plain, task)) is not None
            }
            most = max(found.values(), default=None)
            shown = [
                f"{found[length]:.2f}{'*' if found[length] == most else ''}" if length in found else ""
                for length in lengths
            ]
            table.add_row(str(concurrency), task, *shown)
    return table


def show_spread(values: Sequence[float]) -> str:
    """Median and, of several windows, the smallest and largest: 1.21 (1.15-1.30)."""
    if not values:
        return ""
    spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"
