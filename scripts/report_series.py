"""Series of points in a drawing: spreads, lines, markers, names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from report_svg import Drawing, Scale, Style, clipped

Styles = Mapping[str, Style]


@dataclass(frozen=True)
class Point:
    """A marker of a series, with the ends of its spread."""

    x: float
    y: float
    low: float
    high: float
    title: str


def label_margin(series: Iterable[str]) -> int:
    """Room right of a picture for the names at the ends of its lines."""
    return 14 + 6 * max(len(clipped(name)) for name in series)


def draw_series(
    drawing: Drawing,
    styles: Styles,
    points: Mapping[str, list[Point]],
    x: Scale,
    y: Scale,
    joined: bool = True,
) -> None:
    """Spreads, lines, then markers on top, and names at the ends."""
    ends = []
    for series, of_one in points.items():
        css = f"s{styles[series].slot}"
        for point in of_one:
            if point.high > point.low:
                drawing.line([(x(point.x), y(point.low)), (x(point.x), y(point.high))], f"spread {css}")
        if joined and of_one:
            drawing.line([(x(p.x), y(p.y)) for p in of_one], f"l {css}", styles[series].dash)
            ends.append((x(of_one[-1].x), y(of_one[-1].y), series))
    for series, of_one in points.items():
        for point in of_one:
            drawing.marker(x(point.x), y(point.y), styles[series], point.title)
    drawing.end_labels(ends)
