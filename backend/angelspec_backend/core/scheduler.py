"""Which sequences compute which tokens in the next step, and what the step's answer changes.

One rule instead of phases (design after vLLM v1): every sequence has ``num_computed`` tokens chasing
the tokens it knows, and a step gives it some to compute: a prompt chunk, one token, or one token and
the drafts behind it.  A rejected draft is a subtraction, preemption sets ``num_computed`` to zero.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from angelspec_backend.core.block_manager import BlockManager, BlockTable
from angelspec_backend.core.drafting import Drafting
from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import StepOutput, split_rows
from angelspec_backend.core.prefill_policy import PrefillPolicy
from angelspec_backend.core.request import FinishReason, Sequence, TokenEvent
from angelspec_backend.core.step import ScheduledRow, split_states


class Scheduler:
    """First come, first served; the youngest sequence is preempted when blocks run out."""

    def __init__(self, config: LoopConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # known tokens that did not have to be computed
        self._budget = 0  # tokens left in the step being planned
        self._blocks = BlockManager(config.num_blocks, config.block_size)
        self._drafting = Drafting(config, self._blocks)
        self._prefill = PrefillPolicy(self._drafting.times, config.max_slowdown)
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))

    # ------------------------------------------------------------------ requests in and out

    def new_table(self) -> BlockTable:
        """A block table that can hold the longest sequence and what its drafter writes behind it."""
        return BlockTable(self._blocks.blocks_for(self.config.max_context + self.config.max_lookahead))

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
        self._blocks.forget()
        for seq in list(reversed(self.running)):
            self._preempt(seq)

    @property
    def drafters(self) -> frozenset[int]:
        """Indices of the drafters that are alive; rows of others are decoded autoregressively."""
        return self._drafting.alive

    def forget_drafters(self, alive: frozenset[int]) -> None:
        """The drafters lost their context, and some may be gone: what they saw has to be fed again.

        Hidden states cannot be fed again, so sequences that need them are computed anew.
        alive: indices of those that can draft from now on.
        """
        self._drafting.alive = alive
        self._blocks.forget_drafters()
        for seq in list(reversed(self.running)):
            if self._drafting.needs_states(seq):
                self._preempt(seq)
            else:
                self._drafting.restart(seq)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> list[ScheduledRow]:
        """Give tokens to sequences until the budget, the blocks or the sequences run out.

        Decoding rows come first, so that a long prompt never stalls them; drafts are cut before rows are.
        """
        rows: list[ScheduledRow] = []
        self._budget = self.config.max_batch_tokens
        decoding = [seq for seq in self.running if seq.num_uncomputed == 1]
        prefilling = [seq for seq in self.running if seq.num_uncomputed > 1]
        reserved = len(decoding)  # each decoding row is sure of its one token
        for seq, drafts in zip(decoding, self._drafting.begin_step(decoding), strict=True):
            reserved -= 1
            if seq.slot is not None and (row := self._plan(seq, self._budget - reserved, rows, drafts)):
                rows.append(row)
        num_waiting = len(prefilling) + min(len(self.waiting), len(self._slots))
        if rows and num_waiting:
            num_decoded = self.config.max_batch_tokens - self._budget
            self._budget = self._prefill.limit(num_decoded, len(rows), num_waiting, self._budget)
        for seq in prefilling:
            if seq.slot is not None and self._budget > 0 and (row := self._plan(seq, self._budget, rows)):
                rows.append(row)
        while self.waiting and self._budget > 0 and self._admit(self.waiting[0]):
            seq = self.running[-1]
            if row := self._plan(seq, self._budget, rows):
                rows.append(row)
        return rows

    def apply(self, rows: list[ScheduledRow], output: StepOutput, seconds: float) -> list[TokenEvent]:
        """Take over what the target sampled in a step of so many seconds; sequences that ended leave."""
        events = []
        self._drafting.observe(rows, output, seconds)
        num_prompt = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        num_decoded = sum(row.num_tokens == 1 for row in rows) + int(output.draft_lens.sum())
        self._prefill.observe(num_decoded, num_prompt, seconds)
        for row, new, drafted, states in zip(
            rows,
            split_rows(output.token_ids, output.lens),
            output.draft_lens.tolist(),
            split_states(rows, output),
            strict=True,
        ):
            seq, accepted = row.seq, max(len(new) - 1, 0)
            seq.num_draft_tokens += drafted
            before = len(seq.token_ids)
            reason = seq.append(new.tolist(), self.config.eos_token_ids)
            self._advance(row, accepted, drafted, states)
            emitted = seq.token_ids[before:]
            if not emitted:
                continue
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
            held = (seq.slot, len(seq.table), seq.num_computed, seq.num_fed, len(seq.waiting_states))
            assert held == (None, 0, 0, 0, 0), "waiting, yet holding something"
        for seq in self.running:
            assert 0 <= seq.num_computed < len(seq.token_ids), "nothing left to compute"
            room = len(seq.table) * self.config.block_size
            assert seq.num_computed <= room, "computed tokens without blocks"
            self._drafting.check_integrity(seq)

    # ------------------------------------------------------------------ inside

    def _plan(
        self, seq: Sequence, budget: int, rows: list[ScheduledRow], drafts: int = 0
    ) -> ScheduledRow | None:
        """A row for a running sequence, with its blocks; None when it was preempted itself."""
        num_tokens = min(seq.num_uncomputed, budget)
        known = seq.num_computed + num_tokens
        drafter, num_feed, can_draft = self._drafting.drafter_of(seq), 0, False
        if drafter:
            num_feed, can_draft = self._drafting.plan_feed(seq, drafter, num_tokens, drafts > 0)
        drafts = min(drafts, budget - num_tokens) if can_draft else 0
        if drafter and drafts and not self._blocks.grow(seq.table, known + max(drafts, drafter.lookahead)):
            drafts = 0
        while not self._blocks.grow(seq.table, known):
            victim = self.running[-1]
            self._preempt(victim)
            rows[:] = [row for row in rows if row.seq is not victim]
            if victim is seq:
                return None
        self._budget -= num_tokens + drafts
        how = self._drafting.way, self._drafting.min_chance
        row = ScheduledRow(seq, num_tokens, num_feed, drafts, drafter, *how)
        self._drafting.take_budget(row)
        return row

    def _admit(self, seq: Sequence) -> bool:
        """Start the first waiting sequence if a slot is free and its known tokens fit beside the others."""
        cached = self._blocks.match(seq.token_ids) if self.config.prefix_caching else []
        prefix, num_fed = self._drafting.usable(seq, cached)
        if not self._slots or not self._blocks.start(seq.table, prefix, len(seq.token_ids) + 1):
            return False
        self.waiting.popleft()
        seq.slot = self._slots.pop()
        self.running.append(seq)
        seq.num_computed = len(prefix) * self.config.block_size
        self.num_cached_tokens += seq.num_computed
        seq.num_fed = seq.num_seen = num_fed * self.config.block_size
        return True

    def _advance(self, row: ScheduledRow, accepted: int, drafted: int, states: States) -> None:
        """Move what is computed and fed past a row; full blocks become findable for others."""
        seq = row.seq
        seq.num_computed += row.num_tokens + accepted
        if self.config.prefix_caching:
            # The end of a request may cut off tokens that were accepted.
            self._blocks.publish(seq.table, seq.token_ids, min(seq.num_computed, len(seq.token_ids)))
        if row.drafter:
            self._drafting.advance(row, row.drafter, accepted, drafted, states)

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self._release(seq)
        seq.num_computed = 0
        self._drafting.restart(seq)
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self._blocks.release(seq.table)
        assert seq.slot is not None
        self._slots.append(seq.slot)
        seq.slot = None
