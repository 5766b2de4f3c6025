"""KV blocks: who uses which, and which hold a prefix that another sequence can use as well.

Target and drafter share the block ids; each has its own pool behind them.  A full block of committed tokens
is never written again, so it can serve every sequence that begins with the same tokens.  Such blocks stay
findable after their last user has gone, until they are needed for something else, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
"""Padding tokens write here; it is never handed out."""

ROOT = 0
"""The node of the empty prefix."""


class BlockTable:
    """The blocks of one sequence, in the order of its positions."""

    def __init__(self, max_blocks: int) -> None:
        self._ids = np.zeros(max_blocks, np.int32)
        self._len = 0
        self.nodes: list[int] = [ROOT]  # prefixes whose tokens are published: after 0, 1, 2 … blocks

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
        self.nodes = [ROOT]


@dataclass(frozen=True)
class CachedBlock:
    """A full block that can be found by its tokens and all tokens before them."""

    block: int
    node: int  # names the prefix that ends with this block; never used again for another one
    key: tuple[int, tuple[int, ...]]  # the node of the prefix before it, and its tokens
    fed: dict[int, int] = field(default_factory=dict)  # drafters that know it, and for which token behind it


class BlockManager:
    """Hands out the blocks 1 .. num_blocks - 1 and finds cached prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to go first
        self._by_key: dict[tuple[int, tuple[int, ...]], CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._last_node = ROOT

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses, cached ones included."""
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
            block, _unused = self._free.popitem(last=False)
            self._uncache(block)
            self._users[block] = 1
            table.append(block)
        return True

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of a table; the end of a prefix is needed again later than its beginning."""
        for block in reversed(table.ids.tolist()):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._by_block:
                    self._free.move_to_end(block, last=False)
        table.clear()

    # ------------------------------------------------------------------ shared prefixes

    def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
        """The longest cached prefix, short of the last token, which has to be computed for its logits."""
        found: list[CachedBlock] = []
        node = ROOT
        for begin in range(0, len(token_ids) - self.block_size, self.block_size):
            cached = self._by_key.get((node, tuple(token_ids[begin : begin + self.block_size])))
            if cached is None:
                break
            found.append(cached)
            node = cached.node
        return found

    def start(self, table: BlockTable, prefix: Sequence[CachedBlock], num_tokens: int) -> bool:
        """Begin an empty table with a cached prefix; False, changing nothing, if num_tokens would not fit."""
        idle = sum(self._users[cached.block] == 0 for cached in prefix)
        if self.blocks_for(num_tokens) - len(prefix) > self.num_free - idle:
            return False
        for cached in prefix:
            self._users[cached.block] += 1
            self._free.pop(cached.block, None)
            table.append(cached.block)
            table.nodes.append(cached.node)
        return True

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Make the full blocks among the computed, committed tokens findable for others."""
        for index in range(len(table.nodes) - 1, num_computed // self.block_size):
            key = self._key(table, token_ids, index)
            cached = self._by_key.get(key)
            if cached is None:  # else another sequence was first, and this block stays private
                self._last_node += 1
                cached = self._cache(CachedBlock(int(table.ids[index]), self._last_node, key))
            table.nodes.append(cached.node)

    def mark_fed(
        self, table: BlockTable, token_ids: Sequence[int], index: int, drafter: int, token_behind: int
    ) -> None:
        """Note that a drafter has seen the tokens of a table's published block, and all before them.

        token_behind: the token behind the block that what the drafter keeps in it depends on; -1: none.
        A block that depends on one takes the place of another sequence's that the drafter does not know.
        """
        block, key = int(table.ids[index]), self._key(table, token_ids, index)
        cached = self._by_key.get(key)
        if cached is None or (cached.block != block and token_behind in (-1, cached.fed.get(drafter))):
            return
        if cached.block != block:
            self._uncache(cached.block)
            if self._users[cached.block] == 0:
                self._free.move_to_end(cached.block, last=False)
            cached = self._cache(CachedBlock(block, cached.node, key))
        cached.fed[drafter] = token_behind

    def forget(self) -> None:
        """The target has lost its KV: nothing is cached any more."""
        self._by_key.clear()
        self._by_block.clear()

    def forget_drafters(self) -> None:
        """The drafters have lost their contexts."""
        for cached in self._by_block.values():
            cached.fed.clear()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Every block has as many users as tables hold it, and is free if nobody does."""
        owned = [block for table in tables for block in table.ids.tolist()]
        users = np.bincount(owned, minlength=self.num_blocks).tolist() if owned else [0] * self.num_blocks
        assert users == self._users, "a block's users are counted wrong"
        idle = {block for block in range(1, self.num_blocks) if users[block] == 0}
        assert set(self._free) == idle, "a block is lost, or free and in use"
        assert users[NULL_BLOCK] == 0, "the null block was handed out"
        assert {c.block for c in self._by_key.values()} == set(self._by_block), (
            "the two views of the cache differ"
        )
        assert all(cached.block == block for block, cached in self._by_block.items())

    def _key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> tuple[int, tuple[int, ...]]:
        size = self.block_size
        return table.nodes[index], tuple(token_ids[index * size : (index + 1) * size])

    def _cache(self, cached: CachedBlock) -> CachedBlock:
        self._by_key[cached.key] = self._by_block[cached.block] = cached
        return cached

    def _uncache(self, block: int) -> None:
        if cached := self._by_block.pop(block, None):
            del self._by_key[cached.key]
