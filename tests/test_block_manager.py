"""KV blocks are never lost, shared by accident or handed out half; cached ones hold what they should."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.block_manager import NULL_BLOCK, BlockManager, BlockTable

SIZE = 2
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=300)
@given(
    num_blocks=st.integers(8, 30),
    actions=st.lists(st.tuples(st.integers(0, 3), tokens, st.integers(0, 12), st.booleans()), max_size=40),
)
def test_any_trace_of_starts_growth_and_release_keeps_every_block_accounted_for(num_blocks, actions):
    """Each action ends the sequence in a place and starts another there.

    ``content`` is the target's pool, ``behind`` that of a drafter, which keeps the token behind each block.
    """
    manager = BlockManager(num_blocks, SIZE)
    tables = [BlockTable(num_blocks) for _ in range(4)]
    content: dict[int, list[int]] = {}
    behind: dict[int, int] = {}
    for place, token_ids, num_computed, feeding in actions:
        table = tables[place]
        manager.release(table)
        assert len(table) == 0
        manager.check_integrity(tables)

        prefix = manager.match(token_ids)
        assert len(prefix) * SIZE < len(token_ids)
        for index, cached in enumerate(prefix):
            assert content[cached.block] == token_ids[: (index + 1) * SIZE]
            assert all(behind[cached.block] == token for token in cached.fed.values())
        free = manager.num_free
        if not manager.start(table, prefix, len(token_ids)):
            assert len(table) == 0
            assert manager.num_free == free
            continue
        assert manager.grow(table, len(token_ids))
        assert len(table) == manager.blocks_for(len(token_ids))
        assert NULL_BLOCK not in table.ids
        for index, block in enumerate(table.ids.tolist()):
            if index >= len(prefix):
                assert all(block not in other.ids for other in tables if other is not table)
                content[block] = token_ids[: (index + 1) * SIZE]
                behind.pop(block, None)
        num_computed = max(len(prefix) * SIZE, min(num_computed, len(token_ids)))
        manager.publish(table, token_ids, num_computed)
        for index in range(len(prefix), (num_computed - 1) // SIZE if feeding else 0):
            behind[int(table.ids[index])] = token = token_ids[(index + 1) * SIZE]
            manager.mark_fed(table, token_ids, index, 0, token)
        manager.check_integrity(tables)


def test_growth_is_all_or_nothing():
    manager = BlockManager(5, SIZE)
    first, second = BlockTable(8), BlockTable(8)
    assert manager.grow(first, 5)
    assert not manager.grow(second, 3)
    assert (len(second), manager.num_free) == (0, 1)
    assert manager.grow(second, 2)
    manager.check_integrity([first, second])


def test_of_cached_blocks_the_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning():
    manager = BlockManager(6, SIZE)
    old, new, table = BlockTable(8), BlockTable(8), BlockTable(8)
    for each, token_ids in ((old, [1, 1, 2, 2]), (new, [3, 3, 4, 4])):
        manager.grow(each, 4)
        manager.publish(each, token_ids, 4)
        manager.release(each)
    manager.grow(table, 4)  # the block that was never used, and the end of the old prefix
    assert len(manager.match([1, 1, 2, 2, 0])) == 1
    assert len(manager.match([3, 3, 4, 4, 0])) == 2


@settings(max_examples=200)
@given(
    num_blocks=st.integers(6, 20),
    actions=st.lists(st.tuples(st.integers(0, 2), tokens, st.booleans()), max_size=40),
)
def test_blocks_go_by_least_recent_use_and_cached_ones_last(num_blocks, actions):
    """Against a clock: every block remembers when its last user left, the end of a table before its start."""
    manager = BlockManager(num_blocks, SIZE)
    tables = [BlockTable(num_blocks) for _ in range(3)]
    left: dict[int, int] = {}  # block -> when its last user left
    cached: set[int] = set()
    clock = 0

    def idle() -> set[int]:
        return set(range(1, num_blocks)) - {block for table in tables for block in table.ids.tolist()}

    for place, token_ids, publish in actions:
        table = tables[place]
        gone = table.ids.tolist()
        manager.release(table)
        for block in reversed(gone):
            clock += 1
            left[block] = clock

        prefix = manager.match(token_ids)
        if not manager.start(table, prefix, len(token_ids)):
            continue
        for index in range(len(prefix), manager.blocks_for(len(token_ids))):
            free = idle()
            assert manager.grow(table, (index + 1) * SIZE)
            block = int(table.ids[index])
            if free - cached:
                assert block not in cached
            else:
                assert block == min(free, key=left.__getitem__)
            cached.discard(block)
        if publish:
            before = {found.block for found in manager.match([*token_ids, 9])}
            manager.publish(table, token_ids, len(token_ids))
            after = {found.block for found in manager.match([*token_ids, 9])}
            cached |= after - before


def test_two_sequences_that_compute_the_same_prefix_at_once_leave_one_copy_in_the_cache():
    manager = BlockManager(9, SIZE)
    tables = [BlockTable(4), BlockTable(4)]
    for table in tables:
        manager.grow(table, 4)
    for table in tables:
        manager.publish(table, [1, 2, 3, 4], 4)
    assert [cached.block for cached in manager.match([1, 2, 3, 4, 5])] == tables[0].ids.tolist()
    assert tables[0].nodes == tables[1].nodes
    manager.check_integrity(tables)


def test_what_a_drafter_has_seen_is_known_per_block():
    manager = BlockManager(9, SIZE)
    table, text = BlockTable(4), [1, 2, 3, 4, 5, 6, 7]
    manager.grow(table, 6)
    manager.publish(table, text, 6)
    manager.mark_fed(table, text, 0, 1, token_behind=-1)
    assert [cached.fed for cached in manager.match(text)] == [{1: -1}, {}, {}]
    manager.mark_fed(table, text, 1, 2, token_behind=5)
    assert [cached.fed for cached in manager.match(text)] == [{1: -1}, {2: 5}, {}]
    manager.forget_drafters()
    assert not any(cached.fed for cached in manager.match(text))
    manager.forget()
    assert manager.match(text) == []
    manager.mark_fed(table, text, 0, 1, token_behind=-1)
    assert manager.match(text) == []


def test_a_block_that_a_drafter_knows_takes_the_place_of_one_that_it_does_not():
    manager = BlockManager(9, SIZE)
    first, second, text = BlockTable(4), BlockTable(4), [1, 2, 3, 4, 5]
    for table in (first, second):
        manager.grow(table, 4)
        manager.publish(table, text, 4)
    manager.release(first)
    manager.mark_fed(second, text, 0, 1, token_behind=-1)  # the other one can be fed itself
    assert manager.match(text)[0].block != second.ids[0]
    manager.mark_fed(second, text, 0, 1, token_behind=3)
    assert [cached.fed for cached in manager.match(text)] == [{1: 3}, {}]
    assert manager.match(text)[0].block == second.ids[0]
    manager.check_integrity([first, second])
    third = BlockTable(4)
    manager.grow(third, 2)  # what nobody can find any more goes first
    assert len(manager.match(text)) == 2
