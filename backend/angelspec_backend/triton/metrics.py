"""Prometheus metrics of the public model, on the server's /metrics page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from angelspec_backend.core.params import MAX_DRAFT_TOKENS
from angelspec_backend.core.request import FinishReason

PUBLISH_INTERVAL = 0.5
"""Seconds between two updates of counters and gauges: each is a message to the server."""

REFUSED = "refused"
"""How a request ended that was never admitted: invalid, or no room for it."""

REASONS = (*(reason.value for reason in FinishReason), REFUSED)

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests",
    "output_tokens": "Generated tokens",
    "cached_tokens": "Known tokens of starting sequences that were found in the prefix cache",
    "preemptions": "Sequences put back to waiting because KV blocks ran out",
    "spec_decode_num_drafts": "Verifications of at least one draft token",
    "spec_decode_num_draft_tokens": "Draft tokens verified",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
}
_ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos"
_GAUGES = {
    "requests_running": "Requests being computed",
    "requests_waiting": "Requests waiting for a place",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token",
    "inter_token_seconds": "Between two steps of one of the requests, divided by the tokens of the later one",
    "request_seconds": "From the arrival of a request to its last token",
}


class ServingMetrics:
    """Counts locally and publishes now and then; used by the output thread."""

    def __init__(self) -> None:
        kinds = pb_utils.MetricFamily
        # The families must outlive their metrics, so they are kept.
        self._families: list[Any] = []
        self._counters = {
            name: self._family(f"{name}_total", text, kinds.COUNTER).Metric(labels={})
            for name, text in _COUNTERS.items()
        }
        accepted = self._family(
            f"{_ACCEPTED_AT}_total", "Draft tokens accepted, by their position in the draft", kinds.COUNTER
        )
        self._counters |= {
            f"{_ACCEPTED_AT}_{position}": accepted.Metric(labels={"position": str(position)})
            for position in range(MAX_DRAFT_TOKENS)
        }
        self._gauges = {
            name: self._family(name, text, kinds.GAUGE).Metric(labels={}) for name, text in _GAUGES.items()
        }
        self._histograms = {
            name: self._family(name, text, kinds.HISTOGRAM).Metric(labels={}, buckets=list(LATENCY_BUCKETS))
            for name, text in _HISTOGRAMS.items()
        }
        finished = self._family("requests_total", "Requests by how they ended", kinds.COUNTER)
        self._finished = {reason: finished.Metric(labels={"reason": reason}) for reason in REASONS}
        self._pending: Counter[str] = Counter()
        self._published: Counter[str] = Counter()  # of the totals kept elsewhere
        self._published_at = 0.0
        self._busy = True  # publishes zeros at the start

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self._pending[name] += amount

    def count_draft(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verification of at least one draft token."""
        self.count("spec_decode_num_drafts")
        self.count("spec_decode_num_draft_tokens", num_drafted)
        self.count("spec_decode_num_accepted_tokens", num_accepted)
        for position in range(num_accepted):
            self.count(f"{_ACCEPTED_AT}_{position}")

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        self._histograms[name].observe(seconds)

    def finish(self, reason: str) -> None:
        """Count a request that ended."""
        self._finished[reason].increment(1)

    def publish(self, running: int, waiting: int, totals: Mapping[str, int]) -> None:
        """Hand what was counted to the server, at once when it becomes busy or idle, else now and then.

        running, waiting: requests now; totals: counters kept elsewhere, since the start.
        """
        now, busy = time.monotonic(), running + waiting > 0
        if busy == self._busy and now - self._published_at < PUBLISH_INTERVAL:
            return
        self._published_at, self._busy = now, busy
        for name, total in totals.items():
            self._pending[name] = total - self._published[name]
            self._published[name] = total
        for name, amount in self._pending.items():
            if amount:
                self._counters[name].increment(amount)
        self._pending.clear()
        self._gauges["requests_running"].set(running)
        self._gauges["requests_waiting"].set(waiting)

    def _family(self, name: str, text: str, kind: Any) -> Any:
        self._families.append(pb_utils.MetricFamily(name=f"angelspec_{name}", description=text, kind=kind))
        return self._families[-1]
