"""Which sequences compute which tokens in the next step, and what the step's answer changes.

One rule instead of phases (design after vLLM v1): every sequence has ``num_computed`` tokens chasing
the tokens it knows, and a step gives it some to compute: a prompt chunk, one token, or one token and
the drafts behind it.  A rejected draft is a subtraction, preemption sets ``num_computed`` to zero.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from angelspec_backend.core.block_manager import BlockManager, BlockTable
from angelspec_backend.core.draft_policy import DraftPolicy
from angelspec_backend.core.messages import NO_DRAFTER, ROW, StepInput, StepOutput, split_rows
from angelspec_backend.core.request import FinishReason, Sequence, TokenEvent


@dataclass(frozen=True)
class DrafterInfo:
    """What the loop must know of a drafter."""

    name: str
    keeps_drafts: bool  # its context already holds the drafts it proposed, all but the last


@dataclass(frozen=True)
class LoopConfig:
    """Limits of the loop, put together from the configuration and what the models say of themselves."""

    num_blocks: int
    block_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    drafters: tuple[DrafterInfo, ...] = ()
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_queue_size: int = 256
    adaptive_drafts: bool = True  # shorten drafts that would cost more time than they save

    def __post_init__(self) -> None:
        pool = (self.num_blocks - 1) * self.block_size
        if self.max_context > pool:
            raise ValueError(f"max_context {self.max_context} exceeds the KV pool's {pool} tokens")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step could not give every sequence a token"
            )


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


class Scheduler:
    """First come, first served; the youngest sequence is preempted when blocks run out."""

    def __init__(self, config: LoopConfig) -> None:
        self.config = config
        self.drafting = True  # off while no drafter is alive: every row is then decoded autoregressively
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self._policy = DraftPolicy(len(config.drafters))
        self._budget = self._feed_budget = 0  # tokens left in the step being planned
        self._blocks = BlockManager(config.num_blocks, config.block_size)
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))

    # ------------------------------------------------------------------ requests in and out

    def new_table(self) -> BlockTable:
        """A block table that can hold the longest sequence."""
        return BlockTable(self._blocks.blocks_for(self.config.max_context))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """All live sequences."""
        yield from self.running
        yield from self.waiting

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence that ended, wherever it is."""
        if seq in self.running:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)

    def forget_target(self) -> None:
        """The target lost its KV: every running sequence is computed again from its tokens."""
        for seq in list(reversed(self.running)):
            self._preempt(seq)

    def forget_drafter(self) -> None:
        """The drafter lost its context: it is fed again from the start."""
        for seq in self.running:
            seq.num_fed = 0

    # ------------------------------------------------------------------ a step

    def schedule(self) -> list[ScheduledRow]:
        """Give tokens to sequences until the budget, the blocks or the sequences run out.

        Decoding rows come first, so that a long prompt never stalls them; drafts are cut before rows are.
        """
        rows: list[ScheduledRow] = []
        self._budget = self.config.max_batch_tokens
        # A drafter that lost its context catches up in pieces, not in one endless step.
        self._feed_budget = self.config.max_batch_tokens + self.config.max_num_seqs
        decoding = [seq for seq in self.running if seq.num_uncomputed == 1]
        prefilling = [seq for seq in self.running if seq.num_uncomputed > 1]
        reserved = len(decoding)  # each decoding row is sure of its one token
        for seq, drafts in zip(decoding, self._draft_lengths(decoding), strict=True):
            reserved -= 1
            if seq.slot is not None and (row := self._plan(seq, self._budget - reserved, rows, drafts)):
                rows.append(row)
        for seq in prefilling:
            if seq.slot is not None and self._budget > 0 and (row := self._plan(seq, self._budget, rows)):
                rows.append(row)
        while self.waiting and self._budget > 0 and self._admit(self.waiting[0]):
            seq = self.running[-1]
            if row := self._plan(seq, self._budget, rows):
                rows.append(row)
        return rows

    def build(self, rows: list[ScheduledRow]) -> StepInput:
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

    def apply(self, rows: list[ScheduledRow], output: StepOutput, seconds: float) -> list[TokenEvent]:
        """Take over what the target sampled in a step of so many seconds; sequences that ended leave."""
        events = []
        if all(row.num_tokens == 1 for row in rows):
            self._policy.observe_step(len(rows) + int(output.draft_lens.sum()), seconds)
        for row, new, drafted in zip(
            rows, split_rows(output.token_ids, output.lens), output.draft_lens.tolist(), strict=True
        ):
            seq, accepted = row.seq, max(len(new) - 1, 0)
            seq.num_computed += row.num_tokens + accepted
            seq.num_fed += row.num_feed
            if row.num_feed and drafted and self.config.drafters[seq.drafter].keeps_drafts:
                seq.num_fed += min(accepted, drafted - 1)
            if drafted:
                seq.num_draft_tokens += drafted
                self._policy.observe_draft(seq.drafter, seq.acceptance, drafted, accepted)
            if not len(new):
                continue
            before = len(seq.token_ids)
            reason = seq.append(new.tolist(), self.config.eos_token_ids)
            emitted = seq.token_ids[before:]
            # Every verify counts as (accepted, one more), also one that the end of the request cut.
            seq.num_accepted_tokens += len(emitted) - 1
            events.append(seq.event(emitted, reason))
            if reason:
                self.remove(seq)
        return events

    def expire(self) -> list[TokenEvent]:
        """End the sequences whose deadline has passed."""
        now = time.monotonic()
        late = [seq for seq in self if seq.expired(now)]
        for seq in late:
            self.remove(seq)
        return [seq.event([], FinishReason.TIMEOUT) for seq in late]

    def check_integrity(self) -> None:
        """Assert what must hold between any two steps."""
        self._blocks.check_integrity([seq.table for seq in self])
        slots = sorted([*self._slots, *(seq.slot for seq in self.running if seq.slot is not None)])
        assert slots == list(range(self.config.max_num_seqs)), "a slot is lost or used twice"
        for seq in self.waiting:
            assert seq.slot is None and len(seq.table) == 0 and seq.num_computed == 0, "waiting, yet holding"
        for seq in self.running:
            assert 0 <= seq.num_computed < len(seq.token_ids), "nothing left to compute"
            assert 0 <= seq.num_fed <= len(seq.token_ids), "the drafter saw tokens that are not committed"
            held = len(seq.table) * self.config.block_size
            assert seq.num_computed <= held, "computed tokens without blocks"

    # ------------------------------------------------------------------ inside

    def _draft_lengths(self, decoding: list[Sequence]) -> list[int]:
        """Drafts wanted for each decoding sequence: what its request allows, or what pays."""
        limits = [
            min(seq.request.num_draft_tokens, seq.num_wanted - 1)
            if self.drafting and seq.drafter != NO_DRAFTER
            else 0
            for seq in decoding
        ]
        if not self.config.adaptive_drafts or not any(limits):
            return limits
        rates = [self._policy.rate(seq.drafter, seq.acceptance) if k else 0.0 for seq, k in zip(decoding, limits)]
        return self._policy.choose(np.array(rates), np.array(limits), len(decoding)).tolist()

    def _plan(
        self, seq: Sequence, budget: int, rows: list[ScheduledRow], drafts: int = 0
    ) -> ScheduledRow | None:
        """A row for a running sequence, with its blocks; None when it was preempted itself."""
        num_tokens = min(seq.num_uncomputed, budget)
        known = seq.num_computed + num_tokens
        num_feed = 0
        if self.drafting and seq.drafter != NO_DRAFTER:
            num_feed = max(0, min(known - seq.num_fed, self._feed_budget))
        caught_up = num_feed > 0 and seq.num_fed + num_feed == len(seq.token_ids)
        drafts = min(drafts, budget - num_tokens) if caught_up else 0
        if drafts and not self._blocks.grow(seq.table, known + drafts):
            drafts = 0
        while not self._blocks.grow(seq.table, known):
            victim = self.running[-1]
            self._preempt(victim)
            rows[:] = [row for row in rows if row.seq is not victim]
            if victim is seq:
                return None
        self._budget -= num_tokens + drafts
        self._feed_budget -= num_feed
        return ScheduledRow(seq, num_tokens, num_feed, drafts)

    def _admit(self, seq: Sequence) -> bool:
        """Start the first waiting sequence if a slot is free and its known tokens fit beside the others."""
        if not self._slots or self._blocks.blocks_for(len(seq.token_ids) + 1) > self._blocks.num_free:
            return False
        self.waiting.popleft()
        seq.slot = self._slots.pop()
        self.running.append(seq)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self._release(seq)
        seq.num_computed = seq.num_fed = 0
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self._blocks.release(seq.table)
        assert seq.slot is not None
        self._slots.append(seq.slot)
        seq.slot = None
