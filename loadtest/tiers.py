"""The tiers of a load test: when each runs, and the figures of its measured time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from angelspec_client.metrics import percentile, summarize
from loadtest.records import Record
from loadtest.settings import Settings


@dataclass(frozen=True)
class Tier:
    """A number of users and its times, in seconds since the test began."""

    users: int
    start: float
    begin: float  # measured from here, when the users have settled …
    end: float  # … to here


def schedule(settings: Settings) -> list[Tier]:
    """The tiers one after the other, without pauses."""
    length = settings.settle_seconds + settings.tier_seconds
    return [
        Tier(users, index * length, index * length + settings.settle_seconds, (index + 1) * length)
        for index, users in enumerate(settings.tiers)
    ]


def users_at(tiers: Sequence[Tier], seconds: float) -> int | None:
    """How many users there are so long after the beginning; None when the last tier is over."""
    return next((tier.users for tier in tiers if seconds < tier.end), None)


@dataclass(frozen=True)
class Window:
    """A tier's measured time, in seconds since the epoch.

    Throughput is of all tokens that arrived in it, whosever they are: so it is what the server does with
    that many users, without a beginning and an end.  Latencies are of the requests that ended in it and
    were sent in its tier.
    """

    users: int
    start: float
    begin: float
    end: float

    @classmethod
    def of(cls, tier: Tier, began: float) -> Window:
        """The window of a tier of a test that began at that time."""
        return cls(tier.users, began + tier.start, began + tier.begin, began + tier.end)

    def tokens(self, records: Sequence[Record]) -> int:
        """Output tokens that arrived in it."""
        return sum(
            tokens
            for record in records
            for time_s, tokens in record.arrivals
            if self.begin <= record.sent + time_s < self.end
        )

    def request_seconds(self, records: Sequence[Record]) -> float:
        """Seconds that requests were running in it, summed over them."""
        overlaps = (min(record.ended, self.end) - max(record.sent, self.begin) for record in records)
        return sum(max(0.0, overlap) for overlap in overlaps)

    def ended(self, records: Sequence[Record]) -> list[Record]:
        """The requests that latencies and counts are of."""
        return [r for r in records if r.sent >= self.start and self.begin <= r.ended < self.end]


def make_cell(window: Window, records: Sequence[Record], settings: Settings) -> dict[str, Any]:
    """The figures of a tier, under the names that results have in this repository."""
    ended = window.ended(records)
    answered = [record.generation() for record in ended if record.answered]
    latencies = sorted(1000.0 * generation.duration_s for generation in answered)
    failed = sum(record.error is not None for record in ended)
    tokens, duration = window.tokens(records), window.end - window.begin
    tasks = {task: [r for r in records if r.task == task] for task in sorted({r.task for r in records})}
    counts = {
        "requests": len(answered),
        "failed": failed,
        "output_tokens": tokens,
        "duration_s": duration,
        "tokens_per_second": tokens / duration,
    }
    return {
        "mode": {"none": "ar", None: "default"}.get(settings.drafter, settings.drafter),
        "concurrency": window.users,
        "in_flight": window.request_seconds(records) / duration,  # should be the concurrency
        **counts,
        "error_rate": failed / max(1, len(answered) + failed),
        "p90_ms": percentile(np.array(latencies), 90),
        **asdict(summarize(answered)) | counts,
        "latencies_ms": latencies,
        "draft_tokens": sum(generation.total_draft_tokens for generation in answered),
        "accepted_draft_tokens": sum(generation.total_accepted_draft_tokens for generation in answered),
        "acceptance_by_position": None,  # the server does not say
        "by_task": {task: _task_figures(window, group) for task, group in tasks.items()},
        "windows": [counts | {"by_task": {task: _share(window, group) for task, group in tasks.items()}}],
    }


def to_line(record: dict[str, Any]) -> str:
    """One line of JSON: four decimals are enough, and there is no NaN."""
    return json.dumps(_rounded(record), ensure_ascii=False, allow_nan=False)


def _share(window: Window, records: Sequence[Record]) -> dict[str, Any]:
    """What a task had of the window."""
    return {"output_tokens": window.tokens(records), "request_seconds": window.request_seconds(records)}


def _task_figures(window: Window, records: Sequence[Record]) -> dict[str, Any]:
    """The figures of one task's requests."""
    answered = [record.generation() for record in window.ended(records) if record.answered]
    figures = asdict(summarize(answered)) | {"output_tokens": window.tokens(records)}
    names = ("requests", "output_tokens", "acceptance_length", "p50_ms", "ttft_p50_ms", "tpot_p50_ms")
    return {name: figures[name] for name in names}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
