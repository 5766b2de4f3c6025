"""The fast parts of a training step against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from angelspec_backend.drafters.masked import MaskedAttend
from angelspec_backend.training.block_attention import BlockAttend
from angelspec_backend.training.fused_terms import fused_terms
from angelspec_backend.training.losses import TermOptions, position_terms
from angelspec_backend.training.masks import block_mask


def test_fused_terms_have_the_values_and_gradients_of_plain_ones():
    torch.manual_seed(0)
    n, hidden, vocab = 101, 12, 37
    head, teacher = torch.randn(vocab, hidden), torch.randn(n, hidden)
    labels = torch.randint(-1, vocab, (n,))
    weights = torch.rand(3, n)
    found, gradients = [], []
    for fused in (True, False):
        student = torch.randn(n, hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if fused:
            terms = fused_terms(student, labels, head, teacher)
        else:
            options = TermOptions(distances=True)
            terms = position_terms(F.linear(student, head), labels, F.linear(teacher, head), options)
        (weights * torch.stack([terms.ce, terms.tv, terms.kl])).sum().backward()
        found.append([terms.ce, terms.tv, terms.kl, terms.hit.float(), terms.reachable.float()])
        gradients.append(student.grad)
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_kv", [1, 3])
def test_block_attention_is_dense_attention_under_the_mask_of_blocks(num_kv):
    torch.manual_seed(0)
    rows, length, blocks, size, groups, dim = 2, 11, 4, 3, 2, 8
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 8 + [-1] * 3])
    anchors = torch.tensor([[0, 3, 7, 10], [0, 5, 7, 0]])
    keep = torch.tensor([[True] * 4, [True, True, True, False]])
    dense, sees = [], []
    for row in range(rows):
        mask = block_mask(anchors[row], keep[row], size, length, documents[row])
        mask[~mask.any(1), length:] = True  # what is no block may see anything
        dense.append(mask)
        sees.append(block_mask(anchors[row], keep[row], 1, length, documents[row])[:, :length])
    query = torch.randn(rows * blocks * size, num_kv * groups, dim)
    key, value = torch.randn(2, rows * blocks * size, num_kv, dim)
    context = [tuple(torch.randn(2, rows * length, num_kv, dim))]
    ours = BlockAttend(context, torch.stack(sees))(0, query, key, value).view(rows, blocks, size, -1)
    plain = MaskedAttend(context, torch.stack(dense))(0, query, key, value).view(rows, blocks, size, -1)
    torch.testing.assert_close(ours[keep], plain[keep], rtol=1e-4, atol=1e-5)
