"""KV blocks are never lost, shared by accident, or handed out half."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.block_manager import NULL_BLOCK, BlockManager, BlockTable


@given(
    num_blocks=st.integers(2, 30),
    block_size=st.integers(1, 5),
    actions=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=60),
)
def test_any_trace_of_growth_and_release_keeps_every_block_accounted_for(num_blocks, block_size, actions):
    manager = BlockManager(num_blocks, block_size)
    tables = [BlockTable(num_blocks) for _ in range(5)]
    for which, num_tokens in actions:
        table = tables[which]
        if num_tokens == 0:
            manager.release(table)
            assert len(table) == 0
        else:
            needed = max(0, -(-num_tokens // block_size) - len(table))
            before, free = table.ids.tolist(), manager.num_free
            grown = manager.grow(table, num_tokens)
            assert grown == (needed <= free)
            assert table.ids.tolist()[: len(before)] == before
            assert len(table) == len(before) + (needed if grown else 0)
            assert NULL_BLOCK not in table.ids
        manager.check_integrity(tables)
