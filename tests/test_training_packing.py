"""Rows of documents."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.training.packing import pack, row_layout

CAPACITY = 10
lengths = st.lists(st.integers(1, CAPACITY), max_size=40)


def packed(sizes, **options):
    """Rows of (index, length)."""
    return list(pack(enumerate(sizes), lambda document: document[1], CAPACITY, **options))


@given(lengths)
def test_without_min_fill_rows_are_those_of_next_fit(sizes):
    want = []
    for document in enumerate(sizes):
        if want and sum(size for _, size in want[-1]) + document[1] <= CAPACITY:
            want[-1].append(document)
        else:
            want.append([document])
    assert packed(sizes) == want


@settings(max_examples=200)
@given(lengths, st.floats(0, 1), st.integers(1, 50))
def test_every_document_is_in_one_row_and_no_row_overflows(sizes, min_fill, max_waiting):
    rows = packed(sizes, min_fill=min_fill, max_waiting=max_waiting)
    assert sorted(document for row in rows for document in row) == list(enumerate(sizes))
    assert all(0 < sum(size for _, size in row) <= CAPACITY for row in rows)


@settings(max_examples=200)
@given(lengths, st.floats(0, 1))
def test_rows_closed_before_the_end_are_filled_enough(sizes, min_fill):
    given_out, arrived = [], []

    def arriving():
        for document in enumerate(sizes):
            arrived.append(document)
            yield document
        arrived.append(None)  # the end

    for row in pack(arriving(), lambda document: document[1], CAPACITY, min_fill, max_waiting=100):
        if arrived[-1] is not None:
            given_out.append(row)
    assert all(sum(size for _, size in row) >= min_fill * CAPACITY for row in given_out)


@given(lengths, st.integers(1, 5))
def test_no_more_documents_wait_than_allowed(sizes, max_waiting):
    arrived, given_out, most = 0, 0, 0

    def arriving():
        nonlocal arrived
        for document in enumerate(sizes):
            arrived += 1
            yield document

    for row in pack(arriving(), lambda document: document[1], CAPACITY, 1.0, max_waiting):
        if arrived < len(sizes):
            given_out += len(row)
            most = max(most, arrived - given_out)
    assert most <= max_waiting + CAPACITY  # a row holds at most CAPACITY documents


def test_a_document_that_does_not_fit_waits_and_opens_the_next_row():
    assert packed([6, 7, 3, 3], min_fill=0.9) == [[(0, 6), (2, 3)], [(1, 7), (3, 3)]]
    assert packed([6, 7, 3, 3]) == [[(0, 6)], [(1, 7), (2, 3)], [(3, 3)]]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="11 tokens, a row only 10"):
        packed([11])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_a_rows_layout_counts_documents_and_their_positions(sizes, padding):
    doc_ids, positions = row_layout(sizes, sum(sizes) + padding)
    assert doc_ids.tolist() == [i for i, n in enumerate(sizes) for _ in range(n)] + [-1] * padding
    assert positions.tolist() == [p for n in (*sizes, padding) for p in range(n)]
    assert row_layout(sizes)[0].tolist() == doc_ids.tolist()[: sum(sizes)]


def test_a_layout_too_long_for_its_row_is_refused():
    with pytest.raises(ValueError, match="7 tokens, the row only 6"):
        row_layout([3, 4], 6)
