"""Pictures of speed, as inline SVG; None where the lines have no figures for one."""

from __future__ import annotations

from collections.abc import Mapping

from report_compare import Results
from report_series import Point, Styles, draw_series, label_margin
from report_svg import Drawing, Scale, log_ticks, nice_ticks


def throughput(results: Results, styles: Styles) -> str | None:
    """Output tokens per second by concurrency; bars are the windows' smallest and largest."""
    points = {
        series: [
            Point(
                c.concurrency,
                c.rate,
                min(c.rates),
                max(c.rates),
                f"{series} at {c.concurrency}: {c.rate:.1f}",
            )
            for c in results.of(series)
            if min(c.rates) > 0
        ]
        for series in results.series
    }
    return _by_concurrency(results, styles, points, "Tokens per second by concurrency")


def tail(results: Results, styles: Styles) -> str | None:
    """P99 of whole requests by concurrency, in seconds."""
    points = {
        series: [
            Point(c.concurrency, time, time, time, f"{series} at {c.concurrency}: {time:.2f} s")
            for c in results.of(series)
            if (time := (c.p99_ms or 0.0) / 1000) > 0
        ]
        for series in results.series
    }
    return _by_concurrency(results, styles, points, "P99 of whole requests by concurrency")


def speedup(results: Results, styles: Styles) -> str | None:
    """Speed-up over plain decoding by concurrency, with a line at 1."""
    points = {
        series: [
            Point(c.concurrency, r.value, r.low, r.high, f"{series} at {c.concurrency}: {r}")
            for c in results.compare(series)
            if (r := c.speedup) is not None
        ]
        for series in results.drafters
    }
    return _by_concurrency(results, styles, points, "Speed-up over plain decoding by concurrency", mark=1.0)


def _by_concurrency(
    results: Results, styles: Styles, points: Mapping[str, list[Point]], label: str, mark: float | None = None
) -> str | None:
    """Lines over doublings; values on a log scale too, or on a plain one with a line at mark."""
    every = [point for of_one in points.values() for point in of_one]
    if not every:
        return None
    drawing = Drawing(label, right=label_margin(points))
    low, high = min(point.low for point in every), max(point.high for point in every)
    if mark is None:
        y = drawing.y_scale(low * 0.9, high * 1.1, log=True)
        drawing.y_axis(y, log_ticks(y.low, y.high))
    else:
        ticks = nice_ticks(min(low, mark), max(high, mark), 6)
        y = drawing.y_scale(ticks[0], ticks[-1])
        drawing.y_axis(y, ticks)
        drawing.line([(drawing.left, y(mark)), (drawing.width - drawing.right, y(mark))], "one")
    x = _tier_scale(drawing, results.tiers)
    drawing.x_axis(x, results.tiers, "requests in flight")
    draw_series(drawing, styles, points, x, y)
    return drawing.svg()


def _tier_scale(drawing: Drawing, tiers: list[int]) -> Scale:
    """By doublings; a single concurrency stands in the middle."""
    low, high = (tiers[0], tiers[-1]) if len(tiers) > 1 else (tiers[0] / 2, tiers[0] * 2)
    scale = drawing.x_scale(low, high, log=True)
    return Scale(scale.low, scale.high, scale.start + 8, scale.end - 4, log=True)


def pareto(results: Results, styles: Styles) -> str:
    """Throughput of the machine against the speed that one user sees; up and to the right is better."""
    drawing = Drawing("Throughput against speed per user", right=14)
    every = list(results.cells.values())
    x_ticks = nice_ticks(0, max(cell.user_rate for cell in every), 6)
    y_ticks = nice_ticks(0, max(cell.rate for cell in every), 6)
    x, y = drawing.x_scale(0, x_ticks[-1]), drawing.y_scale(0, y_ticks[-1])
    drawing.y_axis(y, y_ticks)
    drawing.x_axis(x, x_ticks, "tokens per second of one user")
    for tier in results.tiers:
        cells = sorted((cell for cell in every if cell.concurrency == tier), key=lambda cell: cell.user_rate)
        drawing.line([(x(cell.user_rate), y(cell.rate)) for cell in cells], "tie")
        drawing.text(x(cells[-1].user_rate) + 7, y(cells[-1].rate) - 5, str(tier), "note", "start")
    points = {
        series: [
            Point(c.user_rate, c.rate, c.rate, c.rate, f"{series} at {c.concurrency}: {c.rate:.1f} in all")
            for c in results.of(series)
        ]
        for series in results.series
    }
    draw_series(drawing, styles, points, x, y)
    drawing.parts = [part for part in drawing.parts if 'class="end"' not in part]
    return drawing.svg()


def latency_cdfs(results: Results, styles: Styles) -> list[tuple[int, str]]:
    """One small picture per concurrency: the share of requests done within a time; markers at P50 and P99."""
    return [
        (tier, _latency_cdf(results, styles, tier))
        for tier in results.tiers
        if any(cell.latencies_ms for cell in results.cells.values() if cell.concurrency == tier)
    ]


def _latency_cdf(results: Results, styles: Styles, tier: int) -> str:
    drawing = Drawing(f"Latency at {tier} in flight", 180, 150, left=34, right=10, top=8, bottom=34)
    times = {
        series: sorted(time / 1000 for time in cell.latencies_ms)
        for series in results.series
        if (cell := results.cells.get((series, tier))) and cell.latencies_ms
    }
    ticks = nice_ticks(0, max(of_one[-1] for of_one in times.values()), 4)
    x, y = drawing.x_scale(0, ticks[-1]), drawing.y_scale(0, 1)
    drawing.y_axis(y, (0, 0.5, 1), lambda share: f"{100 * share:.0f}%")
    drawing.x_axis(x, ticks, "seconds")
    for series, of_one in times.items():
        steps = [(x(time), y((index + 1) / len(of_one))) for index, time in enumerate(of_one)]
        style = styles[series]
        drawing.line([(x(of_one[0]), y(0)), *_thin(steps)], f"l s{style.slot}", style.dash)
        for share, name in ((0.5, "P50"), (0.99, "P99")):
            time = of_one[min(len(of_one) - 1, int(share * len(of_one)))]
            drawing.marker(x(time), y(share), style, f"{series}, {name}: {time:.2f} s")
    return drawing.svg()


def _thin(points: list[tuple[float, float]], most: int = 80) -> list[tuple[float, float]]:
    """At most so many points, the last among them: more are not seen."""
    stride = max(1, -(-len(points) // most))
    return points if stride == 1 else [*points[:-1:stride], points[-1]]
