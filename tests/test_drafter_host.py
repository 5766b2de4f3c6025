"""Several drafters in one process: each row goes to its own, and one that fails harms nobody."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.loop_config import DrafterInfo, loaded
from angelspec_backend.core.messages import NO_DRAFTER, ROW, DraftOutput, StepInput, split_rows
from angelspec_backend.drafters.base import DrafterHost, MissingDrafter
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.triton.device_states import IN_TORCH

TAPS = ((), (4,), (0, 2, 7))
"""Tap ids of the three drafters."""
HIDDEN_BYTES = 2


class EchoDrafter:
    """Proposes as many copies of the sum of its number, fed tokens, blocks and bytes as it may, or fails."""

    def __init__(self, number):
        self.info = DrafterInfo(f"echo{number}", False, False, TAPS[number], HIDDEN_BYTES)
        self.number, self.broken, self.slots = number, False, []

    def propose(self, rows, feed_token_ids, block_table, hidden_states):
        if self.broken:
            raise RuntimeError("out of order")
        self.slots.append(rows["slot"].tolist())
        feeds = split_rows(feed_token_ids, rows["num_feed"])
        tables = split_rows(block_table, rows["num_blocks"])
        states = split_rows(hidden_states, rows["num_feed"] * self.info.bytes_per_token)
        lens = rows["num_draft_tokens"]
        drafts = [
            self.number + feed.sum() + table.sum() + int(state.sum())
            for feed, table, state in zip(feeds, tables, states, strict=True)
        ]
        return DraftOutput.of(np.repeat(np.array(drafts, np.int32), lens), lens.copy())


def make_step(rows):
    """rows: dictionaries of ROW fields with 'feed' and 'blocks' as lists."""
    records = np.zeros(len(rows), ROW)
    for record, row in zip(records, rows, strict=True):
        for name in ("slot", "drafter", "num_fed", "num_draft_tokens"):
            record[name] = row.get(name, 0)
        record["num_feed"], record["num_blocks"] = len(row["feed"]), len(row["blocks"])
    feed = np.array([token for row in rows for token in row["feed"]], np.int32)
    blocks = np.array([block for row in rows for block in row["blocks"]], np.int32)
    states = np.concatenate([hidden_states(row) for row in rows]) if rows else np.zeros(0, np.uint8)
    return StepInput(records, np.zeros(0, np.int32), feed, blocks, hidden_states=states)


def hidden_states(row):
    """Bytes that belong to this row: they depend on its slot and its fed tokens."""
    width = len(TAPS[row["drafter"]]) * HIDDEN_BYTES if row.get("drafter", 0) != NO_DRAFTER else 0
    return np.array([(row["slot"] + 7 * token) % 256 for token in row["feed"]], np.uint8).repeat(width)


any_rows = st.lists(
    st.fixed_dictionaries(
        {
            "drafter": st.integers(NO_DRAFTER, 2),
            "num_draft_tokens": st.integers(0, 4),
            "feed": st.lists(st.integers(0, 1000), max_size=5),
            "blocks": st.lists(st.integers(0, 1000), max_size=3),
        }
    ),
    max_size=8,
)


@pytest.mark.parametrize("in_tensors", [False, True])
@settings(deadline=None)
@given(rows=any_rows)
def test_each_row_gets_the_drafts_of_its_own_drafter_in_row_order(in_tensors, rows):
    rows = [{"slot": slot, **row} for slot, row in enumerate(rows)]
    step, drafters = make_step(rows), [EchoDrafter(number) for number in range(3)]
    if in_tensors:
        step = replace(step, hidden_states=torch.from_numpy(step.hidden_states))
        output = DrafterHost(drafters, 8, IN_TORCH).propose(step)
    else:
        output = DrafterHost(drafters, 8).propose(step)
    expected = [
        [row["drafter"] + sum(row["feed"]) + sum(row["blocks"]) + hidden_states(row).sum(dtype=int)]
        * row["num_draft_tokens"]
        if row["drafter"] != NO_DRAFTER
        else []
        for row in rows
    ]
    assert [draft.tolist() for draft in split_rows(output.token_ids, output.lens)] == expected


def row(slot, drafter=0, num_fed=0):
    return {
        "slot": slot,
        "drafter": drafter,
        "num_fed": num_fed,
        "num_draft_tokens": 1,
        "feed": [5],
        "blocks": [],
    }


def test_a_failing_drafter_costs_only_its_own_rows_their_drafts(caplog):
    good, bad = EchoDrafter(0), EchoDrafter(1)
    host = DrafterHost([good, bad], 4)
    bad.broken = True
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            output = host.propose(make_step([row(0, 1), row(1, 0), row(2, NO_DRAFTER)]))
            assert output.lens.tolist() == [0, 1, 0]
    assert host.num_failures == [0, 3]
    assert len(caplog.records) == 1
    assert "echo1" in caplog.text


def test_a_sequence_that_a_failed_drafter_missed_gets_no_drafts_until_it_begins_anew():
    drafter = EchoDrafter(0)
    host = DrafterHost([drafter], 4)
    host.propose(make_step([row(0), row(1)]))
    drafter.broken = True
    host.propose(make_step([row(0, num_fed=1)]))
    drafter.broken = False
    drafter.slots.clear()
    assert host.propose(make_step([row(0, num_fed=2), row(1, num_fed=1)])).lens.tolist() == [0, 1]
    assert host.propose(make_step([row(0, num_fed=0), row(1, num_fed=2)])).lens.tolist() == [1, 1]
    assert host.propose(make_step([row(0, num_fed=1)])).lens.tolist() == [1]
    assert drafter.slots == [[1], [0, 1], [0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0, drafter=1)], "drafter: row 0 has 1, allowed: -1 to 0"),
        ([row(0), row(4)], "slot: row 1 has 4, allowed: 0 to 3"),
    ],
)
def test_a_step_that_names_what_is_not_there_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        DrafterHost([EchoDrafter(0)], 4).propose(make_step(rows))


def test_a_step_whose_lengths_do_not_add_up_is_refused():
    step = make_step([row(0)])
    with pytest.raises(ValueError, match="feed_token_ids: expected 1 entries"):
        DrafterHost([EchoDrafter(0)], 4).propose(
            StepInput(step.rows, step.token_ids, np.zeros(3, np.int32), step.block_table)
        )
    step = make_step([row(0, drafter=1)])
    with pytest.raises(ValueError, match="hidden_states: expected 2 bytes for the fed tokens, got 3"):
        DrafterHost([EchoDrafter(0), EchoDrafter(1)], 4).propose(
            replace(step, hidden_states=np.zeros(3, np.uint8))
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tap_ids": (3, 3), "hidden_bytes": 8}, "ascending"),
        ({"tap_ids": (3,)}, "hidden_bytes must be positive"),
        ({"tap_ids": (3,), "hidden_bytes": 8, "keeps_drafts": True}, "keeps_drafts false"),
    ],
)
def test_a_drafter_that_contradicts_itself_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DrafterInfo(**({"name": "x", "keeps_drafts": False, "shares_blocks": True} | values))


def test_a_drafter_that_reads_what_the_target_does_not_put_out_counts_as_failed():
    info = DrafterInfo("x", False, True, (0, 5), 8)
    assert info.checked(num_layers=6, hidden_bytes=8) == info
    few, small = info.checked(num_layers=5, hidden_bytes=8), info.checked(num_layers=6, hidden_bytes=4)
    assert few.failure == "tap_ids are [0, 5], but the target has layers 0 to 4"
    assert "hidden_bytes is 8, but those of the target are 4" in small.failure
    assert (few.name, few.tap_ids) == ("x", ())
    other = DrafterInfo("y", False, False)
    assert other.checked(num_layers=1, hidden_bytes=4) == other


def test_a_drafter_that_could_not_be_loaded_keeps_the_place_of_its_name():
    host = DrafterHost([MissingDrafter("x", "no such folder"), NgramDrafter(1, 2, 4)], 4)
    assert loaded([each.info for each in host.drafters]) == {1}
    rows = np.zeros(2, ROW)
    rows["slot"], rows["drafter"], rows["num_feed"], rows["num_draft_tokens"] = [0, 1], [0, 1], 3, 2
    feed = np.array([7, 8, 7] * 2, np.int32)
    output = host.propose(StepInput(rows, feed, feed, np.zeros(0, np.int32)))
    assert (output.lens.tolist(), output.token_ids.tolist()) == ([0, 2], [8, 7])
