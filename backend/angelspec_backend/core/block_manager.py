"""KV blocks: who owns which.  Target and drafter share the ids; each has its own pool behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
"""Padding tokens write here; it is never handed out."""


class BlockTable:
    """The blocks of one sequence, in the order of its positions."""

    def __init__(self, max_blocks: int) -> None:
        self._ids = np.zeros(max_blocks, np.int32)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def ids(self) -> NDArray[np.int32]:  # [num_blocks]
        """A view of the block ids, valid until the table changes."""
        return self._ids[: self._len]

    def append(self, block: int) -> None:
        """Add a block at the end."""
        self._ids[self._len] = block
        self._len += 1

    def clear(self) -> None:
        """Forget all blocks."""
        self._len = 0


class BlockManager:
    """Hands out the blocks 1 .. num_blocks - 1, oldest free one first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Extend a table until it holds num_tokens; False, changing nothing, when blocks run short."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            table.append(self._free.popleft())
        return True

    def release(self, table: BlockTable) -> None:
        """Take back all blocks of a table."""
        self._free.extend(table.ids.tolist())
        table.clear()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Every block but the null block is either free or in exactly one of all live tables."""
        owned = [block for table in tables for block in table.ids.tolist()]
        everything = sorted([*owned, *self._free])
        assert everything == list(range(1, self.num_blocks)), "a block is lost, owned twice, or the null block"
