"""Rollback limits: what the experiment says must not happen when a drafter takes traffic.

settings.rollout.rollback_on maps limits to numbers; null is no limit.  Each cell of a drafter is held
against them:

    error_rate: 0.01              at most 1% of the requests fail
    different_rate: 0.0           no answer differs from the first one to the same request
    p99_ms_ratio: 1.25            P99 at most 1.25 times plain decoding's; so any other time in ms
    tokens_per_second_ratio: 0.95 throughput at least 0.95 times plain decoding's
    acceptance_length: 1.5        at least 1.5 output tokens per target step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from report_cell import Cell
from report_compare import Comparison

FIGURES: Mapping[str, str] = {
    "error_rate": "failed_share",
    "different_rate": "different_share",
    "acceptance_length": "acceptance_length",
    "tokens_per_second_ratio": "rate",
    **{
        f"{time}_ratio": time
        for time in (
            *("p50_ms", "p90_ms", "p99_ms", "ttft_p50_ms", "ttft_p99_ms"),
            *("itl_p50_ms", "itl_p99_ms", "tpot_p50_ms"),
        )
    },
}
"""The figure of a cell that each limit bounds."""

AT_LEAST = ("acceptance_length", "tokens_per_second_ratio")


@dataclass(frozen=True)
class Limit:
    """A bound on one figure of a cell."""

    name: str  # one of FIGURES
    bound: float

    def __str__(self) -> str:
        return f"{self.name} {self.bound:g}"

    @property
    def at_least(self) -> bool:
        """Whether the bound is the least that is allowed, not the most."""
        return self.name in AT_LEAST

    def value(self, cell: Cell, base: Cell | None) -> float | None:
        """The figure of a cell next to that of plain decoding; None where it was not measured."""
        found = _figure(cell, self.name)
        if not self.name.endswith("_ratio"):
            return found
        other = None if base is None else _figure(base, self.name)
        return found / other if found is not None and other else None

    def keeps(self, value: float | None) -> bool:
        """Whether a value is allowed.  What was not measured is not known to be kept."""
        if value is None:
            return False
        return value >= self.bound if self.at_least else value <= self.bound

    def broken_by(self, comparison: Comparison) -> str | None:
        """What was found, None where the limit is kept."""
        found = self.value(comparison.cell, comparison.base)
        if self.keeps(found):
            return None
        return "not measured" if found is None else f"{found:.3g}"


def _figure(cell: Cell, name: str) -> float | None:
    value: float | None = getattr(cell, FIGURES[name])
    return value


def canary_percent(settings: Mapping[str, Any] | None) -> float | None:
    """The share of the traffic that a drafter takes at first."""
    value = _rollout(settings).get("canary_traffic_percent")
    return float(value) if isinstance(value, int | float) else None


def read_limits(settings: Mapping[str, Any] | None) -> tuple[list[Limit], list[str]]:
    """The limits of an experiment's settings, and the names of those that cannot be checked here."""
    written = _rollout(settings).get("rollback_on") or {}
    values = written if isinstance(written, Mapping) else dict.fromkeys(map(str, written), "")
    limits, unknown = [], []
    for name, value in values.items():
        if name in FIGURES and isinstance(value, int | float):
            limits.append(Limit(name, float(value)))
        elif value is not None:
            unknown.append(str(name))
    return limits, unknown


def _rollout(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    rollout = (settings or {}).get("rollout")
    return rollout if isinstance(rollout, Mapping) else {}
