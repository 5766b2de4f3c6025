"""Simulated acceptance against counting block by block."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.training.metrics import accepted_lengths, position_means, survival

DRAFTS = 4
bits = st.lists(st.lists(st.booleans(), min_size=DRAFTS, max_size=DRAFTS), min_size=1, max_size=6)


def count_accepted(hits, valid):
    """Accepted drafts of one block, and how many of its drafts are supervised without a gap."""
    reach = next((j for j in range(DRAFTS) if not valid[j]), DRAFTS)
    return next((j for j in range(reach) if not hits[j]), reach), reach


@given(bits, bits)
def test_accepted_lengths_and_survival_count_contiguous_hits(hits, valid):
    hits, valid = hits[: len(valid)], valid[: len(hits)]
    counted = [count_accepted(*block) for block in zip(hits, valid, strict=True)]
    hit_tensor, valid_tensor = torch.tensor(hits), torch.tensor(valid)
    assert accepted_lengths(hit_tensor, valid_tensor).tolist() == [accepted for accepted, _ in counted]
    got = survival(hit_tensor, valid_tensor)
    for j in range(DRAFTS):
        assert got.survived[j] == sum(accepted > j for accepted, _ in counted)
        assert got.blocks[j] == sum(reach > j for _, reach in counted)
    halves = [survival(hit_tensor[i::2], valid_tensor[i::2]) for i in (0, 1)]
    assert torch.equal((halves[0] + halves[1]).survived, got.survived)


def test_the_product_is_taken_inside_a_block_before_averaging():
    hits = torch.tensor([[True, True], [False, False]])
    got = survival(hits, torch.ones_like(hits))
    assert got.rates.tolist() == [0.5, 0.5]  # marginal accuracies would give 0.5 and 0.25
    assert got.accepted_length == 1.0


def test_acceptance_probabilities_multiply():
    got = survival(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.25, 0.5]]), torch.ones(2, 3, dtype=torch.bool))
    assert got.rates.tolist() == [0.75, 0.25, 0.1875]


def test_a_cut_block_does_not_count_where_it_has_no_draft():
    hits = torch.ones(2, 3, dtype=torch.bool)
    got = survival(hits, torch.tensor([[True, True, True], [True, False, True]]))
    assert got.blocks.tolist() == [2, 1, 1]
    assert got.accepted_length == 3.0


def test_means_of_a_position_are_over_its_valid_drafts():
    values = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
    means, counts = position_means(values, torch.tensor([[True, False], [True, False]]))
    assert means.tolist() == [2.0, 0.0]
    assert counts.tolist() == [2, 0]
