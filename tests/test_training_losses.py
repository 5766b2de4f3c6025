"""Losses against plain sums over the vocabulary, and in chunks."""

import math

import pytest
import torch

from angelspec_backend.training.chunks import chunked_terms
from angelspec_backend.training.draft_vocab import covered_by, draft_index
from angelspec_backend.training.losses import (
    TermOptions,
    distances,
    keep_top,
    kl_divergence,
    position_terms,
    soft_cross_entropy,
    total_variation,
)
from angelspec_backend.training.objectives import (
    BlockObjective,
    block_loss,
)


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(1)
    return [2 * torch.randn(9, 12, generator=generator) for _ in range(2)]


def probabilities(row):
    exps = [math.exp(value) for value in row.tolist()]
    return [value / sum(exps) for value in exps]


def test_distances_equal_sums_over_the_vocabulary(logits):
    student, teacher = logits
    terms = position_terms(student, torch.arange(9), teacher, TermOptions(distances=True, soft_ce=True))
    for n in range(9):
        q, p = probabilities(student[n]), probabilities(teacher[n])
        pairs = list(zip(p, q, strict=True))
        assert terms.ce[n] == pytest.approx(-math.log(q[n]), rel=1e-5)
        assert terms.tv[n] == pytest.approx(1 - sum(min(pair) for pair in pairs), rel=1e-5)
        assert terms.kl[n] == pytest.approx(sum(a * math.log(a / b) for a, b in pairs), rel=1e-5)
        assert terms.soft_ce[n] == pytest.approx(-sum(a * math.log(b) for a, b in pairs), rel=1e-5)
        assert terms.hit[n] == (max(q) == q[n])


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_the_distances_are_those_of_their_formulas(logits, exact):
    teacher = logits[1]
    log_z = teacher.logsumexp(-1) + 0.3 if exact else None
    for which in ("tv", "kl", "both"):
        gradients = []
        for direct in (True, False):
            student = logits[0].clone().requires_grad_()
            if direct:
                q, p = student.softmax(-1), teacher.softmax(-1)
                mass = math.exp(-0.3) if exact else 1.0
                tv, kl = 0.5 * (mass * p - q).abs().sum(-1), mass * (p * (p / q).log()).sum(-1)
            else:
                tv, kl = distances(student, teacher, log_z)
            each = torch.arange(9.0)
            ({"tv": tv, "kl": kl, "both": tv + each * kl}[which] * (1 + each)).sum().backward()
            gradients.append(student.grad)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_with_the_true_normaliser_tv_counts_mass_outside_the_draft_vocabulary(logits):
    student, teacher = logits[0][:, :7], logits[1]
    draft_ids = torch.tensor([0, 2, 3, 5, 8, 9, 11])
    log_z = teacher.logsumexp(-1)
    tv = total_variation(student, teacher[:, draft_ids], log_z)
    kl = kl_divergence(student, teacher[:, draft_ids], log_z)
    inside = kl_divergence(student, teacher[:, draft_ids])
    for n in range(9):
        q, p = probabilities(student[n]), probabilities(teacher[n])
        mass = [p[i] for i in draft_ids.tolist()]
        assert tv[n] == pytest.approx(1 - sum(map(min, q, mass)), rel=1e-5)
        assert kl[n] == pytest.approx(sum(mass) * float(inside[n]), rel=1e-4)


def test_keeping_all_tokens_or_more_changes_nothing(logits):
    for k in (12, 20):
        assert all(got is want for got, want in zip(keep_top(*logits, k), logits, strict=True))


def test_soft_cross_entropy_and_kl_have_the_same_gradient(logits):
    gradients = []
    for function in (soft_cross_entropy, kl_divergence):
        student = logits[0].clone().requires_grad_()
        function(student, logits[1]).sum().backward()
        gradients.append(student.grad)
    torch.testing.assert_close(*gradients)


def test_a_term_that_needs_a_teacher_is_refused_without_one(logits):
    with pytest.raises(ValueError, match="teacher logits are None"):
        position_terms(logits[0], torch.arange(9), None, TermOptions(distances=True))


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
@pytest.mark.parametrize("recompute", [True, False])
def test_chunks_give_the_values_and_gradients_of_the_whole(chunk, recompute):
    generator = torch.Generator().manual_seed(2)
    hidden, target = (torch.randn(9, 5, generator=generator) for _ in range(2))
    head, labels = torch.randn(12, 5, generator=generator), torch.arange(9)
    options = TermOptions(distances=True)

    def run(size):
        parameters = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]

        def terms(student, teacher, ids):
            return position_terms(student @ parameters[1].T, ids, teacher @ head.T, options)

        inputs = (parameters[0], target, labels)
        got = chunked_terms(terms, inputs, size, recompute) if size else terms(*inputs)
        (got.ce + got.tv * got.kl).sum().backward()
        return got.ce.detach(), got.hit, *(p.grad for p in parameters)

    for got, want in zip(run(chunk), run(0), strict=True):
        torch.testing.assert_close(got, want)


def test_recomputed_chunks_keep_no_logits():
    saved = []
    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        chunked_terms(lambda h, ids: position_terms(h @ head.T, ids), (hidden, torch.arange(64)), 8)
    assert max(saved, default=0) <= 8 * 1000 // 10


def test_a_label_outside_the_draft_vocabulary_has_no_cross_entropy_and_is_never_hit():
    index = draft_index(torch.tensor([3, 7, 8]), 10)
    assert index.tolist() == [-1, -1, -1, 0, -1, -1, -1, 1, 2, -1]
    terms = position_terms(torch.zeros(2, 3), index[torch.tensor([7, 4])])
    assert terms.reachable.tolist() == [True, False]
    assert terms.ce.tolist() == pytest.approx([math.log(3), 0])
    assert terms.confidence.tolist() == pytest.approx([1 / 3, 0])
    assert not terms.hit[1]
    loss = block_loss(terms.view(1, 2), torch.ones(1, 2, dtype=torch.bool), BlockObjective())
    assert float(loss.total) == pytest.approx(math.log(3))


def test_rows_whose_likeliest_token_is_outside_the_draft_vocabulary_are_found():
    index = draft_index(torch.tensor([1, 2]), 4)
    assert covered_by(torch.eye(4), index).tolist() == [False, True, True, False]
