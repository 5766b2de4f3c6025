"""Packing a step into one batch, against the obvious loop over rows and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.messages import ROW, DraftOutput, StepInput, split_rows
from angelspec_backend.engine.batch import check_step, pack
from angelspec_backend.engine.linear import padded_rows

VOCAB = 50
LIMITS = {"num_blocks": 64, "vocab_size": VOCAB, "max_context": 40, "num_layers": 6}


@st.composite
def steps(draw) -> tuple[StepInput, DraftOutput, int]:
    """A step of up to six rows of any kind, its drafts, and the block size."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    num_rows = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = np.zeros(num_rows, ROW)
    for row in rows:
        row["num_computed"] = draw(st.integers(0, 20))
        row["num_tokens"] = draw(st.integers(1, 9))
        row["sample"] = draw(st.integers(0, 1))
        row["num_draft_tokens"] = draw(st.integers(0, 5)) * row["sample"]
    lens = rng.integers(0, rows["num_draft_tokens"] + 1).astype(np.int32)
    end = rows["num_computed"] + rows["num_tokens"] + lens
    rows["num_blocks"] = -(-end // block_size) + rng.integers(0, 2, num_rows)
    tokens = rng.integers(0, VOCAB, rows["num_tokens"].sum()).astype(np.int32)
    table = rng.integers(1, 64, rows["num_blocks"].sum()).astype(np.int32)
    drafts = DraftOutput.of(rng.integers(0, VOCAB, lens.sum()).astype(np.int32), lens)
    return StepInput(rows, tokens, np.zeros(0, np.int32), table), drafts, block_size


@given(steps())
def test_packing_equals_a_loop_over_rows_and_tokens(case):
    step, drafts, block_size = case
    batch = pack(step.rows, step.token_ids, drafts, step.block_table, block_size)

    ids, positions, slots, wanted, starts = [], [], [], [], [0]
    tables = split_rows(step.block_table, step.rows["num_blocks"])
    known = split_rows(step.token_ids, step.rows["num_tokens"])
    drafted = split_rows(drafts.token_ids, drafts.lens)
    for row, table, tokens, draft in zip(step.rows, tables, known, drafted, strict=True):
        for index, token in enumerate([*tokens, *draft]):
            position = int(row["num_computed"]) + index
            if row["sample"] and index >= len(tokens) - 1:
                wanted.append(len(ids))
            ids.append(int(token))
            positions.append(position)
            slots.append(int(table[position // block_size]) * block_size + position % block_size)
        starts.append(len(ids))
    padding = [0] * (padded_rows(len(ids)) - len(ids))

    assert batch.token_ids.tolist() == ids + padding
    assert batch.positions.tolist() == positions + padding
    assert batch.slot_mapping.tolist() == slots + padding
    assert batch.query_start.tolist() == starts
    assert batch.context_lens.tolist() == step.rows["num_computed"].tolist()
    assert batch.logits_index.tolist() == wanted
    for row, table in zip(batch.block_table.tolist(), tables, strict=True):
        assert row == table.tolist() + [0] * (len(row) - len(table))


@given(steps())
def test_a_consistent_step_passes_the_check(case):
    step, drafts, block_size = case
    step.rows["num_taps"] = np.arange(len(step.rows)) % 3
    taps = np.concatenate([[], *(np.arange(n) * 5 for n in step.rows["num_taps"])]).astype(np.int32)
    step = replace(step, tap_ids=taps)
    check_step(step, drafts, block_size=block_size, **LIMITS)


def one_row() -> tuple[StepInput, DraftOutput]:
    rows = np.zeros(1, ROW)
    rows["num_computed"], rows["num_tokens"], rows["sample"], rows["num_draft_tokens"] = 5, 1, 1, 4
    rows["num_blocks"], rows["num_taps"] = 2, 3
    step = StepInput(
        rows,
        np.array([7], np.int32),
        np.zeros(0, np.int32),
        np.array([3, 9], np.int32),
        np.array([0, 3, 5], np.int32),
    )
    return step, DraftOutput.of(np.array([1, 2], np.int32), np.array([2], np.int32))


def change_field(name, value):
    return lambda step, drafts: step.rows.__setitem__(name, value)


def change_array(owner, name, index, value):
    return lambda step, drafts: getattr({"step": step, "drafts": drafts}[owner], name).__setitem__(
        index, value
    )


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (change_field("num_tokens", 0), "num_tokens: entry 0 is 0, allowed: 1 to 40"),
        (change_field("num_tokens", 2), "token_ids: expected 2 entries"),
        (change_field("num_computed", -1), "num_computed: entry 0 is -1"),
        (change_field("num_computed", 7), "reaches position 9, but its 2 blocks of 4"),
        (change_field("num_blocks", 3), "block_table: expected 3 entries"),
        (change_field("num_blocks", 99), "num_blocks: entry 0 is 99, allowed: 1 to 63"),
        (change_field("sample", 2), "sample: entry 0 is 2"),
        (change_field("sample", 0), "row 0 has 2 drafts, allowed: 0 to 0"),
        (change_field("num_draft_tokens", 1), "row 0 has 2 drafts, allowed: 0 to 1"),
        (change_array("step", "block_table", 1, 64), "block_table: entry 1 is 64, allowed: 1 to 63"),
        (change_array("step", "block_table", 0, 0), "block_table: entry 0 is 0, allowed: 1 to 63"),
        (change_array("step", "token_ids", 0, VOCAB), "token_ids: entry 0 is 50, allowed: 0 to 49"),
        (change_array("drafts", "token_ids", 0, -3), "draft token_ids: entry 0 is -3"),
        (change_array("drafts", "lens", 0, 3), "draft token_ids: expected 3 entries"),
        (change_array("drafts", "lens", 0, -1), "row 0 has -1 drafts"),
        (change_field("num_taps", 7), "num_taps: entry 0 is 7, allowed: 0 to 6"),
        (change_field("num_taps", 0), "tap_ids: expected 0 entries"),
        (change_array("step", "tap_ids", 2, 6), "tap_ids: entry 2 is 6, allowed: 0 to 5"),
        (change_array("step", "tap_ids", 1, 5), "tap_ids: those of row 0 are not ascending"),
    ],
)
def test_an_inconsistent_step_is_refused_with_the_reason(break_it, message):
    step, drafts = one_row()
    break_it(step, drafts)
    with pytest.raises(ValueError, match=message):
        check_step(step, drafts, block_size=4, **LIMITS)
