"""What an experiment says on the terminal: progress, the table, the limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from experiment_cells import Measured
from experiment_limits import Finding

_HEADERS = {
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "acceptance_length": "acceptance",
    "error_rate": "errors",
    "cost_per_million": "cost per 1M",
    "harness_us_per_token": "harness us/token",
}


def progress_line(what: str, measured: Measured) -> str:
    """A window in a line, with its first error, and where the server counts otherwise than the client."""
    window, counters = measured.window, measured.counters
    parts = [f"{what}: {window.tokens_per_second:.1f} tokens/s in {window.duration_s:.1f} s"]
    if window.errors:
        parts.append(f"{len(window.errors)} failed, the first: {window.errors[0]}")
    if counters is not None and counters.output_tokens != window.output_tokens:
        parts.append(f"the server counts {counters.output_tokens:.0f} tokens, not {window.output_tokens}")
    return "; ".join(parts)


def make_table(cells: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Table:
    """The cells for people, as a Markdown table with the given figures."""
    table = Table(box=MARKDOWN)
    table.add_column("C", justify="right")
    table.add_column("mode", no_wrap=True)
    for name in metrics:
        header = _HEADERS.get(name, name.replace("_ms", ", ms").replace("_", " "))
        table.add_column(header, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(str(cell["concurrency"]), cell["mode"], *(_shown(cell, name) for name in metrics))
    return table


def limit_lines(findings: Sequence[Finding], canary_percent: float) -> Iterator[str]:
    """A line per mode and limit, and one per mode with what follows."""
    for mode in dict.fromkeys(finding.mode for finding in findings):
        own = [finding for finding in findings if finding.mode == mode]
        for finding in own:
            where = "" if finding.concurrency is None else f" at c={finding.concurrency}"
            value = "not measured" if finding.value is None else f"{finding.value:.4g}{where}"
            limit = finding.limit
            bound = f"{'at least' if limit.at_least else 'at most'} {limit.bound:g}"
            yield f"{mode} {limit.name}: {value}, {bound}: {'ok' if finding.kept else 'rollback'}"
        kept = all(finding.kept for finding in own)
        yield f"{mode}: " + (f"may take {canary_percent:g}% of the traffic" if kept else "roll back")


def _shown(cell: Mapping[str, Any], name: str) -> str:
    if name == "identical":
        return f"{cell['identical']}/{cell['compared']}"
    value = cell[name]
    if value is None:
        return ""
    return f"{value:.1f}" if name.endswith("_ms") or name == "tokens_per_second" else f"{value:.2f}"
