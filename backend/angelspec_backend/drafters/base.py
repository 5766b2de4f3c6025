"""What a drafter is, and the host that runs several of them behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import NO_DRAFTER, DraftOutput, StepInput

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
        hidden_states: NDArray[np.uint8],
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
        hidden_states: NDArray[np.uint8],
    ) -> DraftOutput:
        """No drafts."""
        return DraftOutput.empty(len(rows))


class DrafterHost:
    """Gives every row of a step to its drafter.

    Drafts only make a text appear sooner, so a drafter that raises costs its rows their drafts and nothing
    else.  But it may have missed tokens of these rows, and a context with a hole drafts badly without
    anybody noticing: their slots get neither feed nor drafts from it until they begin anew, at num_fed 0.
    """

    def __init__(self, drafters: Sequence[Drafter], max_num_seqs: int) -> None:
        """drafters: in the order of the configuration, which ``ROW["drafter"]`` indexes."""
        self.drafters = tuple(drafters)
        self.num_failures = [0] * len(self.drafters)
        self._behind = np.zeros((len(self.drafters), max_num_seqs), bool)
        # Of hidden states per fed token, by drafter; the last entry is NO_DRAFTER's.
        self._bytes_per_token = np.array([*(each.info.bytes_per_token for each in drafters), 0], np.int64)

    def propose(self, step: StepInput) -> DraftOutput:
        """Drafts for all rows of a step, in their order; rows without a drafter get none.

        Raises:
            ValueError: the step contradicts itself or names a slot or drafter that does not exist.
        """
        self._check(step)
        rows = step.rows
        chosen: list[NDArray[np.bool_]] = []
        outputs: list[DraftOutput] = []
        for index in range(len(self.drafters)):
            mine = (rows["drafter"] == index) & self._up_to_date(index, rows)
            if mine.any():
                chosen.append(mine)
                outputs.append(self._ask(index, step, mine))
        return _merge(len(rows), chosen, outputs)

    def _up_to_date(self, index: int, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        behind = self._behind[index]
        behind[rows["slot"][(rows["drafter"] == index) & (rows["num_fed"] == 0)]] = False
        return ~behind[rows["slot"]]

    def _ask(self, index: int, step: StepInput, mine: NDArray[np.bool_]) -> DraftOutput:
        drafter, rows = self.drafters[index], step.rows
        try:
            return drafter.propose(
                rows[mine],
                step.feed_token_ids[np.repeat(mine, rows["num_feed"])],
                step.block_table[np.repeat(mine, rows["num_blocks"])],
                _select(step.hidden_states, self._hidden_bytes(rows), mine),
            )
        except Exception:
            self.num_failures[index] += 1
            self._behind[index, rows["slot"][mine]] = True
            if self.num_failures[index] == 1:
                logger.exception("drafter '%s' failed; its sequences go on without drafts", drafter.info.name)
            return DraftOutput.empty(int(mine.sum()))

    def _check(self, step: StepInput) -> None:
        rows = step.rows
        for name, low, high in (
            ("slot", 0, self._behind.shape[1] - 1),
            ("drafter", NO_DRAFTER, len(self.drafters) - 1),
            ("num_feed", 0, len(step.feed_token_ids)),
            ("num_blocks", 0, len(step.block_table)),
        ):
            for row in np.flatnonzero((rows[name] < low) | (rows[name] > high))[:1]:
                raise ValueError(f"{name}: row {row} has {rows[name][row]}, allowed: {low} to {high}")
        for flat_name, lens_name in (("feed_token_ids", "num_feed"), ("block_table", "num_blocks")):
            have, want = len(getattr(step, flat_name)), int(rows[lens_name].sum(dtype=np.int64))
            if have != want:
                raise ValueError(f"{flat_name}: expected {want} entries (the sum of {lens_name}), got {have}")
        have, want = len(step.hidden_states), int(self._hidden_bytes(rows).sum())
        if have != want:
            raise ValueError(f"hidden_states: expected {want} bytes for the fed tokens, got {have}")

    def _hidden_bytes(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Bytes of hidden states of each row.  [num_rows]"""
        return np.where(
            rows["lookup_only"] == 1, 0, rows["num_feed"] * self._bytes_per_token[rows["drafter"]]
        )


def _select(flat: NDArray[np.uint8], lens: NDArray[np.int64], mine: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The bytes of some rows; they are many, so they are copied only if others lie between them.

    flat: [sum(lens)]; lens, mine: [num_rows]
    """
    end = np.cumsum(lens)
    if lens[mine].sum() == len(flat):
        return flat
    parts = [flat[end[row] - lens[row] : end[row]] for row in np.flatnonzero(mine & (lens > 0))]
    return np.concatenate(parts) if parts else flat[:0]


def _merge(num_rows: int, chosen: list[NDArray[np.bool_]], outputs: list[DraftOutput]) -> DraftOutput:
    """Drafts of several subsets of rows, in row order.  chosen: per output [num_rows], disjoint."""
    lens = np.zeros(num_rows, np.int32)
    for mine, output in zip(chosen, outputs, strict=True):
        lens[mine] = output.lens
    token_ids = np.zeros(lens.sum(), np.int32)
    for mine, output in zip(chosen, outputs, strict=True):
        token_ids[np.repeat(mine, lens)] = output.token_ids
    return DraftOutput(token_ids, lens)
