"""Loss terms straight from hidden states under frozen heads, without autograd's tensors of logits.

The same values and gradients as ``position_terms``, for the terms that block drafters are mostly trained
with: cross-entropy, KL divergence and total variation.  A few rows at a time stay in the processor's cache,
and the gradient is written down instead of recorded, which on a CPU is several times faster.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.training.losses import TermOptions, Terms

ROWS = 48
"""Rows at a time: with a vocabulary of 8,192 some tensors of 1.5 MB."""


def supports(options: TermOptions) -> bool:
    """Whether these terms are computed here."""
    return options.need_teacher and not (options.soft_ce or options.support or options.topk)


def fused_terms(student: Tensor, labels: Tensor, head: Tensor, teacher: Tensor) -> Terms:
    """Terms ce, hit, reachable, tv and kl.

    student: [n, hidden] what the student's head reads, gets a gradient; teacher: [n, hidden]; head:
    [vocab, hidden] of both, frozen; labels: [n] ids in that vocabulary, -1: not in it.
    """
    ce, tv, kl, hit = _FusedTerms.apply(student, labels, head, teacher)
    return Terms(ce=ce, hit=hit, reachable=labels >= 0, tv=tv, kl=kl)


class _FusedTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, labels: Tensor, head: Tensor, teacher: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = len(student)
        ce, tv, kl = (student.new_empty(n, dtype=torch.float32) for _ in range(3))
        hit = torch.empty(n, dtype=torch.bool, device=student.device)
        wanted = student.requires_grad
        probabilities = head.new_empty(n if wanted else 0, 2, len(head))  # of student and teacher
        for start in range(0, n, ROWS):
            part = slice(start, start + ROWS)
            log_q = F.linear(student[part], head).float().log_softmax(-1)  # [rows, vocab]
            log_p = F.linear(teacher[part], head).float().log_softmax(-1)
            label = labels[part]
            ce[part] = F.nll_loss(log_q, label, ignore_index=-1, reduction="none")
            hit[part] = log_q.argmax(-1) == label
            p, q = log_p.exp(), log_q.exp()
            kl[part] = log_p.sub_(log_q).mul_(p).sum(-1)
            if wanted:
                probabilities[part, 0], probabilities[part, 1] = q, p
            tv[part] = p.sub_(q).abs_().sum(-1).mul_(0.5)
        ctx.save_for_backward(labels, head, probabilities)
        ctx.mark_non_differentiable(hit)
        return ce, tv, kl, hit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d CE = q - 1[label], d KL = q - p, d TV = q (s - sum(q s)) / 2 with s the sign of q - p."""
        labels, head, probabilities = ctx.saved_tensors
        known = labels >= 0
        ce, tv, kl = gradients[0] * known, gradients[1] * 0.5, gradients[2]
        result = torch.empty(len(labels), head.shape[1], dtype=head.dtype, device=head.device)
        for start in range(0, len(labels), ROWS):
            part = slice(start, start + ROWS)
            q, p = probabilities[part].float().unbind(1)  # [rows, vocab]
            signed = torch.sub(q, p).sign_().mul_(q)  # q s
            factor = ce[part] + kl[part] - tv[part] * signed.sum(-1)
            total = (
                signed.mul_(tv[part, None]).addcmul_(q, factor[:, None]).addcmul_(p, kl[part, None], value=-1)
            )
            total.scatter_add_(1, labels[part, None].clamp(min=0), -ce[part, None])
            result[part] = total.to(head.dtype) @ head
        return result, None, None, None
