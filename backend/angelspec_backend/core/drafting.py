"""Everything the scheduler must know of drafters: how many drafts to ask for, and what to feed.

A drafter sees committed tokens when it is to draft, not before: a step without drafts costs it nothing.  A
hidden-state drafter also needs what the target puts out while it computes them, which is in no cache and
comes only once.  So such states wait with the sequence, also while drafts are only looked up, which takes the
tokens alone, and are fed without drafting when many wait.
"""

from __future__ import annotations

import numpy as np

from angelspec_backend.core.block_manager import BlockManager, CachedBlock
from angelspec_backend.core.draft_policy import DraftPolicy, Option
from angelspec_backend.core.draft_records import Fared, Way
from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import DrafterInfo, LoopConfig, loaded
from angelspec_backend.core.messages import NO_DRAFTER, StepOutput
from angelspec_backend.core.request import Sequence
from angelspec_backend.core.step import ScheduledRow
from angelspec_backend.core.step_costs import Verified
from angelspec_backend.core.step_times import StepTimes

NO_TOKEN = -1


class Drafting:
    """Plans and records how far each sequence's drafter has come."""

    def __init__(self, config: LoopConfig, blocks: BlockManager) -> None:
        self.alive = loaded(config.drafters)  # rows of other drafters are decoded autoregressively
        self._config = config
        self._blocks = blocks
        self._policy = DraftPolicy(len(config.drafters))
        self._budget = 0  # positions that may still be fed in the step being planned
        self.way = Way.NETWORK  # how drafts are made in the step being planned
        self.min_chance = 0.0  # of being accepted that draft tokens must have in it

    @property
    def times(self) -> StepTimes:
        """How long steps take that compute no prompt."""
        return self._policy.costs.times

    def drafter_of(self, seq: Sequence) -> DrafterInfo | None:
        """The drafter that drafts for a sequence; None: it is decoded autoregressively."""
        return self._config.drafters[seq.drafter] if seq.drafter in self.alive else None

    def needs_states(self, seq: Sequence) -> bool:
        """Whether the sequence's drafter is fed with hidden states."""
        drafter = self.drafter_of(seq)
        return drafter is not None and bool(drafter.tap_ids)

    # ------------------------------------------------------------------ planning a step

    def begin_step(self, decoding: list[Sequence]) -> list[int]:
        """The longest draft wanted for each decoding sequence: what its request allows, or what pays."""
        # A drafter that is far behind catches up in pieces, not in one endless step.
        self._budget = self._config.max_batch_tokens + self._config.max_num_seqs
        limits = [
            min(seq.request.num_draft_tokens, seq.num_wanted - 1) if seq.drafter in self.alive else 0
            for seq in decoding
        ]
        self.way, self.min_chance = Way.NETWORK, 0.0
        if not self._config.adaptive_drafts or not any(limits):
            return limits
        drafter = _most_common(decoding)
        options = [self._option(drafter, way, decoding, limits) for way in self._ways(decoding)]
        chosen = self._policy.choose(options)
        self.way, self.min_chance = chosen.way, chosen.min_chance
        return chosen.lengths.tolist()

    def _ways(self, decoding: list[Sequence]) -> list[Way]:
        """The ways that drafts can be made in for these sequences."""
        drafters = [self.drafter_of(seq) for seq in decoding]
        both = any(each.looks_up_first for each in drafters if each)
        return [Way.LOOKUP, Way.NETWORK] if both else [Way.NETWORK]

    def _option(self, drafter: int, way: Way, decoding: list[Sequence], limits: list[int]) -> Option:
        """What one way promises to these sequences.  drafter: of most of them"""
        longest, expected = np.zeros(len(limits), np.int64), np.zeros((3, len(limits)))
        for row, (seq, limit) in enumerate(zip(decoding, limits, strict=True)):
            if limit and (way is Way.NETWORK or self._config.drafters[seq.drafter].looks_up):
                first = self._config.drafters[seq.drafter].looks_up_first
                longest[row] = limit
                expected[:, row] = self._policy.expected(seq.drafter, way, seq.records, first)
        drafted, accepted, asked = expected
        return Option(drafter, way, drafted, accepted, asked, longest)

    def plan_feed(
        self, seq: Sequence, drafter: DrafterInfo, num_tokens: int, drafting: bool
    ) -> tuple[int, bool]:
        """Positions to feed while the target computes num_tokens; whether the drafter can draft then.

        A hidden-state drafter cannot be fed what the target only computes in this step.  While it only looks
        up it is not fed with states at all, up to a point; then it is, instead of drafting.
        """
        missing = seq.num_computed - seq.num_fed + (0 if drafter.tap_ids else num_tokens)
        too_many = bool(drafter.tap_ids) and missing > self._config.max_waiting_states
        if drafting and self.way is Way.LOOKUP and drafter.tap_ids and not too_many:
            unseen = seq.num_computed - seq.num_seen
            return unseen, unseen > 0
        num_feed = min(missing, self._budget) if drafting or too_many else 0
        return num_feed, 0 < num_feed == missing and not (too_many and self.way is Way.LOOKUP)

    def take_budget(self, row: ScheduledRow) -> None:
        """A row is in the step."""
        self._budget -= 0 if row.lookup_only else row.num_feed

    # ------------------------------------------------------------------ what a step brought

    def observe(self, rows: list[ScheduledRow], output: StepOutput, seconds: float) -> None:
        """Learn from a step how long one takes and how often drafts are right."""
        num_decoding = sum(row.num_tokens == 1 for row in rows)
        if num_decoding:
            ways = [row.way for row in rows if row.num_draft_tokens]
            self._policy.costs.observe(
                Verified(
                    num_rows=num_decoding,
                    num_drafts=int(output.draft_lens.sum()),
                    seconds=seconds,
                    target_seconds=output.seconds,
                    way=ways[0] if ways else None,
                    drafter=_most_common([row.seq for row in rows if row.num_draft_tokens]),
                    num_drafting=len(ways),
                    num_asked=sum(way is Way.NETWORK for way in ways) - int(output.looked_up.sum()),
                    prompts=num_decoding < len(rows),
                )
            )
        outcomes = output.looked_up, output.draft_lens, output.lens
        for row, looked_up, drafted, sampled in zip(rows, *(each.tolist() for each in outcomes), strict=True):
            if row.num_draft_tokens:
                seq, fared = row.seq, Fared(row.min_chance, drafted, max(sampled - 1, 0))
                first = self._config.drafters[seq.drafter].looks_up_first
                self._policy.observe_draft(seq.drafter, row.way, seq.records, first, bool(looked_up), fared)

    def advance(
        self, row: ScheduledRow, drafter: DrafterInfo, accepted: int, drafted: int, states: States
    ) -> None:
        """Move what is fed past a row whose tokens have been computed and whose blocks have been published.

        states: the bytes of the row's new hidden states.

        Raises:
            ValueError: they are not as many as the target was asked for.
        """
        seq, fed_before = row.seq, row.seq.num_fed
        num_fed = 0 if row.lookup_only else row.num_feed
        seq.num_seen = (
            row.num_fed + row.num_feed if row.lookup_only else max(seq.num_seen, fed_before + num_fed)
        )
        seq.num_fed += num_fed
        if drafter.tap_ids:
            expected = (row.num_tokens + accepted) * drafter.bytes_per_token
            if len(states) != expected:
                raise ValueError(f"hidden_states: expected {expected} bytes for a row, got {len(states)}")
            seq.waiting_states.drop(num_fed)
            # A copy: the message that brought them would live as long as the last of them.
            copied = self._config.state_arrays.copy(states)
            seq.waiting_states.append(copied.reshape(-1, drafter.bytes_per_token))
        elif drafted and drafter.keeps_drafts:
            seq.num_fed += min(accepted, drafted - 1)
        if num_fed and drafter.shares_blocks and self._config.prefix_caching:
            size, end = self._config.block_size, min(seq.num_fed, len(seq.token_ids))
            for index in range(fed_before // size, end // size):
                behind = self._token_behind(seq, drafter, index)
                self._blocks.mark_fed(seq.table, seq.token_ids, index, seq.drafter, behind)

    def restart(self, seq: Sequence) -> None:
        """Forget how far a sequence's drafter has come."""
        seq.num_fed = seq.num_seen = 0
        seq.waiting_states.clear()

    # ------------------------------------------------------------------ cached prefixes

    def usable(self, seq: Sequence, prefix: list[CachedBlock]) -> tuple[list[CachedBlock], int]:
        """The part of a cached prefix a sequence can begin with, and how many blocks of it its drafter knows.

        What a hidden-state drafter has not seen is computed again, for its hidden states.
        """
        drafter = self.drafter_of(seq)
        if drafter is None:
            return prefix, 0
        num_fed = 0
        while drafter.shares_blocks and num_fed < len(prefix):
            if prefix[num_fed].fed.get(seq.drafter) != self._token_behind(seq, drafter, num_fed):
                break
            num_fed += 1
        return prefix[:num_fed] if drafter.tap_ids else prefix, num_fed

    def _token_behind(self, seq: Sequence, drafter: DrafterInfo, index: int) -> int:
        """The token behind a block, if what the drafter keeps in the block depends on it.

        A hidden-state drafter gets the states of the block's last position with the token at the next.
        """
        return seq.token_ids[(index + 1) * self._config.block_size] if drafter.tap_ids else NO_TOKEN

    def check_integrity(self, seq: Sequence) -> None:
        """Assert what must hold of a running sequence between any two steps."""
        if self.needs_states(seq):
            arrived = seq.num_fed + len(seq.waiting_states)
            assert arrived == seq.num_computed, "hidden states were lost or came twice"
        else:
            assert len(seq.waiting_states) == 0, "hidden states that nobody wants"
            assert 0 <= seq.num_fed <= len(seq.token_ids), "the drafter saw tokens that are not committed"


def _most_common(sequences: list[Sequence]) -> int:
    """The drafter that most of some sequences have, NO_DRAFTER not counted unless none has another."""
    drafters = [seq.drafter for seq in sequences if seq.drafter != NO_DRAFTER]
    return max(set(drafters), key=drafters.count, default=NO_DRAFTER)
