"""One step as the scheduler sees it, and the message that it becomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from angelspec_backend.core.draft_records import Way
from angelspec_backend.core.hidden_states import IN_NUMPY, StateArrays, States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import NO_DRAFTER, ROW, StepInput, StepOutput, split_rows
from angelspec_backend.core.request import Sequence

NO_STATES: States = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class ScheduledRow:
    """One sequence's share of a step, in tokens."""

    seq: Sequence
    num_tokens: int  # known tokens for the target
    num_feed: int  # positions for the drafter
    num_draft_tokens: int  # drafts wanted
    drafter: DrafterInfo | None = None  # None: nothing is drafted or fed
    way: Way = Way.NETWORK  # in which drafts are made
    min_chance: float = 0.0  # of being accepted that a draft token must have

    @property
    def samples(self) -> bool:
        """Whether the row reaches its newest token, so that the next one can be sampled."""
        return self.num_tokens == self.seq.num_uncomputed

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Layers whose hidden states the drafter is fed with."""
        return self.drafter.tap_ids if self.drafter else ()

    @property
    def lookup_only(self) -> bool:
        """Whether a hidden-state drafter gets tokens to look up, while their hidden states go on waiting."""
        return self.way is Way.LOOKUP and self.num_draft_tokens > 0 and bool(self.tap_ids)

    @property
    def num_fed(self) -> int:
        """Positions that the drafter has, for what it is to do."""
        return self.seq.num_seen if self.lookup_only else self.seq.num_fed

    def num_committed(self, num_sampled: int) -> int:
        """Tokens whose hidden states hold, when so many were sampled: the last one is not computed yet."""
        return self.num_tokens + max(num_sampled - 1, 0)


def build_step(rows: list[ScheduledRow], arrays: StateArrays = IN_NUMPY) -> StepInput:
    """The message of a step.  arrays: that hidden states wait in"""
    records, token_ids, feed = [], [], []
    tap_ids: list[int] = []
    states: list[States] = []
    for row in rows:
        seq, sampling, taps = row.seq, row.seq.request.sampling, row.tap_ids
        token_ids += seq.token_ids[seq.num_computed : seq.num_computed + row.num_tokens]
        begin = row.num_fed + (1 if taps else 0)  # with hidden states goes the token behind them
        feed += seq.token_ids[begin : begin + row.num_feed]
        if taps:
            tap_ids += taps
            states += [] if row.lookup_only else seq.waiting_states.first(row.num_feed)
        records.append(
            (
                seq.slot,
                seq.num_computed,
                row.num_tokens,
                int(row.samples),
                seq.drafter if row.num_feed else NO_DRAFTER,
                row.num_fed,
                row.num_feed,
                row.num_draft_tokens,
                row.min_chance,
                int(row.lookup_only),
                len(seq.table),
                sampling.top_k,
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                len(taps),
                sampling.seed,
            )
        )
    return StepInput(
        rows=np.array(records, ROW),
        token_ids=np.array(token_ids, np.int32),
        feed_token_ids=np.array(feed, np.int32),
        block_table=np.concatenate([row.seq.table.ids for row in rows]),
        tap_ids=np.array(tap_ids, np.int32),
        hidden_states=arrays.join(states) if states else NO_STATES,
    )


def split_states(rows: list[ScheduledRow], output: StepOutput) -> list[States]:
    """The bytes of each row's new hidden states."""
    if len(output.hidden_states) == 0:
        return [NO_STATES] * len(rows)
    lens = [
        row.num_committed(sampled) * row.drafter.bytes_per_token if row.drafter else 0
        for row, sampled in zip(rows, output.lens.tolist(), strict=True)
    ]
    return split_rows(output.hidden_states, np.array(lens))
