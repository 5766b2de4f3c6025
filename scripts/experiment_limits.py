"""Rollout limits: whether the figures of a mode allow it to take traffic, or say to roll it back.

Ratios are of a mode's figure to that of plain decoding at the same concurrency.  The worst of all
concurrencies counts, since a rollout meets all of them.  report_rollback says what each limit bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from angelspec_backend.core.yaml_options import Section
from report_cell import Cell
from report_rollback import Limit

AR_MODE = "ar"


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
    limit: Limit
    value: float | None  # None: it was not measured, so nobody knows that the limit is kept
    concurrency: int | None  # where

    @property
    def kept(self) -> bool:
        """Whether the limit allows the rollout."""
        return self.limit.keeps(self.value)


def check_limits(lines: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """One finding per limit that is set and mode but plain decoding, in the order of the lines of results."""
    cells = [Cell.model_validate(line) for line in lines]
    plain = {cell.concurrency: cell for cell in cells if cell.mode == AR_MODE}
    findings = []
    for mode in dict.fromkeys(cell.mode for cell in cells if cell.mode != AR_MODE):
        own = [cell for cell in cells if cell.mode == mode]
        for name, bound in limits.model_dump(exclude_none=True).items():
            limit = Limit(name, bound)
            values = [(limit.value(cell, plain.get(cell.concurrency)), cell.concurrency) for cell in own]
            known = [(value, concurrency) for value, concurrency in values if value is not None]
            if len(known) < len(values):
                findings.append(Finding(mode, limit, None, None))
            else:
                findings.append(Finding(mode, limit, *(min if limit.at_least else max)(known)))
    return findings
