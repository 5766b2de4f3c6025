"""Cells against plain decoding (AR): paired windows, speed-ups with their spread, means, cost.

Modes took turns window by window, so window i of a mode and window i of AR ran next to each other under
the same conditions: a speed-up is the median over i of rate_i / AR rate_i, its spread their smallest and
largest.  A task's speed-up is the same with its time per output token, sum of request seconds / sum of
output tokens, AR's over the mode's, because mixed requests share the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from report_cell import Cell, Window
from report_records import Line

PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "DFly-8": {4: 1.98, 8: 2.02, 16: 2.22, 32: 2.40, 64: 2.11},
    "DFlash-8": {4: 1.79, 8: 1.82, 16: 1.99, 32: 2.15, 64: 1.89},
    "MTP-3": {4: 1.60, 8: 1.66, 16: 1.64, 32: 1.86, 64: 2.08},
}
"""Mean speed-up over AR of six task sets by concurrency, as published for AngelSpec."""

PUBLISHED_CONDITIONS = "a 295B target on 8 H20 GPUs, temperature 1, six task sets"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with their smallest and largest."""

    value: float
    low: float
    high: float
    pairs: int  # 1: no spread is known

    @property
    def judged(self) -> str:
        """gain or loss where all windows agree, open where the spread includes 1, single without one.

        Two decimals count, as they are shown: 1.00 is 1.
        """
        if self.pairs < 2:
            return "single"
        return "gain" if round(self.low, 2) > 1 else "loss" if round(self.high, 2) < 1 else "open"

    def __str__(self) -> str:
        """1.42x (1.38-1.47)."""
        spread = f" ({self.low:.2f}-{self.high:.2f})" if self.pairs > 1 else ""
        return f"{self.value:.2f}x{spread}"


@dataclass(frozen=True)
class Comparison:
    """One cell of a mode next to that of AR."""

    series: str  # the mode, and the experiment where several measured it
    cell: Cell
    base: Cell

    @property
    def concurrency(self) -> int:
        return self.cell.concurrency

    @property
    def windows(self) -> list[tuple[Window, Window]]:
        """Windows that ran next to each other: none where the sides come from different experiments."""
        if self.cell.experiment != self.base.experiment:
            return []
        return list(zip(self.cell.windows or (), self.base.windows or (), strict=False))

    @cached_property
    def speedup(self) -> Ratio | None:
        """None when AR produced nothing."""
        rates = [(ours.rate, base.rate) for ours, base in self.windows]
        return paired(rates or [(self.cell.rate, self.base.rate)])

    @cached_property
    def by_task(self) -> dict[str, Ratio]:
        """Speed-up of every task that both sides have in their windows."""
        tasks = dict.fromkeys(task for ours, _ in self.windows for task in ours.by_task or {})
        found = {
            task: paired((_speed(ours, task), _speed(base, task)) for ours, base in self.windows)
            for task in tasks
        }
        return {task: ratio for task, ratio in found.items() if ratio is not None}

    @property
    def mean_over_tasks(self) -> float | None:
        """Mean of the tasks' speed-ups, each task counting alike."""
        return statistics.mean(ratio.value for ratio in self.by_task.values()) if self.by_task else None


def _speed(window: Window, task: str) -> float | None:
    """Output tokens per second of request time."""
    share = (window.by_task or {}).get(task)
    return share.output_tokens / share.request_seconds if share and share.request_seconds else None


def paired(pairs: Iterable[tuple[float | None, float | None]]) -> Ratio | None:
    """Ratios of (mode, AR) rates of one window each; pairs without an AR rate are left out."""
    ratios = [ours / base for ours, base in pairs if ours is not None and base]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


@dataclass(frozen=True)
class Results:
    """All cells, by series and concurrency, and which series is plain decoding for which."""

    cells: Mapping[tuple[str, int], Cell]
    baselines: Mapping[str, str]  # series -> its baseline's series; a baseline's own is itself
    notes: tuple[str, ...]

    @property
    def series(self) -> list[str]:
        """Baselines first, then in the order of the files."""
        names = list(dict.fromkeys(series for series, _ in self.cells))
        return sorted(names, key=lambda name: self.baselines.get(name) != name)

    @property
    def drafters(self) -> list[str]:
        """The series that are no baseline and not the same mode measured by another tool."""
        tools = {series for (series, _), cell in self.cells.items() if cell.other_tool}
        return [name for name in self.series if self.baselines.get(name) != name and name not in tools]

    @property
    def tiers(self) -> list[int]:
        """All concurrencies."""
        return sorted({concurrency for _, concurrency in self.cells})

    @property
    def tasks(self) -> list[str]:
        """All tasks, in the order of the files."""
        return list(dict.fromkeys(task for cell in self.cells.values() for task in cell.by_task or {}))

    def of(self, series: str) -> list[Cell]:
        """The cells of a series by concurrency."""
        return [self.cells[series, tier] for tier in self.tiers if (series, tier) in self.cells]

    def compare(self, series: str) -> list[Comparison]:
        """Its cells that have a baseline, by concurrency."""
        base = self.baselines.get(series, "")
        cells = [cell for cell in self.of(series) if (base, cell.concurrency) in self.cells]
        return [Comparison(series, cell, self.cells[base, cell.concurrency]) for cell in cells]


def collect(lines: Sequence[Line], baseline: str) -> Results:
    """Sort lines into series.  The last line of a cell counts; a mode of several experiments is several.

    A series' baseline is that of its own experiment, or the only one there is.
    """
    experiments: dict[str, set[str | None]] = {}
    for line in lines:
        experiments.setdefault(line.cell.mode, set()).add(line.cell.experiment)
    cells: dict[tuple[str, int], Cell] = {}
    read: dict[tuple[str, int], str] = {}
    notes: list[str] = []
    for line in lines:
        cell = line.cell
        several = len(experiments[cell.mode]) > 1
        key = (f"{cell.mode} ({cell.experiment or 'unnamed'})" if several else cell.mode, cell.concurrency)
        place = f"{line.file} line {line.number}"
        if key in cells:
            notes.append(f"{key[0]} at {key[1]} was measured again: {place} counts, not {read[key]}")
        cells[key], read[key] = cell, place
    return Results(cells, _find_baselines(cells, baseline), tuple(notes))


def _find_baselines(cells: Mapping[tuple[str, int], Cell], baseline: str) -> dict[str, str]:
    found = {cell.experiment: series for (series, _), cell in cells.items() if cell.mode == baseline}
    only = next(iter(found.values())) if len(found) == 1 else None
    chosen = {series: found.get(cell.experiment, only) for (series, _), cell in cells.items()}
    return {series: base for series, base in chosen.items() if base is not None}


def published_for(mode: str) -> str | None:
    """The published drafter to set beside a mode: DFly-8 for dfly and dfly-4; None for others."""
    names = {name.split("-")[0].lower(): name for name in PUBLISHED}
    return names.get(mode.split(" ")[0].split("-")[0].split("_")[0].lower())


def cost_per_million(cell: Cell, price_per_hour: float) -> float | None:
    """Price of a million output tokens on a machine that costs so much an hour; None without tokens."""
    return price_per_hour / (cell.rate * 3600.0) * 1e6 if cell.rate else None


def acceptance(cells: Iterable[tuple[int | None, float | None]]) -> float | None:
    """Acceptance length of parts pooled, from (output tokens, acceptance length) of each: tokens / steps."""
    known = [(tokens, length) for tokens, length in cells if tokens and length]
    steps = sum(tokens / length for tokens, length in known)
    return sum(tokens for tokens, _ in known) / steps if steps else None
