"""Rollback limits: what the experiment says must not happen when a drafter is rolled out.

settings.rollout.rollback_on maps limits to numbers.  A limit's name says the figure and how it is
bounded; where it is relative, a mode is compared with plain decoding (AR) at the same concurrency:

    error_rate: 0.01                   at most 1% of the requests fail
    p99_increase_percent: 10           P99 of whole requests at most 10% above AR's; so ttft_p99_…, itl_p99_…
    throughput_drop_percent: 5         tokens/s at most 5% below AR's
    p99_ms: 4000                       at most 4 s, whatever AR does
    speedup: 1.05                      at least 1.05 times AR
    acceptance_length: 1.5             at least 1.5 output tokens per target step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from report_compare import Comparison

RELATIVE = {"increase", "rise", "regression", "decrease", "drop", "ratio"}
PERCENT = {"percent", "pct"}
PERCENTILES = ("p50", "p90", "p99")
LARGER_IS_BETTER = {"rate", "speedup", "acceptance_length"}


@dataclass(frozen=True)
class Limit:
    """A bound on one figure of a cell."""

    name: str
    written: float
    field: str  # of Cell, or speedup
    relative: bool  # allowed percent worse than AR; otherwise the figure itself is bounded
    allowed: float

    def __str__(self) -> str:
        return f"{self.name} {self.written:g}"

    def broken_by(self, comparison: Comparison) -> str | None:
        """What was found, or None where the limit holds or the figure is missing."""
        found = _figure(comparison, self.field)
        sign = -1.0 if self.field in LARGER_IS_BETTER else 1.0
        if found is None:
            return None
        if self.relative:
            base = getattr(comparison.base, self.field)
            if not base:
                return f"{found:.4g}, not 0" if base == 0 and sign * found > 0 else None
            change = 100.0 * (found / base - 1.0)
            return f"{change:+.1f}%" if sign * change > self.allowed else None
        if sign * (found - self.allowed) <= 0:
            return None
        return f"{100 * found:.2f}%" if self.field == "failed_share" else f"{found:.4g}"


def _figure(comparison: Comparison, field: str) -> float | None:
    if field == "speedup":
        return comparison.speedup.value if comparison.speedup else None
    value: float | None = getattr(comparison.cell, field)
    return value


def read_limits(settings: Mapping[str, Any] | None) -> tuple[list[Limit], list[str]]:
    """The limits of an experiment's settings, and the names of those that cannot be checked here."""
    rollout = (settings or {}).get("rollout")
    written = rollout.get("rollback_on") if isinstance(rollout, Mapping) else None
    if isinstance(written, Mapping):
        read = {
            str(name): parse_limit(str(name), value) for name, value in written.items() if value is not None
        }
    else:
        read = {str(name): None for name in written} if isinstance(written, list) else {}
    limits = [limit for limit in read.values() if limit is not None]
    return limits, [name for name, limit in read.items() if limit is None]


def parse_limit(name: str, value: Any) -> Limit | None:
    """None for a name or a value that says no limit."""
    words = set(name.lower().split("_"))
    field = _field(words)
    if field is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    relative, allowed = bool(RELATIVE & words), float(value)
    if "ratio" in words:  # the mode's figure over AR's: 1.1 allows 10% more, 0.9 allows 10% less
        allowed = 100.0 * abs(allowed - 1.0)
    elif relative and not PERCENT & words:  # a share
        allowed *= 100.0
    elif not relative and PERCENT & words:
        allowed /= 100.0
    if relative and field == "speedup":
        field = "rate"
    return Limit(name, float(value), field, relative, allowed)


def _field(words: set[str]) -> str | None:
    percentile = next((word for word in PERCENTILES if word in words), "p99")
    if {"error", "errors", "failed"} & words:
        return "failed_share"
    for time in ("ttft", "itl"):
        if time in words:
            return f"{time}_{'p50' if percentile == 'p50' else 'p99'}_ms"
    if "tpot" in words:
        return "tpot_p50_ms"
    if {"acceptance", "accepted"} & words:
        return "acceptance_length"
    if "speedup" in words:
        return "speedup"
    if {"throughput", "tokens"} & words:
        return "rate"
    return f"{percentile}_ms" if {*PERCENTILES, "latency"} & words else None
