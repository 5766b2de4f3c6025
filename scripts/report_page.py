"""The report as one HTML file: no scripts, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

import report_acceptance
import report_charts
from report_cell import Cell
from report_checks import distinct, summary
from report_compare import Comparison, Ratio, Results
from report_reasons import status
from report_records import ResultsError
from report_rollback import canary_percent, read_limits
from report_svg import STYLES, assign_styles, swatch
from report_tables import TableData
from report_verdict import Verdict

TEMPLATE = "report_page.html.j2"
SYMBOLS = {"gain": "▲", "open": "≈", "loss": "▼", "single": "?", "failed": "✕", "none": ""}
REASON_SYMBOLS = {"pro": "▲", "con": "▼", "open": "≈", "note": "→", "warning": "!"}


@dataclass(frozen=True)
class Shade:
    """One coloured cell."""

    text: str
    kind: str  # as report_reasons.status
    title: str = ""
    strength: float = 0.0  # of the colour, 0 to 1
    up: bool = True


@dataclass(frozen=True)
class Heat:
    """Coloured cells of one drafter, or of all."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Shade, ...]], ...]


def write_page(path: Path, results: Results, verdict: Verdict, tables: Sequence[TableData]) -> None:
    """Raises ResultsError when the file cannot be written."""
    try:
        path.write_text(render(results, verdict, tables), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror}") from None


def render(results: Results, verdict: Verdict, tables: Sequence[TableData]) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["keep_ranges"] = keep_ranges
    styles = assign_styles(results.series, results.baselines.values())
    draw = report_charts
    charts = [
        ("Throughput", "output tokens per second, log scale", draw.throughput(results, styles)),
        ("Speed-up", "over plain decoding; bars: all windows", draw.speedup(results, styles)),
        ("P99 of whole requests", "seconds, log scale", draw.tail(results, styles)),
        ("Throughput against speed per user", "tokens per second", draw.pareto(results, styles)),
        ("Acceptance by position", "drafts accepted so far", report_acceptance.by_position(results, styles)),
        ("Acceptance by task set", "bonus token included", report_acceptance.by_task(results, styles)),
    ]
    return environment.get_template(TEMPLATE).render(
        title=", ".join(distinct(cell.experiment for cell in results.cells.values())) or "results",
        verdict=verdict,
        reason_symbols=REASON_SYMBOLS,
        symbols=SYMBOLS,
        strip=at_a_glance(results),
        legend=[(name, Markup(swatch(styles[name]))) for name in results.series],
        charts=[(name, unit, Markup(drawn)) for name, unit, drawn in charts if drawn],
        cdfs=[(tier, Markup(drawn)) for tier, drawn in report_charts.latency_cdfs(results, styles)],
        heats=task_heats(results),
        tables=tables,
        conditions=conditions(results),
        settings=settings_text(results),
        slots=range(len(STYLES)),
    )


def keep_ranges(text: str) -> Markup:
    """The same text; numbers joined by hyphens, as 1.06-1.38x, are not broken between lines."""
    return Markup(re.sub(r"\S*\d-\d\S*", r'<span class="nb">\g<0></span>', str(escape(text))))


def shade(ratio: Ratio | None, kind: str) -> Shade:
    """A cell for a speed-up; full colour at twice or half the speed."""
    if ratio is None:
        return Shade("", "none")
    strength = min(1.0, abs(math.log2(max(ratio.value, 1e-3))))
    return Shade(f"{ratio.value:.2f}", kind, str(ratio), round(strength, 3), ratio.value >= 1)


def at_a_glance(results: Results) -> Heat | None:
    """Speed-up of every drafter at every concurrency."""
    rows = []
    for series in results.drafters:
        found = {c.concurrency: c for c in results.compare(series)}
        if found:
            rows.append((series, tuple(_glance(found.get(tier)) for tier in results.tiers)))
    return (
        Heat("Speed-up at a glance", tuple(str(tier) for tier in results.tiers), tuple(rows))
        if rows
        else None
    )


def _glance(comparison: Comparison | None) -> Shade:
    return shade(comparison.speedup, status(comparison)) if comparison else Shade("", "none")


def task_heats(results: Results) -> list[Heat]:
    """For every drafter, speed-up by task set and concurrency."""
    heats = []
    for series in results.drafters:
        compared = {c.concurrency: c for c in results.compare(series)}
        rows = []
        for task in results.tasks:
            ratios = [
                compared[tier].by_task.get(task) if tier in compared else None for tier in results.tiers
            ]
            if any(ratios):
                rows.append((task, tuple(shade(r, r.judged if r else "none") for r in ratios)))
        if rows:
            rows.append(("all", tuple(_glance(compared.get(tier)) for tier in results.tiers)))
            heats.append(Heat(series, tuple(str(tier) for tier in results.tiers), tuple(rows)))
    return heats


def conditions(results: Results) -> list[tuple[str, str]]:
    """Where and with what it was measured."""
    cells = list(results.cells.values())
    starts = sorted(cell.started for cell in cells if cell.started)
    spans = f"{starts[0]} to {starts[-1]}" if len(set(starts)) > 1 else "".join(starts[:1])
    minutes = sum(cell.duration_s for cell in cells) / 60
    rows = [
        ("Started", spans),
        (
            "Measured",
            f"{minutes:.0f} minutes in {len(cells)} cells" if minutes >= 1 else f"{len(cells)} cells",
        ),
        ("Hardware", _joined(cell.hardware for cell in cells)),
        ("Versions", _joined(cell.versions for cell in cells)),
        ("Git revision", _joined(cell.git for cell in cells)),
        ("Rollout", _joined(_rollout(cell) for cell in cells)),
        ("Checked", "; ".join(summary(results))),
    ]
    return [(name, text) for name, text in rows if text]


def _joined(values: Any) -> str:
    return " | ".join(
        ", ".join(f"{name} {part}" for name, part in value.items() if part is not None)
        if isinstance(value, dict)
        else str(value)
        for value in distinct(values)
    )


def _rollout(cell: Cell) -> str | None:
    canary, limits = canary_percent(cell.settings), read_limits(cell.settings)[0]
    parts = [] if canary is None else [f"canary of {canary:g}% of the traffic"]
    parts += [f"rollback on {', '.join(str(limit) for limit in limits)}"] if limits else []
    return "; ".join(parts) or None


def settings_text(results: Results) -> list[str]:
    """The experiment files as they were resolved, each once."""
    found = distinct(cell.settings for cell in results.cells.values())
    return [yaml.safe_dump(one, sort_keys=False, allow_unicode=True).rstrip() for one in found]
