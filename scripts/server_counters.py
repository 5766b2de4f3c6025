"""What the server itself counted while it was measured, from its Prometheus page."""

from __future__ import annotations

import operator
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import zip_longest

_SAMPLE = re.compile(r"^angelspec_(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+")
_GOOD = ("stop", "eos", "length")
_READ_TIMEOUT = 10.0  # seconds
_PUBLISHED = 0.1  # seconds between two equal pages of a server that has published all it counted


class CountersError(RuntimeError):
    """The server's counters cannot be read; the message says where and why."""


@dataclass(frozen=True)
class Counters:
    """Totals since the server started, or differences of two of them."""

    requests: float = 0.0  # that ended, however
    failed: float = 0.0  # that ended otherwise than by stop, eos or length, or were refused
    output_tokens: float = 0.0
    cached_tokens: float = 0.0  # of prompts, found in the prefix cache
    drafts: float = 0.0  # verified, of at least one token
    draft_tokens: float = 0.0  # verified
    accepted_draft_tokens: float = 0.0
    ttft_s: float = 0.0  # from arrival to first token, summed over so many requests:
    ttft_count: float = 0.0
    request_s: float = 0.0  # from arrival to last token, summed over so many requests:
    request_count: float = 0.0
    unfinished: float = 0.0  # requests that run or wait now
    accepted_at: tuple[float, ...] = ()  # draft tokens accepted, by position; empty: it does not say

    def __sub__(self, other: Counters) -> Counters:
        return self._combined(operator.sub, other)

    def __add__(self, other: Counters) -> Counters:
        return self._combined(operator.add, other)

    @property
    def acceptance_by_position(self) -> list[float] | None:
        """The share of the drafts whose token at a position was accepted; None: the server does not say.

        It ends with the last position at which any was.
        """
        if not self.drafts or not any(self.accepted_at):
            return None
        length = max(i for i, count in enumerate(self.accepted_at, 1) if count)
        return [count / self.drafts for count in self.accepted_at[:length]]

    @property
    def ttft_mean_ms(self) -> float | None:
        """Mean time to the first token, without the way to and from the client; None without requests."""
        return 1000.0 * self.ttft_s / self.ttft_count if self.ttft_count else None

    @property
    def request_mean_ms(self) -> float | None:
        """Mean time of a request; None without requests."""
        return 1000.0 * self.request_s / self.request_count if self.request_count else None

    def _combined(self, operation: Callable[[float, float], float], other: Counters) -> Counters:
        names = [f.name for f in fields(self) if f.name != "accepted_at"]
        values = {name: operation(getattr(self, name), getattr(other, name)) for name in names}
        pairs = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0.0)
        return Counters(**values, accepted_at=tuple(operation(one, two) for one, two in pairs))


def parse_counters(page: str) -> Counters:
    """The counters of a metrics page.

    Raises:
        CountersError: it is not the page of this server.
    """
    samples = [(name, labels, float(value)) for name, labels, value in _SAMPLE.findall(page)]
    plain = {name: value for name, labels, value in samples if not labels}
    ended = {labels: value for name, labels, value in samples if name == "requests_total"}
    accepted_at = {
        int(_NUMBER.findall(labels)[0]): value
        for name, labels, value in samples
        if name == "spec_decode_num_accepted_tokens_per_pos_total"
    }
    if "output_tokens_total" not in plain or not ended:
        raise CountersError("the metrics page has no angelspec_ counters")
    return Counters(
        requests=sum(ended.values()),
        failed=sum(value for labels, value in ended.items() if not any(f'"{r}"' in labels for r in _GOOD)),
        output_tokens=plain["output_tokens_total"],
        cached_tokens=plain.get("cached_tokens_total", 0.0),
        drafts=plain.get("spec_decode_num_drafts_total", 0.0),
        draft_tokens=plain.get("spec_decode_num_draft_tokens_total", 0.0),
        accepted_draft_tokens=plain.get("spec_decode_num_accepted_tokens_total", 0.0),
        ttft_s=plain.get("time_to_first_token_seconds_sum", 0.0),
        ttft_count=plain.get("time_to_first_token_seconds_count", 0.0),
        request_s=plain.get("request_seconds_sum", 0.0),
        request_count=plain.get("request_seconds_count", 0.0),
        unfinished=plain.get("requests_running", 0.0) + plain.get("requests_waiting", 0.0),
        accepted_at=tuple(accepted_at[position] for position in sorted(accepted_at)),
    )


def read_counters(url: str, settle_s: float = 10.0) -> Counters:
    """The counters once the server is idle and has published all it counted.

    url: of the metrics page.  settle_s: seconds after which they are taken as they are.

    Raises:
        CountersError: nothing answers there, or something else does.
    """
    deadline = time.monotonic() + settle_s
    before = _read(url)
    while time.monotonic() < deadline:
        time.sleep(_PUBLISHED)
        now = _read(url)
        if now == before and not now.unfinished:
            break
        before = now
    return before


def _read(url: str) -> Counters:
    try:
        with urllib.request.urlopen(url, timeout=_READ_TIMEOUT) as reply:
            page = reply.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise CountersError(f"cannot read {url}: {getattr(error, 'reason', error)}") from None
    try:
        return parse_counters(page)
    except CountersError as error:
        raise CountersError(f"{url}: {error}") from None
