"""The contract between the loop, the drafter and the target: what one engine step says and answers.

Only token ids, lengths, sampling parameters and, for the drafters that want them, hidden states cross a
process boundary, never logits. A step packs any number of sequences ("rows") raggedly: one fixed-size
record per row, and flat arrays in row order whose lengths the records give. The same records reach the
drafter and the target, so the ensemble between them needs no translation.

A hidden state is the output of one decoder layer of the target at one position, in the target's dtype, as
raw bytes, see ``core/hidden_states.py``.  Layers are counted from 0 and named by their tap id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.hidden_states import States

Flat = TypeVar("Flat", NDArray[Any], States)

NO_DRAFTER = -1
"""Value of ``ROW["drafter"]`` for a row decoded autoregressively."""

ROW = np.dtype(
    [
        ("slot", "<i4"),  # the sequence's index in per-sequence state, 0 <= slot < max_num_seqs
        ("num_computed", "<i4"),  # tokens already in the target's KV: position of the first new one
        ("num_tokens", "<i4"),  # known tokens the target computes in this step, >= 1
        ("sample", "<i4"),  # 1: the last known token is the newest, sample what follows; 0: a prompt chunk
        ("drafter", "<i4"),  # index into the drafter's list, or NO_DRAFTER
        ("num_fed", "<i4"),  # tokens the drafter has already seen
        ("num_feed", "<i4"),  # tokens fed to the drafter in this step, >= 0
        ("num_draft_tokens", "<i4"),  # at most so many draft tokens are wanted, >= 0
        ("min_chance", "<f4"),  # no draft token is wanted that is less likely to be accepted; 0: off
        ("lookup_only", "<i4"),  # 1: only those that need no network, which is fed nothing then
        ("num_blocks", "<i4"),  # entries of this row in block_table
        ("top_k", "<i4"),  # 0: off
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("num_taps", "<i4"),  # hidden states of so many layers are returned for committed tokens; 0: none
        ("seed", "<u8"),  # noise is a function of (seed, position) alone
    ]
)

_WHOLE_NUMBERS = {
    name: offset // 4 for name, (dtype, offset, *_) in (ROW.fields or {}).items() if dtype == np.dtype("<i4")
}
"""Where each 32-bit whole number of a row lies, counted in such numbers."""


def _no_ids() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _no_bytes() -> NDArray[np.uint8]:
    return np.zeros(0, np.uint8)


@dataclass(frozen=True)
class StepInput:
    """What one engine step computes, for all scheduled rows."""

    rows: NDArray[np.void]  # [num_rows] of ROW
    token_ids: NDArray[np.int32]  # [sum(num_tokens)] known tokens for the target
    feed_token_ids: NDArray[np.int32]  # [sum(num_feed)] committed tokens new to the drafter
    block_table: NDArray[np.int32]  # [sum(num_blocks)] block ids, shared by target and drafter
    tap_ids: NDArray[np.int32] = field(default_factory=_no_ids)  # [sum(num_taps)], ascending within a row
    # For the drafter: per row [num_feed, taps of the row's drafter, hidden], nothing where it has no taps or
    # only looks up: tokens that were fed so are fed again, with their states, before the network drafts.
    hidden_states: States = field(default_factory=_no_bytes)

    @property
    def speculative(self) -> bool:
        """Whether the drafter has anything to do; otherwise the step goes to the target alone."""
        return bool((self.rows["num_feed"] > 0).any())


@dataclass(frozen=True)
class DraftOutput:
    """The drafter's proposal for every row of a step, possibly shorter than asked, possibly empty."""

    token_ids: NDArray[np.int32]  # [sum(lens)] draft tokens in row order
    lens: NDArray[np.int32]  # [num_rows] 0 <= lens <= rows["num_draft_tokens"]
    looked_up: NDArray[
        np.int32
    ]  # [num_rows] 1: the draft is text that was there before, no network was asked

    @staticmethod
    def of(token_ids: NDArray[np.int32], lens: NDArray[np.int32]) -> DraftOutput:
        """Drafts that were not looked up in front of a network."""
        return DraftOutput(token_ids, lens, np.zeros_like(lens))

    @staticmethod
    def empty(num_rows: int) -> DraftOutput:
        """No drafts: an autoregressive step."""
        return DraftOutput.of(np.zeros(0, np.int32), np.zeros(num_rows, np.int32))


@dataclass(frozen=True)
class StepOutput:
    """What the target sampled: per sampling row its accepted drafts and one more token."""

    token_ids: NDArray[np.int32]  # [sum(lens)] new tokens in row order
    lens: NDArray[np.int32]  # [num_rows] accepted + 1 for a sampling row, 0 for a prompt chunk
    draft_lens: NDArray[np.int32]  # [num_rows] draft tokens that were verified
    looked_up: NDArray[np.int32]  # [num_rows] as in DraftOutput
    # Per row [num_committed, num_taps, hidden] with num_committed = num_tokens + max(lens - 1, 0): the known
    # tokens that were computed and the accepted drafts behind them, never a rejected one.
    hidden_states: States = field(default_factory=_no_bytes)
    seconds: float = 0.0  # that the target took


def split_rows(flat: Flat, lens: NDArray[Any]) -> list[Flat]:
    """Views of a flat array, one per row.  flat: [sum(lens)], lens: [num_rows]."""
    ends: list[int] = np.cumsum(lens).tolist()
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


class RowRanges:
    """Least, largest and summed values of the whole-number fields of all rows, to check a step by.

    Field by field this takes ten times as long: a call of numpy costs as much as its work on 64 rows.
    """

    def __init__(self, rows: NDArray[np.void]) -> None:
        """rows: [num_rows] of ROW; without any, all values are 0."""
        filled = np.ascontiguousarray(rows) if len(rows) else np.zeros(1, ROW)
        numbers = filled.view(np.int32).reshape(len(filled), -1)  # [num_rows, 32-bit numbers in a row]
        self._least: list[int] = numbers.min(axis=0).tolist()
        self._largest: list[int] = numbers.max(axis=0).tolist()
        self._totals: list[int] = numbers.sum(axis=0, dtype=np.int64).tolist()

    def least(self, name: str) -> int:
        """Of a field's values."""
        return self._least[_WHOLE_NUMBERS[name]]

    def largest(self, name: str) -> int:
        """Of a field's values."""
        return self._largest[_WHOLE_NUMBERS[name]]

    def total(self, name: str) -> int:
        """Of a field's values."""
        return self._totals[_WHOLE_NUMBERS[name]]

    def outside(self, name: str, low: int, high: int) -> bool:
        """Whether any row's value of a field is below low or above high."""
        return self.least(name) < low or self.largest(name) > high
