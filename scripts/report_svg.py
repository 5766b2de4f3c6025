"""Inline SVG: scales, axes, series that differ in colour, line and marker.

Colours are CSS variables of the page, so that one drawing fits light and dark.  A drawing is about as
wide as a phone; its text keeps its size there, and larger screens show drawings side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

MARKERS = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "square": "M-3.6,-3.6h7.2v7.2h-7.2z",
    "triangle": "M0,-4.8L4.6,3.4H-4.6z",
    "diamond": "M0,-5.2L5.2,0L0,5.2L-5.2,0z",
    "down": "M0,4.8L4.6,-3.4H-4.6z",
    "plus": "M-1.4,-4.6h2.8v3.2h3.2v2.8h-3.2v3.2h-2.8v-3.2h-3.2v-2.8h3.2z",
}


@dataclass(frozen=True)
class Style:
    """How a series looks everywhere."""

    slot: int  # its colour: the page's --s0, --s1 …; 0 is plain decoding's grey
    marker: str
    dash: str  # of its line
    hollow: bool = False  # the marker

    @property
    def css(self) -> str:
        """Classes of the marker."""
        return f"m s{self.slot}{' hollow' if self.hollow else ''}"


_LINES = ("2 4", "", "9 3", "5 3", "9 3 2 3", "3 2", "12 3")
STYLES = tuple(
    Style(slot, marker, _LINES[slot], hollow)
    for hollow in (False, True)
    for slot, marker in enumerate(("circle", *MARKERS))
    if slot or not hollow
)
"""Plain decoding's, then one for each drafter."""

PREFERRED = {"dfly": 1, "mtp": 2, "ngram": 3, "dflash": 4, "eagle3": 5, "draft_model": 6}
"""Styles that known drafters have in every report."""


def assign_styles(series: Sequence[str], baselines: Iterable[str]) -> dict[str, Style]:
    """A style for every series; with more drafters than styles some repeat."""
    styles = {name: STYLES[0] for name in series if name in set(baselines)}
    for name, index in PREFERRED.items():
        if name in series and name not in styles:
            styles[name] = STYLES[index]
    for number, name in enumerate(series):
        free = [style for style in STYLES[1:] if style not in styles.values()]
        styles.setdefault(name, free[0] if free else STYLES[1 + number % (len(STYLES) - 1)])
    return styles


@dataclass(frozen=True)
class Scale:
    """Values to places on one axis."""

    low: float
    high: float
    start: float  # place of low
    end: float  # place of high
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About count round numbers, the first at most low and the last at least high."""
    rough = max(high - low, 1e-9) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 10) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between low > 0 and high; the powers alone where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [10.0**power * m for power in powers for m in (1, 2, 5) if low <= 10.0**power * m <= high]
    whole = [tick for tick in inside if math.log10(tick).is_integer()]
    return whole if len(inside) > 8 and len(whole) > 2 else inside


def clipped(name: str, most: int = 14) -> str:
    """A name that fits beside a picture."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def short(value: float) -> str:
    """1.5k for thousands, and no needless zeros."""
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


@dataclass
class Drawing:
    """Elements of one picture, and its two scales."""

    label: str  # what a screen reader says
    width: int = 360
    height: int = 250
    left: int = 38
    right: int = 46
    top: int = 12
    bottom: int = 38
    parts: list[str] = field(default_factory=list)

    def x_scale(self, low: float, high: float, log: bool = False) -> Scale:
        """Left to right."""
        return Scale(low, high, self.left, self.width - self.right, log)

    def y_scale(self, low: float, high: float, log: bool = False) -> Scale:
        """Bottom to top."""
        return Scale(low, high, self.height - self.bottom, self.top, log)

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "middle") -> None:
        """One line of text; css names its class."""
        kind = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>')

    def line(self, points: Iterable[tuple[float, float]], css: str, dash: str = "") -> None:
        """A line through places."""
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<path d="M{path}" class="{css}"{dashes}/>')

    def marker(self, x: float, y: float, style: Style, title: str) -> None:
        """A series' marker; the title shows when a pointer rests on it."""
        self.parts.append(
            f'<path d="{MARKERS[style.marker]}" transform="translate({x:.1f},{y:.1f})" class="{style.css}">'
            f"<title>{escape(title)}</title></path>"
        )

    def x_axis(
        self, scale: Scale, ticks: Sequence[float], title: str, show: Callable[[float], str] = short
    ) -> None:
        """Line, numbers and title at the bottom."""
        base = self.height - self.bottom
        self.line([(self.left, base), (self.width - self.right, base)], "axis")
        for tick in ticks:
            self.text(scale(tick), base + 15, show(tick))
        self.text((self.left + self.width - self.right) / 2, base + 32, title, "title")

    def y_axis(self, scale: Scale, ticks: Sequence[float], show: Callable[[float], str] = short) -> None:
        """Numbers at the left and lines across."""
        for tick in ticks:
            self.line([(self.left, scale(tick)), (self.width - self.right, scale(tick))], "grid")
            self.text(self.left - 6, scale(tick) + 3.5, show(tick), anchor="end")

    def end_labels(self, ends: Sequence[tuple[float, float, str]], gap: float = 12.0) -> None:
        """Names right of the places where lines end, pushed apart where they would overlap."""
        placed = sorted(ends, key=lambda end: end[1])
        heights: list[float] = []
        for _, y, _ in placed:
            heights.append(max(y, heights[-1] + gap) if heights else y)
        shift = max(0.0, (heights[-1] if heights else 0.0) - (self.height - self.bottom))
        for (x, _, name), y in zip(placed, heights, strict=True):
            self.text(x + 8, y - shift + 3.5, clipped(name), "end", "start")

    def svg(self) -> str:
        """The element."""
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {box} role="img" aria-label="{escape(self.label)}">{"".join(self.parts)}</svg>'


def swatch(style: Style) -> str:
    """A piece of a series' line with its marker, for legends."""
    drawing = Drawing("", width=34, height=14)
    drawing.line([(1, 7), (33, 7)], f"l s{style.slot}", style.dash)
    drawing.marker(17, 7, style, "")
    return (
        drawing.svg().replace('role="img" aria-label=""', 'aria-hidden="true"').replace("<title></title>", "")
    )
