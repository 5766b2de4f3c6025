"""Pictures of acceptance, as inline SVG; None where the lines have no figures for one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from report_compare import Results, acceptance
from report_series import Point, Styles, draw_series, label_margin
from report_svg import Drawing, Scale, clipped, nice_ticks


def by_position(results: Results, styles: Styles) -> str | None:
    """Share of drafts accepted up to a position: mean over the concurrencies, bars from lowest to highest."""
    points: dict[str, list[Point]] = {}
    for series in results.drafters:
        columns: dict[int, list[float]] = {}
        for cell in results.of(series):
            for position, share in enumerate(cell.acceptance_by_position or (), start=1):
                if share is not None:
                    columns.setdefault(position, []).append(share)
        points[series] = [
            Point(
                at,
                mean := statistics.mean(found),
                min(found),
                max(found),
                f"{series}, {at}: {100 * mean:.0f}%",
            )
            for at, found in sorted(columns.items())
        ]
    last = max((int(of_one[-1].x) for of_one in points.values() if of_one), default=0)
    if not last:
        return None
    drawing = Drawing("Acceptance by draft position", right=label_margin(points))
    inner = drawing.x_scale(1, max(last, 2))
    x, y = Scale(inner.low, inner.high, inner.start + 8, inner.end - 4), drawing.y_scale(0, 1)
    drawing.y_axis(y, (0, 0.25, 0.5, 0.75, 1), lambda share: f"{100 * share:.0f}%")
    drawing.x_axis(x, range(1, last + 1), "position in the draft")
    draw_series(drawing, styles, points, x, y)
    return drawing.svg()


def by_task(results: Results, styles: Styles) -> str | None:
    """Output tokens per target step, one row per task set, all concurrencies together."""
    rows = {
        task: {
            series: value for series in results.drafters if (value := _task_acceptance(results, series, task))
        }
        for task in results.tasks
    }
    rows = {task: found for task, found in rows.items() if found}
    if not rows:
        return None
    drawing = Drawing("Acceptance length by task set", height=62 + 26 * len(rows), left=92, right=14)
    ticks = nice_ticks(1, max(value for found in rows.values() for value in found.values()), 5)
    x = drawing.x_scale(1, ticks[-1])
    for tick in ticks:
        drawing.line([(x(tick), drawing.top), (x(tick), drawing.height - drawing.bottom)], "grid")
    drawing.x_axis(x, ticks, "output tokens per target step")
    for index, (task, found) in enumerate(rows.items()):
        height = drawing.top + 26 * index + 13
        drawing.text(drawing.left - 8, height + 3.5, clipped(task), anchor="end")
        drawing.line([(x(1), height), (x(max(found.values())), height)], "tie")
        for series, value in found.items():
            drawing.marker(x(value), height, styles[series], f"{series}, {task}: {value:.2f}")
    return drawing.svg()


def _task_acceptance(results: Results, series: str, task: str) -> float | None:
    figures: Iterable = ((cell.by_task or {}).get(task) for cell in results.of(series))
    return acceptance((f.output_tokens, f.acceptance_length) for f in figures if f is not None)
