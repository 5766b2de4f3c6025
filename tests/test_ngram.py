"""The n-gram drafter against a search through the whole text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.messages import ROW, split_rows
from angelspec_backend.drafters.ngram import NgramDrafter

NUM_SLOTS = 3


def brute_force(text, min_n, max_n, count):
    """Copy what followed the latest earlier occurrence of the longest suffix, the copy itself included."""
    for size in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                copied = list(text)
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(text) :]
    return []


def feed(drafter, *cases):
    """One step.  cases: (slot, num_fed, tokens, num_draft_tokens); returns the drafts of each."""
    rows = np.zeros(len(cases), ROW)
    rows["slot"], rows["num_fed"] = [case[0] for case in cases], [case[1] for case in cases]
    rows["num_feed"], rows["num_draft_tokens"] = [len(case[2]) for case in cases], [case[3] for case in cases]
    tokens = np.concatenate([np.array(case[2], np.int32) for case in cases])
    output = drafter.propose(rows, tokens, np.zeros(0, np.int32), np.zeros(0, np.uint8))
    assert (output.lens <= rows["num_draft_tokens"]).all()
    return [draft.tolist() for draft in split_rows(output.token_ids, output.lens)]


steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, NUM_SLOTS - 1),  # slot
            st.floats(0, 1),  # where to roll back to, of what was fed
            st.sampled_from(["go on", "go on", "go on", "roll back", "begin anew"]),
            st.lists(st.integers(0, 2), max_size=12),  # tokens, few different ones
            st.integers(0, 9),  # drafts
        ),
        min_size=1,
        max_size=NUM_SLOTS,
        unique_by=lambda case: case[0],
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(steps, st.integers(1, 3), st.integers(0, 3))
def test_drafts_equal_those_of_a_search_through_the_whole_text(steps, min_n, more):
    drafter = NgramDrafter(min_n, min_n + more, NUM_SLOTS)
    texts = [[] for _ in range(NUM_SLOTS)]
    for step in steps:
        cases, expected = [], []
        for slot, where, action, tokens, count in step:
            keep = {"go on": 1, "roll back": where, "begin anew": 0}[action]
            texts[slot] = texts[slot][: int(keep * len(texts[slot]))]
            cases.append((slot, len(texts[slot]), tokens, count))
            texts[slot] = texts[slot] + tokens
            expected.append(brute_force(texts[slot], min_n, min_n + more, count))
        assert feed(drafter, *cases) == expected


def test_the_longest_suffix_wins_over_a_later_occurrence_of_a_shorter_one():
    text = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert feed(NgramDrafter(2, 3, 1), (0, 0, text, 2)) == [[7, 9]]
    assert feed(NgramDrafter(2, 2, 1), (0, 0, text, 2)) == [[8, 1]]


def test_the_latest_occurrence_wins_among_equally_long_ones():
    assert feed(NgramDrafter(1, 2, 1), (0, 0, [1, 2, 5, 1, 2, 6, 1, 2], 1)) == [[6]]


def test_periodic_text_is_continued_to_the_full_length():
    assert feed(NgramDrafter(2, 4, 1), (0, 0, [4, 5, 6, 4, 5, 6, 4, 5], 8)) == [[6, 4, 5, 6, 4, 5, 6, 4]]


def test_new_text_and_text_shorter_than_the_suffix_get_no_drafts():
    assert feed(NgramDrafter(1, 3, 2), (0, 0, [1, 2, 3], 5), (1, 0, [], 5)) == [[], []]
    assert feed(NgramDrafter(2, 3, 1), (0, 0, [1, 1], 5)) == [[]]


def test_a_reused_slot_knows_nothing_of_its_former_sequence():
    drafter = NgramDrafter(1, 2, 1)
    feed(drafter, (0, 0, [1, 2, 3, 1, 2, 3], 0))
    assert feed(drafter, (0, 0, [1, 2], 4)) == [[]]


def test_a_row_that_skips_tokens_is_refused():
    drafter = NgramDrafter(1, 2, 1)
    feed(drafter, (0, 0, [1, 2], 0))
    with pytest.raises(ValueError, match="slot 0 was fed 2 tokens, but the row says 5"):
        feed(drafter, (0, 5, [1], 1))


def test_sizes_out_of_order_are_refused():
    with pytest.raises(ValueError, match="min 3 and max 2"):
        NgramDrafter(3, 2, 1)
