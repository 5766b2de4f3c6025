"""The sentences behind a verdict: what each drafter gains, what it costs, whether rollback limits hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from report_checks import MAX_FAILED_SHARE
from report_compare import Comparison, acceptance
from report_rollback import read_limits

WORSE_BY = 0.05
"""A P99 or time to first token that much above plain decoding's is mentioned."""

WORDS = {
    "gain": "gain",
    "open": "undecided",
    "loss": "loss",
    "single": "no spread known",
    "failed": "too many requests failed",
}
"""What is said of a cell, by its status."""

Compared = Mapping[str, Sequence[Comparison]]
"""The cells of every drafter that have a baseline, by concurrency."""


@dataclass(frozen=True)
class Reason:
    """One sentence."""

    kind: str  # pro, con, open, note, warning
    text: str


def status(comparison: Comparison) -> str:
    """gain, loss, open, single (no spread known), failed (too many errors), or none."""
    if any((cell.failed_share or 0) > MAX_FAILED_SHARE for cell in (comparison.cell, comparison.base)):
        return "failed"
    return comparison.speedup.judged if comparison.speedup else "none"


def draft_length(cells: Iterable[Comparison], unknown: str = "") -> str:
    """' with 4 draft tokens', or unknown where the lines do not say."""
    lengths = [length for length in dict.fromkeys(c.cell.longest_draft for c in cells) if length]
    return f" with {listed(lengths, ' or ')} draft tokens" if lengths else unknown


def explain(series: str, cells: Sequence[Comparison]) -> Reason:
    """Where one drafter gains, where it does not, and its acceptance length over all cells."""
    parts = []
    for kind, words in WORDS.items():
        found = [c for c in cells if status(c) == kind]
        if found:
            parts.append(f"{words} at {listed([c.concurrency for c in found], ' and ')}{_shown(kind, found)}")
    pooled = acceptance((c.cell.output_tokens, c.cell.acceptance_length) for c in cells)
    accepted = "" if pooled is None else f", {pooled:.2f} tokens a target step"
    kinds = {status(c) for c in cells}
    kind = "pro" if "gain" in kinds else "con" if kinds <= {"loss", "failed", "none"} else "open"
    return Reason(kind, f"{series}{draft_length(cells)}{accepted}: {'; '.join(parts) or 'no tokens'}.")


def _shown(kind: str, cells: Sequence[Comparison]) -> str:
    """Gains as a range, other speed-ups one by one: their spread decides."""
    ratios = [c.speedup for c in cells if c.speedup]
    if kind == "failed" or not ratios:
        return ""
    if kind == "gain" and len(ratios) > 1:
        return f" ({min(r.value for r in ratios):.2f}x to {max(r.value for r in ratios):.2f}x)"
    return f": {', '.join(str(ratio) for ratio in ratios)}"


def better_elsewhere(series: str, compared: Compared) -> list[Reason]:
    """Concurrencies at which another drafter gains, and its spread is above that of the one named."""
    tops = {c.concurrency: c.speedup.high for c in compared[series] if c.speedup and status(c) != "failed"}
    return [
        Reason("note", f"{other} is better than {series} at {c.concurrency} in flight: {c.speedup}.")
        for other, cells in compared.items()
        for c in cells
        if other != series and status(c) == "gain" and c.speedup
        if c.speedup.low > tops.get(c.concurrency, 1.0)
    ]


def price(cells: Sequence[Comparison]) -> list[Reason]:
    """Times that get longer where the drafter gains tokens per second."""
    gaining = [c for c in cells if status(c) == "gain"]
    parts = []
    for what, field in (("P99", "p99_ms"), ("TTFT P50", "ttft_p50_ms"), ("TTFT P99", "ttft_p99_ms")):
        times = [(c, getattr(c.cell, field), getattr(c.base, field)) for c in gaining]
        worse = [
            f"{100 * (ours / base - 1):.0f}% at {c.concurrency}"
            for c, ours, base in times
            if ours and base and ours > base * (1 + WORSE_BY)
        ]
        if worse:
            parts.append(f"{what} by {', '.join(worse)}")
    return (
        [Reason("con", f"Where {gaining[0].series} gains it lengthens {'; '.join(parts)}.")] if parts else []
    )


def triggered(cells: Iterable[Comparison]) -> dict[str, dict[int, str]]:
    """What breaks rollback limits, by limit and concurrency: each cell against its own settings' limits."""
    found: dict[str, dict[int, str]] = {}
    for c in cells:
        for limit in read_limits(c.cell.settings)[0]:
            text = limit.broken_by(c)
            if text is not None:
                found.setdefault(str(limit), {})[c.concurrency] = text
    return found


def rollback(compared: Compared) -> list[Reason]:
    """Whether recorded limits hold for these drafters; nothing when none are recorded."""
    read = [read_limits(c.cell.settings) for cells in compared.values() for c in cells]
    reasons = []
    for series, cells in compared.items():
        for limit, found in triggered(cells).items():
            where = ", ".join(f"{text} at {concurrency}" for concurrency, text in found.items())
            reasons.append(Reason("con", f"Rollback limit {limit} would be triggered by {series}: {where}."))
    limits = dict.fromkeys(str(limit) for known, _ in read for limit in known)
    if limits and not reasons:
        names = listed(list(compared), " or ")
        reasons = [Reason("pro", f"No rollback limit would be triggered by {names} ({', '.join(limits)}).")]
    unknown = sorted({name for _, names in read for name in names})
    return [*reasons, *(Reason("warning", f"Rollback limit '{name}' cannot be checked.") for name in unknown)]


def listed(items: Sequence[int | str], last: str = ", ") -> str:
    """1, 4 and 8."""
    words = [str(item) for item in items]
    return last.join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
