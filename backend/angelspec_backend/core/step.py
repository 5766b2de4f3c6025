"""One step as the scheduler sees it, and the message that it becomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from angelspec_backend.core.messages import NO_DRAFTER, ROW, StepInput
from angelspec_backend.core.request import Sequence


@dataclass(frozen=True)
class ScheduledRow:
    """One sequence's share of a step, in tokens."""

    seq: Sequence
    num_tokens: int  # known tokens for the target
    num_feed: int  # known tokens for the drafter
    num_draft_tokens: int  # drafts wanted

    @property
    def samples(self) -> bool:
        """Whether the row reaches its newest token, so that the next one can be sampled."""
        return self.num_tokens == self.seq.num_uncomputed


def build_step(rows: list[ScheduledRow]) -> StepInput:
    """The message of a step."""
    records, token_ids, feed = [], [], []
    for row in rows:
        seq, sampling = row.seq, row.seq.request.sampling
        token_ids += seq.token_ids[seq.num_computed : seq.num_computed + row.num_tokens]
        feed += seq.token_ids[seq.num_fed : seq.num_fed + row.num_feed]
        records.append(
            (
                seq.slot,
                seq.num_computed,
                row.num_tokens,
                int(row.samples),
                seq.drafter if row.num_feed else NO_DRAFTER,
                seq.num_fed,
                row.num_feed,
                row.num_draft_tokens,
                len(seq.table),
                sampling.top_k,
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                0,
                sampling.seed,
            )
        )
    return StepInput(
        rows=np.array(records, ROW),
        token_ids=np.array(token_ids, np.int32),
        feed_token_ids=np.array(feed, np.int32),
        block_table=np.concatenate([row.seq.table.ids for row in rows]),
    )
