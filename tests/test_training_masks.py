"""Attention masks, anchors, labels and step rows against their definitions, position by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.training.anchors import block_labels, choose_anchors, eligible_anchors, pad_anchors
from angelspec_backend.training.losses import position_terms
from angelspec_backend.training.masks import block_mask, block_positions, step_mask
from angelspec_backend.training.ttt import StepObjective, step_rows, steps_loss

rows = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),  # lengths of documents
    st.integers(0, 3),  # padding
    st.integers(0, 2**20 - 1),  # bits of the loss mask
    st.integers(2, 5),  # slots of a block
)


def build(case):
    """doc_ids, positions, loss mask of a row, as lists, and the block size."""
    lengths, padding, bits, size = case
    docs = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    positions = [p for n in (*lengths, padding) for p in range(n)]
    return docs, positions, [(bits >> i) & 1 for i in range(len(docs))], size


@settings(deadline=None, max_examples=100)
@given(rows, st.booleans(), st.data())
def test_a_slot_sees_the_text_before_its_anchor_and_its_own_block(case, packed, data):
    docs, positions, _, size = build(case)
    seq = len(docs)
    anchors = data.draw(st.lists(st.integers(0, seq - 1), min_size=1, max_size=4))
    keep = data.draw(st.lists(st.booleans(), min_size=len(anchors), max_size=len(anchors)))
    doc_ids = torch.tensor(docs) if packed else None
    got = block_mask(torch.tensor(anchors), torch.tensor(keep), size, seq, doc_ids)
    assert got.shape == (len(anchors) * size, seq + len(anchors) * size)
    for row in range(got.shape[0]):
        block = row // size
        alive = keep[block] and (not packed or docs[anchors[block]] >= 0)
        for column in range(got.shape[1]):
            if column < seq:
                same = not packed or docs[column] == docs[anchors[block]]
                want = alive and column < anchors[block] and same
            else:
                want = alive and (column - seq) // size == block
            assert got[row, column] == want
    got_positions = block_positions(torch.tensor(anchors), size, torch.tensor(positions)).tolist()
    assert got_positions == positions + [positions[a] + k for a in anchors for k in range(size)]


@settings(deadline=None, max_examples=50)
@given(rows, st.integers(0, 3))
def test_a_step_sees_its_document_causally_and_its_own_chain(case, step):
    docs = build(case)[0]
    seq = len(docs)
    got = step_mask(seq, step, torch.tensor(docs))
    for row in range(seq):
        for column in range(got.shape[1]):
            key, at = column % seq, column // seq
            seen = docs[row] >= 0 and docs[key] == docs[row] and key <= row
            assert got[row, column] == (key == row or (at == 0 and seen))
    assert torch.equal(step_mask(seq, step)[:, :seq], torch.ones(seq, seq).tril().bool())


@settings(deadline=None, max_examples=200)
@given(rows, st.booleans(), st.sampled_from(["whole", "tails"]))
def test_anchors_are_eligible_by_their_rule(case, packed, rule):
    docs, _, mask, size = build(case)
    seq = len(docs)
    got = eligible_anchors(torch.tensor(mask), size, torch.tensor(docs) if packed else None, rule)
    for a in range(seq):

        def same(p, a=a):
            return p < seq and (not packed or docs[p] == docs[a] >= 0)

        whole = mask[a] and same(a + size - 1)
        tails = mask[a] and same(a + 1) and mask[a + 1]
        assert got[a] == bool(whole if rule == "whole" else tails)


def test_tails_reach_the_last_tokens_of_a_document_and_whole_blocks_do_not():
    mask, docs = torch.ones(12), torch.tensor([0] * 8 + [1] * 4)
    covered = {}
    for rule in ("whole", "tails"):
        anchors = eligible_anchors(mask, 8, docs, rule).nonzero()[:, 0]
        labels = block_labels(torch.arange(12), mask, anchors, 7, docs)
        covered[rule] = set(labels.ids[labels.valid].tolist())
        firsts = set(labels.ids[:, 0][labels.valid[:, 0]].tolist())
        assert firsts == ({1} if rule == "whole" else {1, 2, 3, 4, 5, 6, 7, 9, 10, 11})
    assert covered["whole"] == {*range(1, 8)}
    assert covered["tails"] == {*range(1, 8), 9, 10, 11}


@settings(deadline=None, max_examples=100)
@given(rows, st.booleans(), st.integers(1, 4), st.integers(0, 100))
def test_each_document_gets_its_number_of_anchors(case, packed, count, seed):
    docs, _, mask, size = build(case)
    doc_ids = torch.tensor(docs) if packed else None
    eligible = eligible_anchors(torch.tensor(mask), size, doc_ids)
    chosen = choose_anchors(eligible, count, torch.Generator().manual_seed(seed), doc_ids)
    again = choose_anchors(eligible, count, torch.Generator().manual_seed(seed), doc_ids)
    assert torch.equal(chosen, again)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert eligible[chosen].all()
    for doc in set(docs) if packed else {None}:
        inside = [i for i in range(len(docs)) if eligible[i] and (doc is None or docs[i] == doc)]
        got = [i for i in chosen.tolist() if doc is None or docs[i] == doc]
        assert len(got) == min(count, len(inside))


def test_every_eligible_anchor_is_as_likely_as_any_other():
    eligible = torch.tensor([False] + [True] * 6)
    docs, generator = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.Generator().manual_seed(0)
    counts = torch.zeros(7)
    for _ in range(3000):
        counts[choose_anchors(eligible, 1, generator, docs)] += 1
    assert counts[0] == 0
    assert ((counts[1:] - 1000).abs() < 5 * (3000 * 2 / 9) ** 0.5).all()


def test_padded_anchors_say_which_are_real():
    padded, real = pad_anchors(torch.tensor([4, 6]), 4)
    assert padded.tolist() == [4, 6, 0, 0]
    assert real.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="2 anchors do not fit in 1"):
        pad_anchors(torch.tensor([4, 6]), 1)


@settings(deadline=None, max_examples=100)
@given(rows, st.data())
def test_labels_are_the_tokens_that_follow_the_anchor(case, data):
    docs, _, mask, _ = build(case)
    seq = len(docs)
    anchors = data.draw(st.lists(st.integers(0, seq - 1), min_size=1, max_size=4))
    keep = [i % 3 != 2 for i in range(len(anchors))]
    ids = [100 + i for i in range(seq)]
    got = block_labels(
        torch.tensor(ids),
        torch.tensor(mask),
        torch.tensor(anchors),
        3,
        torch.tensor(docs),
        torch.tensor(keep),
    )
    for block, a in enumerate(anchors):
        for j in range(3):
            p = a + 1 + j
            valid = keep[block] and p < seq and docs[p] == docs[a] >= 0 and bool(mask[p])
            assert got.valid[block, j] == valid
            if valid:
                assert got.ids[block, j] == ids[p]
                assert got.teacher[block, j] == p - 1


@settings(deadline=None, max_examples=100)
@given(rows, st.booleans(), st.integers(0, 3))
def test_a_row_predicts_the_token_two_and_its_step_further(case, packed, step):
    docs, _, mask, _ = build(case)
    seq = len(docs)
    ids = [100 + i for i in range(seq)]
    doc_ids = torch.tensor(docs) if packed else None
    got = step_rows(torch.tensor(ids), torch.tensor(mask), step, doc_ids)
    for j in range(seq):
        label = j + 2 + step
        valid = label < seq and bool(mask[label]) and (not packed or docs[label] == docs[j] >= 0)
        assert got.valid[j] == valid
        if valid:
            read = (got.tokens[j], got.labels[j], got.teacher[j])
            assert read == (ids[label - 1], ids[label], label - 1)


def test_steps_are_weighted_and_averaged_over_their_own_rows():
    generator = torch.Generator().manual_seed(6)
    objective = StepObjective("tv", ce_weight=0.1, e2e_weight=0.5, step_weights=(1.0, 0.8))
    terms = []
    for _ in range(2):
        student, teacher = (torch.randn(4, 5, generator=generator) for _ in range(2))
        terms.append(position_terms(student, torch.arange(4), teacher, objective.terms))
    valid = torch.tensor([[True, True, False, True], [True, False, False, True]])
    got = steps_loss(terms, valid, objective)
    total = 0.0
    for i, weight in enumerate((1.0, 0.8)):
        total += weight * (0.1 * terms[i].ce[valid[i]].mean() + terms[i].tv[valid[i]].mean())
    alpha = [1 - terms[i].tv[[0, 3]] for i in range(2)]  # rows whose steps are all valid
    e2e = (1 - (alpha[0] + alpha[0] * alpha[1]) / 2).mean()
    assert float(got.e2e) == pytest.approx(float(e2e))
    assert float(got.total) == pytest.approx(float(total + 0.5 * e2e))
    with pytest.raises(ValueError, match="2 steps"):
        steps_loss(terms, valid, StepObjective(step_weights=(1.0,)))
