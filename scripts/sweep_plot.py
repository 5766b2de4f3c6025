"""The picture of a sweep over draft lengths: what a length gains, what it costs, how drafts fare, by set."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from sweep_report import (
    Cell,
    Length,
    Limit,
    by_concurrency,
    choose_best,
    find_cell,
    show_length,
    speedups,
    task_speedup,
    within,
)

TEXT, GRID = "#333333", "#dddddd"
COLOURS = ("#332288", "#88ccee", "#117733", "#ddcc77", "#cc6677", "#aa4499", "#44aa99", "#999933")
"""Told apart without colour vision."""
MARKERS = "osD^vP<>"


def draw(cells: Sequence[Cell], limit: Limit, file: Path) -> None:
    """Write the picture; the suffix says in which format."""
    lengths = sorted({cell["num_draft_tokens"] for cell in cells}, key=_place)
    groups = by_concurrency(cells)
    # Without pyplot there is no global state and no window.
    figure = Figure(figsize=(11, 8), facecolor="white", layout="constrained")
    gain, cost, accepted, tasks = figure.subplots(2, 2).flat
    for index, (concurrency, group) in enumerate(groups.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        label = f"{concurrency} in flight"
        _draw_gain(gain, group, lengths, limit, style, label)
        _draw_line(cost, lengths, _relative(group, "p99_ms"), style, label)
        acceptance = {cell["num_draft_tokens"]: cell["acceptance_length"] for cell in group}
        _draw_line(accepted, lengths, acceptance.get, style, label)
    if limit.max_p99_ms is None:
        cost.axhline(limit.max_p99_ratio, color=TEXT, linestyle="--", linewidth=0.8, label="limit")
    _draw_tasks(tasks, groups, lengths)
    _finish(gain, lengths, "tokens/s relative to plain decoding", "ringed: best; hollow: over the P99 limit")
    _finish(cost, lengths, "P99 relative to plain decoding", "slowest requests")
    _finish(accepted, lengths, "output tokens per target step", "acceptance length")
    gain.legend(frameon=False, fontsize=8)
    name = next((cell["drafter"] for cell in cells if cell["num_draft_tokens"] != 0), "none")
    figure.suptitle(f"Draft lengths of drafter {name}", fontsize=11, color=TEXT)
    with matplotlib.rc_context({"svg.hashsalt": "sweep"}):  # the same lines give the same file
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)


def _place(length: Length) -> float:
    """auto stands behind all numbers."""
    return float("inf") if length is None else length


def _relative(group: Sequence[Cell], field: str) -> Callable[[Length], float | None]:
    plain = find_cell(group, 0)

    def get(length: Length) -> float | None:
        cell = find_cell(group, length)
        if cell is None or plain is None or cell[field] is None or not plain[field]:
            return None
        return cell[field] / plain[field]

    return get


def _draw_line(
    panel: Any,
    lengths: Sequence[Length],
    value: Callable[[Length], float | None],
    style: dict[str, Any],
    label: str,
) -> None:
    """A line through the fixed lengths, and a point of its own for auto."""
    found = [(place, value(length), length) for place, length in enumerate(lengths)]
    fixed = [(place, y) for place, y, length in found if y is not None and length is not None]
    if fixed:
        panel.plot(*zip(*fixed, strict=True), linewidth=1.2, markersize=5, label=label, **style)
    auto = [(place, y) for place, y, length in found if y is not None and length is None]
    if auto:
        panel.plot(*zip(*auto, strict=True), linestyle="none", markersize=5, **style)


def _draw_gain(
    panel: Any,
    group: Sequence[Cell],
    lengths: Sequence[Length],
    limit: Limit,
    style: dict[str, Any],
    label: str,
) -> None:
    plain = find_cell(group, 0)

    def relative(length: Length) -> float | None:
        cell = find_cell(group, length)
        ratios = [] if cell is None else speedups(cell, plain)
        return statistics.median(ratios) if ratios else None

    _draw_line(panel, lengths, relative, style, label)
    best, limit_ms = choose_best(group, limit), limit.p99_ms(group)
    for cell in group:
        length = cell["num_draft_tokens"]
        point = ([lengths.index(length)], [relative(length)])
        if point[1][0] is None:
            continue
        if not within(cell, limit_ms):
            panel.plot(*point, markersize=5, markerfacecolor="white", linestyle="none", **style)
        if cell is best:
            panel.plot(*point, "o", markersize=11, fillstyle="none", color=style["color"])


def _draw_tasks(panel: Any, groups: dict[int, list[Cell]], lengths: Sequence[Length]) -> None:
    """What a token of each set gains, as numbers on a map, for the fewest requests in flight."""
    concurrency, group = min(groups.items())
    plain = find_cell(group, 0)
    tasks = list(dict.fromkeys(task for cell in group for task in cell["by_task"]))
    rows = []
    for task in tasks:
        cells = [find_cell(group, length) for length in lengths]
        ratios = [None if cell is None else task_speedup(cell, plain, task) for cell in cells]
        rows.append([float("nan") if ratio is None else ratio for ratio in ratios])
    panel.imshow(rows, aspect="auto", cmap="RdBu", vmin=0.5, vmax=1.5)
    for y, row in enumerate(rows):
        for x, ratio in enumerate(row):
            if ratio == ratio:
                colour = "white" if abs(ratio - 1) > 0.25 else TEXT
                panel.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=7, color=colour)
    panel.set_yticks(range(len(tasks)), tasks, fontsize=8)
    panel.set_xticks(range(len(lengths)), [show_length(length) for length in lengths], fontsize=8)
    panel.set_xlabel("draft tokens", fontsize=9, color=TEXT)
    title = f"time per token, plain / this, by set, {concurrency} in flight"
    panel.set_title(title, fontsize=9, color=TEXT)


def _finish(panel: Any, lengths: Sequence[Length], y_label: str, title: str) -> None:
    panel.set_xticks(range(len(lengths)), [show_length(length) for length in lengths], fontsize=8)
    panel.set_xlabel("draft tokens", fontsize=9, color=TEXT)
    panel.set_ylabel(y_label, fontsize=9, color=TEXT)
    panel.set_title(title, fontsize=9, color=TEXT)
    panel.tick_params(colors=TEXT, labelsize=8)
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
