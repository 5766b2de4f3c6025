"""The verdict: which drafter, how long its drafts are, and from which concurrency on it stops paying.

A drafter pays at a concurrency where it beats plain decoding in every window, two at least, with at most
MAX_FAILED_SHARE of the requests failed.  Where the spread of the windows includes 1 there is no gain to
claim.  The drafter named is the one with the largest gain when it is used only where it pays, as the
geometric mean over all its concurrencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from report_checks import check
from report_compare import Comparison, Results
from report_reasons import (
    Compared,
    Reason,
    better_elsewhere,
    draft_length,
    explain,
    listed,
    price,
    rollback,
    status,
    triggered,
)


@dataclass(frozen=True)
class Verdict:
    """What to do, and why."""

    headline: str
    kind: str  # pro, con, open
    reasons: tuple[Reason, ...]
    series: str | None = None  # the drafter to use
    tiers: tuple[int, ...] = ()  # where it pays
    stops_at: int | None = None  # from this concurrency on it pays nowhere


def judge(results: Results, baseline: str) -> Verdict:
    """The verdict on all drafters."""
    all_cells = {series: results.compare(series) for series in results.drafters}
    compared = {series: cells for series, cells in all_cells.items() if cells}
    warnings = [Reason("warning", f"{text}.") for text in check(results)]
    if not compared:
        found = f"modes: {', '.join(results.series)}"
        headline = f"No verdict: no drafter was measured next to plain decoding, mode '{baseline}' ({found})."
        return Verdict(headline, "open", tuple(warnings))
    series = max(compared, key=lambda name: score(compared[name]))
    tiers = tuple(c.concurrency for c in compared[series] if status(c) == "gain")
    order = sorted(compared, key=lambda name: name != series)
    reasons = [explain(name, compared[name]) for name in order]
    if not tiers:
        kind, headline = no_gain(compared)
        return Verdict(headline, kind, (*reasons, *rollback(compared), *warnings))
    named = {series: compared[series]}
    reasons += [*better_elsewhere(series, compared), *price(compared[series]), *rollback(named), *warnings]
    broken = sorted({tier for found in triggered(compared[series]).values() for tier in found} & set(tiers))
    stops_at = next((c.concurrency for c in compared[series] if c.concurrency > tiers[-1]), None)
    headline = gain(series, compared[series], tiers, stops_at)
    if broken:
        headline += f" But a rollback limit would be triggered at {listed(broken, ' and ')}."
    return Verdict(headline, "open" if broken else "pro", tuple(reasons), series, tiers, stops_at)


def score(cells: Sequence[Comparison]) -> float:
    """Mean log speed-up of a drafter that is used only where it pays."""
    gains = [math.log(c.speedup.value) for c in cells if c.speedup and status(c) == "gain"]
    return sum(gains) / len(cells)


def gain(series: str, cells: Sequence[Comparison], tiers: Sequence[int], stops_at: int | None) -> str:
    """The headline for a drafter that pays at the given concurrencies."""
    gains = [c.speedup.value for c in cells if c.speedup and c.concurrency in tiers]
    ends = dict.fromkeys(f"{value:.2f}x" for value in (min(gains), max(gains)))
    times = f"{' to '.join(ends)} as fast as plain decoding, ahead in every window"
    holes = [c.concurrency for c in cells if c.concurrency < tiers[-1] and c.concurrency not in tiers]
    name = f"Use {series}{draft_length(cells, ' (draft length not recorded)')}"
    if stops_at is None and not holes:
        return f"{name}: at every concurrency measured ({listed(tiers, ' and ')}) it is {times}."
    text = f"{name} at {listed(tiers, ' and ')} in flight, where it is {times}."
    if holes:
        text += f" No gain shows at {listed(holes, ' and ')}."
    if stops_at is not None:
        text += f" From {stops_at} in flight on speculation stops paying."
    return text


def no_gain(compared: Compared) -> tuple[str, str]:
    """Kind and headline when no drafter pays anywhere."""
    cells = [c for of_one in compared.values() for c in of_one]
    kinds = {status(c) for c in cells}
    best = max(
        (c for c in cells if c.speedup and status(c) != "failed"),
        key=lambda c: c.speedup.value if c.speedup else 0.0,
        default=None,
    )
    if best is None:
        return "con", "No verdict: too many requests failed, or nothing was generated."
    shown = f"the best is {best.series} with {best.speedup} at {best.concurrency} in flight"
    if "single" in kinds:
        return "open", f"No gain can be claimed: of one window no spread is known; {shown}."
    if "loss" not in kinds:
        return "open", f"No gain shows: no spread over windows lies above 1; {shown}."
    if "open" not in kinds:
        return "con", f"Do not speculate: plain decoding is faster at every concurrency measured; {shown}."
    return "con", f"Do not speculate: no drafter beats plain decoding in every window anywhere; {shown}."
