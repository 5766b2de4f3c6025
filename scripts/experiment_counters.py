"""The server's own counters, from its page of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from load import WHOLE

_SAMPLE = re.compile(r"^angelspec_(\w+?)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'"([^"]*)"')


@dataclass(frozen=True)
class Counters:
    """The server's own counters: totals, or what they grew by."""

    requests: int = 0  # that ended, however
    failed: int = 0  # of those, refused, cancelled, or ended by an error
    output_tokens: int = 0
    drafts: int = 0  # verifications of at least one draft token
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # by position in the draft; empty where the server does not say
    unfinished: int = field(default=0, compare=False)  # requests that run or wait now

    def since(self, before: Counters) -> Counters:
        """What they grew by.  accepted_at ends with the last position that grew."""
        names = ("requests", "failed", "output_tokens", "drafts", "draft_tokens", "accepted_draft_tokens")
        grown = {name: getattr(self, name) - getattr(before, name) for name in names}
        pairs = zip(self.accepted_at, before.accepted_at, strict=True)
        at = [now - then for now, then in pairs]
        while at and at[-1] == 0:
            at.pop()
        return replace(self, **grown, accepted_at=tuple(at))


def read_counters(text: str) -> Counters:
    """The counters in a page of metrics."""
    values: dict[str, dict[str, int]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        values.setdefault(name, {})[",".join(_LABEL.findall(labels))] = int(float(value))

    def total(name: str) -> int:
        return sum(values.get(name, {}).values())

    ended = values.get("requests_total", {})
    at = values.get("spec_decode_num_accepted_tokens_per_pos_total", {})
    return Counters(
        requests=sum(ended.values()),
        failed=sum(count for reason, count in ended.items() if reason not in WHOLE),
        output_tokens=total("output_tokens_total"),
        drafts=total("spec_decode_num_drafts_total"),
        draft_tokens=total("spec_decode_num_draft_tokens_total"),
        accepted_draft_tokens=total("spec_decode_num_accepted_tokens_total"),
        accepted_at=tuple(at[position] for position in sorted(at, key=int)),
        unfinished=total("requests_running") + total("requests_waiting"),
    )
