"""What a result line says: one cell, a mode at a concurrency.

A line needs mode, concurrency, requests, output_tokens, duration_s, p50_ms and p99_ms; all other fields
of Cell may be missing or null, and fields it does not name are ignored.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


TOOLS = ("perf_analyzer", "aiperf", "genai-perf", "load-http")
"""Ways to send requests beside our usual one; a mode measured with one of them is called "ar (aiperf)"."""


class Record(BaseModel):
    """A part of a line; fields it does not name are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TaskShare(Record):
    """What the requests of one task did in one window."""

    output_tokens: Count
    request_seconds: Amount  # sum over requests


class Window(Record):
    """One of the repeated measurements of a cell."""

    tokens_per_second: Amount | None = None
    output_tokens: Count = 0
    duration_s: Amount = 0.0
    by_task: dict[str, TaskShare] | None = None

    @property
    def rate(self) -> float:
        """Output tokens per second; 0 of a window without time."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


class TaskFigures(Record):
    """What the requests of one task did in all windows."""

    requests: Count | None = None
    output_tokens: Count | None = None
    acceptance_length: Amount | None = None
    p50_ms: Amount | None = None
    ttft_p50_ms: Amount | None = None
    tpot_p50_ms: Amount | None = None


class ServerCounts(Record):
    """Differences of the server's own counters over the cell."""

    requests: Count | None = None
    failed: Count | None = None
    output_tokens: Count | None = None


def _without_nulls(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class Cell(Record):
    """A mode at a concurrency: sums, medians and percentiles over its windows.

    tokens_per_second is the median of the windows.  acceptance_length counts output tokens per target
    step, bonus included; acceptance_by_position[i] is the share of drafts accepted up to position i.
    """

    mode: Annotated[str, Field(min_length=1)]
    concurrency: Annotated[int, Field(ge=1)]
    requests: Count
    output_tokens: Count
    duration_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    p50_ms: Amount | None  # null when every request failed
    p99_ms: Amount | None
    experiment: str | None = None
    failed: Count | None = None
    error_rate: Share | None = None
    tokens_per_second: Amount | None = None
    p90_ms: Amount | None = None
    ttft_p50_ms: Amount | None = None
    ttft_p99_ms: Amount | None = None
    itl_p50_ms: Amount | None = None
    itl_p99_ms: Amount | None = None
    tpot_p50_ms: Amount | None = None
    latencies_ms: tuple[Amount, ...] | None = None  # of whole requests
    acceptance_length: Amount | None = None
    acceptance_by_position: tuple[Share | None, ...] | None = None
    num_draft_tokens: Count | None = None  # longest draft; without it the settings may say
    draft_tokens: Count | None = None  # that were verified
    by_task: dict[str, TaskFigures] | None = None
    windows: tuple[Window, ...] | None = None
    identical: Count | None = None
    compared: Count | None = None
    harness_cpu_s: Amount | None = None  # processor time of the load generator
    server: ServerCounts | None = None
    memory_mb: Annotated[dict[str, Amount] | None, BeforeValidator(_without_nulls)] = None
    hardware: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    git: str | None = None
    settings: dict[str, Any] | None = None
    started: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_benchmark_writes(cls, line: Any) -> Any:
        """benchmark.py counts its windows, and lists their rates under a name of its own."""
        if not isinstance(line, dict) or not isinstance(line.get("windows"), int):
            return line
        rates = line.get("tokens_per_second_windows") or []
        return {
            "failed": line.get("errors"),
            **line,
            "windows": [{"tokens_per_second": rate} for rate in rates],
        }

    @model_validator(mode="after")
    def _percentiles_in_order(self) -> Cell:
        if self.p50_ms is not None and self.p99_ms is not None and self.p99_ms < self.p50_ms:
            raise ValueError(f"p99_ms {self.p99_ms} is below p50_ms {self.p50_ms}")
        return self

    @property
    def other_tool(self) -> str | None:
        """One of TOOLS where the requests did not come from our usual load, which writes no such mode."""
        return next((tool for tool in TOOLS if self.mode.endswith(f" ({tool})")), None)

    @property
    def rates(self) -> tuple[float, ...]:
        """Output tokens per second of every window; a line without windows is one window."""
        if self.windows:
            return tuple(window.rate for window in self.windows)
        rate = self.tokens_per_second
        return (self.output_tokens / self.duration_s if rate is None else rate,)

    @property
    def rate(self) -> float:
        """Output tokens per second, the median of the windows."""
        return statistics.median(self.rates) if self.tokens_per_second is None else self.tokens_per_second

    @property
    def failed_share(self) -> float | None:
        """Failed requests of all; None where the line does not say."""
        if self.error_rate is not None or self.failed is None:
            return self.error_rate
        return min(1.0, self.failed / self.requests) if self.requests else float(self.failed > 0)

    @property
    def user_rate(self) -> float:
        """Output tokens per second that one user sees: 1 / TPOT, without it the cell's rate / concurrency."""
        return 1000.0 / self.tpot_p50_ms if self.tpot_p50_ms else self.rate / self.concurrency

    @property
    def different_share(self) -> float | None:
        """Answers that differ from the first one to the same request, of those compared."""
        if not self.compared or self.identical is None:
            return None
        return 1.0 - self.identical / self.compared

    @property
    def drafted(self) -> float | None:
        """Draft tokens per target step."""
        if self.draft_tokens is None or not self.acceptance_length or not self.output_tokens:
            return None
        return self.draft_tokens * self.acceptance_length / self.output_tokens

    @property
    def longest_draft(self) -> str | None:
        """'4 draft tokens', or 'up to 4' where the server shortens drafts; None where nothing says."""
        settings = self.settings or {}
        by_mode, engine = (settings.get(name) for name in ("draft_tokens", "engine"))
        engine = engine if isinstance(engine, dict) else {}
        length = self.num_draft_tokens
        if length is None and isinstance(by_mode, dict):
            length = by_mode.get(self.mode, engine.get("num_draft_tokens"))
        if not length:
            return None
        adaptive = isinstance(by_mode, dict) and engine.get("adaptive_drafts") is not False
        return f"{'up to ' if adaptive else ''}{length}"
