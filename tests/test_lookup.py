"""Lookup in front of a network drafter: which drafts it proposes, and when the network is asked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import ROW, DraftOutput, split_rows
from angelspec_backend.drafters.lookup import LookupDrafter
from test_ngram import brute_force

BLOCK_SIZE, NUM_BLOCKS, MAX_N = 4, 100, 3
WRONG = 999
"""A token that is in no text: what the network drafts."""


class Network:
    """Drafts what it is told to, and counts the rows for which it does."""

    info = DrafterInfo("network", False, True, tap_ids=(0,), hidden_bytes=1)

    def __init__(self) -> None:
        self.num_asked = 0
        self.text: list[int] = []  # whose continuation it drafts; nonsense behind its end

    def propose(self, rows, feed_token_ids, block_table, hidden_states) -> DraftOutput:
        self.num_asked += int((rows["num_draft_tokens"] > 0).sum())
        assert len(hidden_states) == len(feed_token_ids) == rows["num_feed"].sum()
        drafts = []
        for anchor, count in zip(rows["num_fed"] + rows["num_feed"], rows["num_draft_tokens"], strict=True):
            drafts += [*self.text[anchor + 1 :], *([WRONG] * count)][:count]
        return DraftOutput.of(np.array(drafts, np.int32), rows["num_draft_tokens"].astype(np.int32))


class Sequences:
    """Texts that are fed as the loop feeds hidden-state drafters: the token behind each position."""

    def __init__(self, lookup_only: bool = False) -> None:
        self.network, self.lookup_only = Network(), lookup_only
        self.drafter = LookupDrafter(self.network, MAX_N, NUM_BLOCKS, BLOCK_SIZE)

    def step(self, *cases: tuple[int, int, list[int], list[int], int]) -> list[list[int]]:
        """cases: (slot, positions fed before, text, its blocks, drafts wanted); the drafts of each."""
        rows = np.zeros(len(cases), ROW)
        for row, (slot, num_fed, text, blocks, count) in zip(rows, cases, strict=True):
            row["slot"], row["num_fed"], row["num_feed"] = slot, num_fed, len(text) - 1 - num_fed
            row["num_draft_tokens"], row["num_blocks"] = count, len(blocks)
            row["lookup_only"] = self.lookup_only
        feed = np.concatenate([np.array(case[2][case[1] + 1 :], np.int32) for case in cases])
        table = np.concatenate([np.array(case[3], np.int32) for case in cases])
        states = np.zeros(0 if self.lookup_only else len(feed), np.uint8)
        output = self.drafter.propose(rows, feed, table, states)
        return [draft.tolist() for draft in split_rows(output.token_ids, output.lens)]


def test_a_row_whose_end_is_known_gets_what_followed_it_and_does_not_run_the_network():
    sequences = Sequences()
    repeating, new = [0, 1, 2, 3, 4, 1, 2], [0, 1, 2, 3, 4, 5, 6]
    drafts = sequences.step((0, 0, repeating, [1, 2], 3), (1, 0, new, [3, 4], 2), (2, 0, new, [5, 6], 0))
    assert drafts == [[3, 4, 1], [WRONG, WRONG], []]
    assert sequences.network.num_asked == 1


def test_the_network_is_asked_for_no_more_than_it_was_trained_for():
    sequences = Sequences()
    sequences.drafter = LookupDrafter(sequences.network, MAX_N, NUM_BLOCKS, BLOCK_SIZE, most=2)
    repeating, new = [0, 1, 2, 3, 4, 1, 2], [0, 1, 2, 3, 4, 5, 6]
    drafts = sequences.step((0, 0, repeating, [1, 2], 3), (1, 0, new, [3, 4], 3))
    assert drafts == [[3, 4, 1], [WRONG, WRONG]]


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_those_of_a_search_through_the_text_whoever_had_the_slot_and_the_blocks(seed):
    """Sequences come, go on, and go; some begin with blocks that others have filled.  In some steps they only
    look up, and the network is fed later what it has not got then."""
    rng = np.random.default_rng(seed)
    sequences = Sequences()
    live: dict[int, tuple[list[int], list[int], int, int]] = {}  # slot -> text, blocks, positions fed, seen
    looked_up = 0
    for _ in range(300):
        slot = int(rng.integers(3))
        if slot not in live or rng.random() < 0.05:
            text, blocks, fed, seen = [0], [], 0, 0
            parent, kept, parent_fed, _ = live.get(int(rng.integers(3)), ([0], [], 0, 0))
            if shared := int(rng.integers(0, parent_fed // BLOCK_SIZE + 1)):
                fed = seen = shared * BLOCK_SIZE
                text, blocks = parent[: fed + 1], kept[:shared]
            used = {block for _, others, _, _ in live.values() for block in others}
            free = [block for block in range(1, NUM_BLOCKS) if block not in {*used, *blocks}]
            blocks = [*blocks, *rng.choice(free, 20 - len(blocks), replace=False).tolist()]
        else:
            text, blocks, fed, seen = live[slot]
        if len(text) > 60:
            del live[slot]
            continue
        text = [*text, *rng.integers(0, 4, rng.integers(1, 5)).tolist()]
        count = int(rng.integers(0, 5))
        sequences.lookup_only = bool(rng.integers(2))
        [draft] = sequences.step((slot, seen if sequences.lookup_only else fed, text, blocks, count))
        expected = brute_force(text[1:], 1, MAX_N, count)
        if draft != [WRONG] * count:
            assert draft == expected
            looked_up += 1
        seen = len(text) - 1
        live[slot] = text, blocks, fed if sequences.lookup_only else seen, seen
    assert looked_up > 100


def share_asked(text_of: Callable[[int], list[int]], network_knows: bool) -> float:
    """How often the network is asked while texts are generated, one after the other."""
    sequences, steps = Sequences(), 0
    network = sequences.network
    for number in range(20):
        text, known, fed = text_of(number), 2, 0
        network.text = text if network_knows else []
        while known < len(text):
            [draft] = sequences.step((0, fed, text[:known], list(range(1, 40)), 4))
            fed = known - 1
            while draft and known < len(text) and draft.pop(0) == text[known]:
                known += 1
            known += 1
            steps += 1
    return network.num_asked / steps


def test_it_learns_whose_drafts_are_accepted():
    rng = np.random.default_rng(0)

    def chance(_: int) -> list[int]:
        return rng.integers(0, 4, 120).tolist()

    def periodic(_: int) -> list[int]:
        return rng.permutation(12).tolist() * 10

    assert share_asked(chance, network_knows=True) > 0.9
    assert share_asked(periodic, network_knows=False) < 0.4  # the first period has to be drafted by something


def test_a_row_that_is_to_look_up_alone_never_runs_the_network():
    sequences = Sequences(lookup_only=True)
    assert sequences.step((0, 0, [0, 1, 2, 3], [1, 2], 3), (1, 0, [0, 1, 2, 1], [3, 4], 2)) == [[], [2, 1]]
    assert sequences.network.num_asked == 0


def test_a_draft_that_nobody_wants_is_no_record_of_anything():
    sequences = Sequences()
    text = [0, 1, 2, 3, 1, 2, 3, 1]
    assert sequences.step((0, 0, text, [1, 2, 3], 0)) == [[]]
    assert sequences.step((0, 7, [*text, 2], [1, 2, 3], 2)) == [[3, 1]]
