"""The tables of a report: the terminal and the page show the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from report_cell import Cell
from report_compare import (
    PUBLISHED,
    PUBLISHED_CONDITIONS,
    Results,
    acceptance,
    cost_per_million,
    published_for,
)
from report_table import TableData, number, show_length, show_ratio, without_empty_columns
from report_tools import standard_tools


def make_tables(results: Results, price_per_hour: float | None) -> list[TableData]:
    """All tables that the lines have figures for.  Without a price that of the settings counts."""
    recorded = ((cell.settings or {}).get("price_per_hour") for cell in results.cells.values())
    price_per_hour = price_per_hour or next((float(price) for price in recorded if price), None)
    made = [
        throughput(results),
        latency(results),
        by_task(results),
        published(results),
        cost(results, price_per_hour),
        memory(results),
        standard_tools(results),
    ]
    return [without_empty_columns(table) for table in made if table is not None]


def throughput(results: Results) -> TableData:
    """Tokens per second of every mode, and speed-ups."""
    columns = ["in flight"]
    for series in results.series:
        columns += [f"{series} tok/s"] + ([f"{series} speed-up"] if series in results.drafters else [])
    compared = {series: {c.concurrency: c for c in results.compare(series)} for series in results.drafters}
    rows = []
    for tier in results.tiers:
        row = [str(tier)]
        for series in results.series:
            cell = results.cells.get((series, tier))
            row.append(number(cell.rate if cell else None))
            if series in compared:
                found = compared[series].get(tier)
                row.append(str(found.speedup) if found and found.speedup else "")
        rows.append(tuple(row))
    note = "Tokens per second: median of the windows; speed-up: median (smallest-largest) of paired windows."
    return TableData("Throughput", tuple(columns), tuple(rows), note)


def latency(results: Results) -> TableData:
    """What users of each cell saw, and what drafts did."""
    columns = ("in flight", "mode", "p50 ms", "p99 ms", "TTFT p50 / p99 ms", "TPOT p50 ms", "ITL p99 ms")
    more = ("errors", "acceptance", "drafted", "identical")
    rows = [
        (str(tier), series, *_latency_cells(results.cells[series, tier]))
        for tier in results.tiers
        for series in results.series
        if (series, tier) in results.cells
    ]
    note = (
        "Times of whole requests, to the first token, per token after it, between tokens; acceptance and "
        "drafted: output and draft tokens per target step; identical: answers equal to their request's first."
    )
    return TableData("Latency, errors, acceptance", (*columns, *more), tuple(rows), note, names=2)


def _latency_cells(cell: Cell) -> list[str]:
    ttft = [number(value) for value in (cell.ttft_p50_ms, cell.ttft_p99_ms)]
    share = cell.failed_share
    return [
        number(cell.p50_ms),
        number(cell.p99_ms),
        " / ".join(ttft) if any(ttft) else "",
        number(cell.tpot_p50_ms),
        number(cell.itl_p99_ms),
        "" if share is None else f"{100 * share:.1f}%",
        show_length(cell.acceptance_length),
        show_length(cell.drafted),
        f"{cell.identical}/{cell.compared}" if cell.compared else "",
    ]


def by_task(results: Results) -> TableData | None:
    """Speed-up and acceptance length by task set, over all concurrencies."""
    if not results.tasks:
        return None
    columns = ["task"]
    for series in results.drafters:
        columns += [f"{series} speed-up", f"{series} acceptance"]
    rows = [(task, *_task_cells(results, task)) for task in results.tasks]
    means = []
    for series in results.drafters:
        found = [c.mean_over_tasks for c in results.compare(series)]
        known = [value for value in found if value is not None]
        pooled = acceptance((c.output_tokens, c.acceptance_length) for c in results.of(series))
        means += [show_ratio(statistics.mean(known) if known else None), show_length(pooled)]
    note = (
        "Speed-up: mean (smallest-largest) over the concurrencies; acceptance: output tokens per target step."
    )
    return TableData("By task set", tuple(columns), (*rows, ("all", *means)), note)


def _task_cells(results: Results, task: str) -> Iterable[str]:
    for series in results.drafters:
        ratios = [c.by_task[task].value for c in results.compare(series) if task in c.by_task]
        spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
        yield f"{show_ratio(statistics.mean(ratios))}{spread}" if ratios else ""
        figures = [(cell.by_task or {}).get(task) for cell in results.of(series)]
        yield show_length(
            acceptance((f.output_tokens, f.acceptance_length) for f in figures if f is not None)
        )


def published(results: Results) -> TableData | None:
    """Mean speed-up over task sets next to the published one, and both over all shared concurrencies."""
    names = list(results.drafters)
    if not any(results.compare(series) for series in names):
        return None
    ours: dict[str, dict[int, float]] = {}
    for series in names:
        found = {
            c.concurrency: c.mean_over_tasks or (c.speedup and c.speedup.value)
            for c in results.compare(series)
        }
        ours[series] = {tier: value for tier, value in found.items() if value}
    tiers = [tier for tier in results.tiers if any(tier in values for values in ours.values())]
    shared = [tier for tier in tiers if tier in PUBLISHED["DFly-8"]]
    beside = [name for name in PUBLISHED if name in {published_for(s) for s in names}] or list(PUBLISHED)[:1]
    columns = ("in flight", *names, *(f"published {name}" for name in beside))
    values = [*ours.values(), *(PUBLISHED[name] for name in beside)]
    rows = [(str(tier), *(show_ratio(one.get(tier)) for one in values)) for tier in tiers]
    if shared:
        means = (_mean_of(one, shared) for one in values)
        rows.append((f"mean of {shared[0]}-{shared[-1]}" if len(shared) > 1 else "mean", *means))
    note = f"Mean over task sets, where known. Published for {PUBLISHED_CONDITIONS}: another scale."
    return TableData("Next to the published speed-up", columns, tuple(rows), note)


def cost(results: Results, price_per_hour: float | None) -> TableData | None:
    """Price of a million output tokens."""
    if price_per_hour is None:
        return None
    rows = []
    for tier in results.tiers:
        cells = [results.cells.get((series, tier)) for series in results.series]
        costs = [cost_per_million(cell, price_per_hour) if cell else None for cell in cells]
        rows.append(
            (str(tier), *("" if value is None else f"{value:.{2 if value >= 1 else 3}f}" for value in costs))
        )
    note = f"On a machine that costs {price_per_hour:g} an hour and is always so busy."
    return TableData("Cost per million output tokens", ("in flight", *results.series), tuple(rows), note)


def memory(results: Results) -> TableData | None:
    """Peak memory of every process over all concurrencies."""
    processes = list(dict.fromkeys(name for cell in results.cells.values() for name in cell.memory_mb or {}))
    if not processes:
        return None
    rows = []
    for series in results.series:
        cells = results.of(series)
        peaks = [_peak(cells, name) for name in processes]
        together = max((sum((cell.memory_mb or {}).values()) for cell in cells), default=0.0)
        rows.append((series, *("" if one is None else f"{one:,.0f}" for one in (*peaks, together or None))))
    note = "Peak of each process in MB over all concurrencies; the sum is that of the largest cell."
    return TableData("Memory", ("mode", *processes, "sum"), tuple(rows), note)


def _peak(cells: Iterable[Cell], process: str) -> float | None:
    peaks = ((cell.memory_mb or {}).get(process) for cell in cells)
    return max((peak for peak in peaks if peak is not None), default=None)


def _mean_of(values: Mapping[int, float], tiers: Sequence[int]) -> str:
    """Empty unless all concurrencies are there."""
    return show_ratio(statistics.mean(values[tier] for tier in tiers)) if set(tiers) <= set(values) else ""
