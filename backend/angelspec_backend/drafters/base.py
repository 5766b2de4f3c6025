"""What a drafter is, and the host that runs several of them behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.hidden_states import IN_NUMPY, StateArrays, States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import NO_DRAFTER, DraftOutput, RowRanges, StepInput, split_rows

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Sees every committed token once, in order, and proposes what may follow.

    A row is told apart by its slot or by its blocks.  ``num_fed == 0`` begins a new sequence in the slot;
    a ``num_fed`` below what the drafter has means that it must forget what lies behind.

    A hidden-state drafter (``info.tap_ids``) gets positions num_fed .. num_fed + num_feed - 1, each with the
    target's hidden states of the position and the token at the next one.  So the last token fed to a row
    that drafts is the anchor, the newest token, at position num_fed + num_feed; drafts follow it.  A row with
    ``lookup_only`` brings the tokens without the states: they are fed again later, with them.
    """

    @property
    def info(self) -> DrafterInfo:
        """What the loop must know of it."""
        ...

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """Take the fed tokens in, then propose at most ``num_draft_tokens`` for each row.

        rows: [num_rows] of ROW, all of this drafter; feed_token_ids: [sum(num_feed)];
        block_table: [sum(num_blocks)]; hidden_states: the bytes of [sum(num_feed), len(tap_ids), hidden],
        empty without tap_ids.
        """
        ...


class MissingDrafter:
    """Takes the place of a drafter that could not be loaded: the others keep their indices."""

    def __init__(self, name: str, failure: str) -> None:
        """failure: why it could not be loaded; clients see it"""
        self.info = DrafterInfo.failed(name, failure)

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """No drafts."""
        return DraftOutput.empty(len(rows))


class DrafterHost:
    """Gives every row of a step to its drafter.

    Drafts only make a text appear sooner, so a drafter that raises costs its rows their drafts and nothing
    else.  But it may have missed tokens of these rows, and a context with a hole drafts badly without
    anybody noticing: their slots get neither feed nor drafts from it until they begin anew, at num_fed 0.
    """

    def __init__(
        self, drafters: Sequence[Drafter], max_num_seqs: int, arrays: StateArrays = IN_NUMPY
    ) -> None:
        """drafters: in the order of the configuration, which ``ROW["drafter"]`` indexes; arrays: that hidden
        states are in."""
        self.drafters = tuple(drafters)
        self._arrays = arrays
        self.num_failures = [0] * len(self.drafters)
        self._behind = np.zeros((len(self.drafters), max_num_seqs), bool)
        # Of hidden states per fed token, by drafter; the last entry is NO_DRAFTER's.
        self._bytes_per_token = np.array([*(each.info.bytes_per_token for each in drafters), 0], np.int64)

    def propose(self, step: StepInput) -> DraftOutput:
        """Drafts for all rows of a step, in their order; rows without a drafter get none.

        Raises:
            ValueError: the step contradicts itself or names a slot or drafter that does not exist.
        """
        rows = step.rows
        if len(rows) == 0:
            return DraftOutput.empty(0)
        ranges = RowRanges(rows)
        hidden_lens = self._check(step, ranges)
        chosen: list[NDArray[np.bool_]] = []
        outputs: list[DraftOutput] = []
        for index in range(max(ranges.least("drafter"), 0), ranges.largest("drafter") + 1):
            mine = self._rows_of(index, rows)
            if mine.all():  # as it mostly is
                return self._ask(index, step)
            if mine.any():
                chosen.append(mine)
                outputs.append(self._ask(index, _select(step, hidden_lens, mine, self._arrays)))
        return _merge(len(rows), chosen, outputs)

    def _rows_of(self, index: int, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """A drafter's rows, those that it is behind with left out.  [num_rows]"""
        mine: NDArray[np.bool_] = rows["drafter"] == index
        behind = self._behind[index]
        if behind.any():
            behind[rows["slot"][mine & (rows["num_fed"] == 0)]] = False
            mine &= ~behind[rows["slot"]]
        return mine

    def _ask(self, index: int, step: StepInput) -> DraftOutput:
        """A drafter's drafts for a step that holds its rows alone."""
        drafter = self.drafters[index]
        try:
            return drafter.propose(step.rows, step.feed_token_ids, step.block_table, step.hidden_states)
        except Exception:
            self.num_failures[index] += 1
            self._behind[index, step.rows["slot"]] = True
            if self.num_failures[index] == 1:
                logger.exception("drafter '%s' failed; its sequences go on without drafts", drafter.info.name)
            return DraftOutput.empty(len(step.rows))

    def _check(self, step: StepInput, ranges: RowRanges) -> NDArray[np.int64]:
        """Refuse a step that contradicts itself.  Returns each row's bytes of hidden states, [num_rows]."""
        rows = step.rows
        for name, low, high in (
            ("slot", 0, self._behind.shape[1] - 1),
            ("drafter", NO_DRAFTER, len(self.drafters) - 1),
            ("num_feed", 0, len(step.feed_token_ids)),
            ("num_blocks", 0, len(step.block_table)),
        ):
            if ranges.outside(name, low, high):
                row = np.flatnonzero((rows[name] < low) | (rows[name] > high))[0]
                raise ValueError(f"{name}: row {row} has {rows[name][row]}, allowed: {low} to {high}")
        for flat_name, lens_name in (("feed_token_ids", "num_feed"), ("block_table", "num_blocks")):
            have, want = len(getattr(step, flat_name)), ranges.total(lens_name)
            if have != want:
                raise ValueError(f"{flat_name}: expected {want} entries (the sum of {lens_name}), got {have}")
        fed = np.where(rows["lookup_only"] == 1, 0, rows["num_feed"])
        hidden_lens: NDArray[np.int64] = fed * self._bytes_per_token[rows["drafter"]]
        have, want = len(step.hidden_states), int(hidden_lens.sum())
        if have != want:
            raise ValueError(f"hidden_states: expected {want} bytes for the fed tokens, got {have}")
        return hidden_lens


def _select(
    step: StepInput, hidden_lens: NDArray[np.int64], mine: NDArray[np.bool_], arrays: StateArrays
) -> StepInput:
    """Some rows of a step, with what a drafter reads of them.

    Hidden states are many bytes, so they are copied only if those of others lie between them.
    hidden_lens, mine: [num_rows]
    """
    rows, states = step.rows, step.hidden_states
    if hidden_lens[mine].sum() != len(states):
        of_row = split_rows(states, hidden_lens)
        parts = [of_row[row] for row in np.flatnonzero(mine & (hidden_lens > 0))]
        states = arrays.join(parts) if parts else states[:0]
    return replace(
        step,
        rows=rows[mine],
        feed_token_ids=step.feed_token_ids[np.repeat(mine, rows["num_feed"])],
        block_table=step.block_table[np.repeat(mine, rows["num_blocks"])],
        hidden_states=states,
    )


def _merge(num_rows: int, chosen: list[NDArray[np.bool_]], outputs: list[DraftOutput]) -> DraftOutput:
    """Drafts of several subsets of rows, in row order.  chosen: per output [num_rows], disjoint."""
    lens, looked_up = np.zeros((2, num_rows), np.int32)
    for mine, output in zip(chosen, outputs, strict=True):
        lens[mine], looked_up[mine] = output.lens, output.looked_up
    token_ids = np.zeros(lens.sum(), np.int32)
    for mine, output in zip(chosen, outputs, strict=True):
        token_ids[np.repeat(mine, lens)] = output.token_ids
    return DraftOutput(token_ids, lens, looked_up)
