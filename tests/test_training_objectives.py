"""Weights and end-to-end TV against their sums of products; what an objective does at its edges."""

import math

import pytest
import torch

from angelspec_backend.training.losses import position_terms
from angelspec_backend.training.objectives import (
    BlockObjective,
    block_loss,
    decay_weights,
    dpace_weights,
    end_to_end_surrogate,
    end_to_end_tv,
)


def test_dpace_weights_equal_the_sum_of_products():
    confidence = torch.rand(6, 5, generator=torch.Generator().manual_seed(3))
    valid = torch.rand(6, 5, generator=torch.Generator().manual_seed(4)) < 0.7
    for mask in (None, valid):
        got = dpace_weights(confidence, 0.3, mask)
        for b in range(6):
            smooth = [0.7 * float(c) + 0.3 for c in confidence[b]]
            counts = [mask is None or bool(mask[b, m]) for m in range(5)]
            products = [
                math.prod(s for s, c in zip(smooth[: m + 1], counts, strict=False) if c) for m in range(5)
            ]
            want = [sum(products[m] for m in range(k, 5) if counts[m]) for k in range(5)]
            assert got[b].tolist() == pytest.approx(want)


def test_decay_halves_where_it_should():
    assert decay_weights(3, 1 / math.log(2)).tolist() == pytest.approx([1, 0.5, 0.25])


def test_the_surrogate_has_the_gradient_of_end_to_end_tv():
    generator = torch.Generator().manual_seed(5)
    valid = torch.rand(8, 4, generator=generator) < 0.8
    valid[0] = False
    start = torch.rand(8, 4, generator=generator)
    start[1, 2] = 1.0  # acceptance 0: no division by it
    gradients = []
    for form in (end_to_end_tv, end_to_end_surrogate):
        tv = start.clone().requires_grad_()
        form(tv, valid).backward()
        gradients.append(tv.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().sum() > 0


def test_a_batch_without_labels_has_loss_zero_and_no_nan():
    student = torch.randn(6, 5, requires_grad=True)
    objective = BlockObjective(weighting="dpace", lk_weight=1.0, e2e_weight=1.0)
    terms = position_terms(student, torch.zeros(6, dtype=torch.int64), torch.randn(6, 5), objective.terms)
    loss = block_loss(terms.view(2, 3), torch.zeros(2, 3, dtype=torch.bool), objective)
    loss.total.backward()
    assert loss.total == 0
    assert torch.equal(student.grad, torch.zeros(6, 5))


@pytest.mark.parametrize("wrong", [{"weighting": "flat"}, {"lk_weight": 1.5}, {"lk_type": "x"}])
def test_an_objective_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BlockObjective(**wrong)


def test_an_objective_with_a_confidence_needs_a_confidence_head():
    objective = BlockObjective(confidence_weight=1.0)
    terms = position_terms(
        torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), objective.terms
    )
    with pytest.raises(ValueError, match="confidence"):
        block_loss(terms.view(1, 2), torch.ones(1, 2, dtype=torch.bool), objective)
