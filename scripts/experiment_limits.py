"""Rollout limits: whether the figures of a mode allow it to take traffic, or say to roll it back.

Ratios are of a mode's figure to that of plain decoding at the same concurrency.  The worst of all
concurrencies counts, since a rollout meets all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from angelspec_backend.core.yaml_options import Section

AR_MODE = "ar"
_AT_LEAST = ("tokens_per_second_ratio", "acceptance_length")

Cell = Mapping[str, Any]
"""One line of results: a mode at a concurrency."""


class Limits(Section):
    """What must not be exceeded, or, for throughput and acceptance, undercut.  Absent: no limit."""

    error_rate: float | None = Field(None, ge=0, le=1, description="failed requests, as a share")
    different_rate: float | None = Field(
        None, ge=0, le=1, description="answers that differ from the first one to the same request, as a share"
    )
    p50_ms_ratio: float | None = Field(None, gt=0, description="median latency of a whole request")
    p99_ms_ratio: float | None = Field(None, gt=0)
    ttft_p50_ms_ratio: float | None = Field(None, gt=0, description="time to first token")
    ttft_p99_ms_ratio: float | None = Field(None, gt=0)
    itl_p99_ms_ratio: float | None = Field(None, gt=0, description="inter-token latency")
    tpot_p50_ms_ratio: float | None = Field(None, gt=0, description="time per output token")
    tokens_per_second_ratio: float | None = Field(None, gt=0, description="throughput, at least")
    acceptance_length: float | None = Field(None, ge=1, description="tokens per target step, at least")


@dataclass(frozen=True)
class Finding:
    """The worst value of one limit for one mode."""

    mode: str
    limit: str
    bound: float
    value: float | None  # None: it was not measured, so nobody knows that the limit is kept
    concurrency: int | None  # where

    @property
    def kept(self) -> bool:
        """Whether the limit allows the rollout."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def at_least(self) -> bool:
        """Whether the bound is the least that is allowed, not the most."""
        return self.limit in _AT_LEAST


def check_limits(cells: Sequence[Cell], limits: Limits) -> list[Finding]:
    """One finding per limit that is set and mode but plain decoding, in the order of the cells."""
    plain = {cell["concurrency"]: cell for cell in cells if cell["mode"] == AR_MODE}
    modes = dict.fromkeys(cell["mode"] for cell in cells if cell["mode"] != AR_MODE)
    findings = []
    for mode in modes:
        own = [cell for cell in cells if cell["mode"] == mode]
        for limit, bound in limits.model_dump(exclude_none=True).items():
            values = list(_values(limit, own, plain))
            if any(value is None for value, _ in values):
                findings.append(Finding(mode, limit, bound, None, None))
                continue
            worst = min if limit in _AT_LEAST else max
            value, concurrency = worst(values)
            findings.append(Finding(mode, limit, bound, value, concurrency))
    return findings


def _values(
    limit: str, cells: Sequence[Cell], plain: Mapping[int, Cell]
) -> Iterator[tuple[float | None, int]]:
    """(value, concurrency) of each cell."""
    for cell in cells:
        yield _value(limit, cell, plain.get(cell["concurrency"])), cell["concurrency"]


def _value(limit: str, cell: Cell, plain: Cell | None) -> float | None:
    if limit == "different_rate":
        compared = cell.get("compared")
        return (compared - cell["identical"]) / compared if compared else None
    if not limit.endswith("_ratio"):
        return cell.get(limit)
    name = limit.removesuffix("_ratio")
    mine, theirs = cell.get(name), (plain or {}).get(name)
    return mine / theirs if mine is not None and theirs else None
