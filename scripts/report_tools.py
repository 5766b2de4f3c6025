"""Standard tools beside our own load: lines of run_standard_tools, whose mode is like "ar (aiperf)".

They measure the same server doing the same, so they are no drafters: no verdict, speed-up or mean counts
them.  What they are compared with is our own load of the same run, over the protocol that they speak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from report_cell import Cell
from report_compare import Results, paired
from report_table import TableData, number

OWN_LOADS: Mapping[str, str] = {"perf_analyzer": "", "aiperf": " (load-http)"}
"""What the mode of our own load over a tool's protocol ends with."""


def standard_tools(results: Results) -> TableData | None:
    """Tokens per second and latency of every tool, and their ratios to ours."""
    rows = []
    for tool, own in _pairs(results):
        windows = zip(tool.windows or (), own.windows or (), strict=False)
        ratio = paired([(theirs.rate, ours.rate) for theirs, ours in windows] or [(tool.rate, own.rate)])
        times = ((tool.p50_ms, own.p50_ms), (tool.ttft_p50_ms, own.ttft_p50_ms))
        row = (str(tool.concurrency), tool.mode, number(tool.rate), number(own.rate), str(ratio or ""))
        rows.append((*row, *(" / ".join(map(number, pair)) if any(pair) else "" for pair in times)))
    columns = ("in flight", "tool", "tok/s", "our load tok/s", "tool / ours", "p50 ms: tool / ours")
    note = "The same requests on the same server, in turns; ratio: median (smallest-largest) of the windows."
    more = ("TTFT p50 ms: tool / ours",)
    return TableData("Standard tools", (*columns, *more), tuple(rows), note, names=2) if rows else None


def _pairs(results: Results) -> Iterator[tuple[Cell, Cell]]:
    """(cell of a tool, that of our own load of the same run)."""
    cells = {(cell.experiment, cell.mode, cell.concurrency): cell for cell in results.cells.values()}
    for tier in results.tiers:
        for cell in results.cells.values():
            mode = cell.mode.removesuffix(f" ({cell.other_tool})")
            own = cells.get((cell.experiment, mode + OWN_LOADS.get(cell.other_tool or "", ""), tier))
            if cell.concurrency == tier and cell.other_tool in OWN_LOADS and own is not None:
                yield cell, own
