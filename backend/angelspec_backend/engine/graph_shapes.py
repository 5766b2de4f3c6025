"""Shapes of steps that are worth a CUDA graph: verify steps, in which all rows compute equally many tokens.

A graph replays the kernels of one shape, so row counts and block table widths are rounded up to a few
values.  The rows that are missing are dummies: they read and write the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 512
"""Tokens of the largest captured step; above it a step computes longer than its launches take."""
MIN_POSITIONS = 256
"""The narrowest block table is for contexts of so many tokens."""


@dataclass(frozen=True)
class GraphShape:
    """What a graph is captured for."""

    num_rows: int
    tokens_per_row: int
    max_blocks: int  # width of the block table

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, and logits rows too."""
        return self.num_rows * self.tokens_per_row


@dataclass(frozen=True)
class GraphShapes:
    """The shapes of an engine."""

    block_size: int
    max_context: int  # tokens
    max_tokens: int = MAX_TOKENS

    def fit(self, rows: NDArray[np.void], draft_lens: NDArray[np.int32]) -> GraphShape | None:
        """The shape for a step, or None: it has prompt tokens, or rows of different lengths, or too many.

        rows: [num_rows] of ROW; draft_lens: [num_rows].
        """
        if not len(rows) or (rows["num_tokens"] != 1).any() or (rows["sample"] != 1).any():
            return None
        tokens_per_row = 1 + int(draft_lens[0])
        if (draft_lens != draft_lens[0]).any():
            return None
        num_rows = round_up(max(len(rows), 2 if tokens_per_row == 1 else 1))
        if num_rows * tokens_per_row > self.max_tokens:
            return None
        blocks, longest = int(rows["num_blocks"].max()), -(-self.max_context // self.block_size)
        width = _power_of_2(max(blocks, -(-MIN_POSITIONS // self.block_size)))
        return GraphShape(num_rows, tokens_per_row, longest if blocks <= longest < width else width)


def round_up(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, ...: at most half as many again as ``count``."""
    power = _power_of_2(count)
    three_quarters = power // 4 * 3
    return three_quarters if count <= three_quarters else power


def _power_of_2(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()
