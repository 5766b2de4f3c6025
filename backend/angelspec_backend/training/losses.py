"""Losses of one position, from a student's (drafter's) and a teacher's (target's) logits.

Every function maps logits [n, vocab] to [n], computes in float32 and is differentiable in the student.
p is the teacher's distribution, q the student's.  An objective over blocks or steps is arithmetic on these
[n] values (objectives.py, ttt.py), so logits need never exist for all positions at once (chunks.py).

The teacher may cover a draft vocabulary only: its logits are then those of the draft vocabulary's tokens,
and the distribution is renormalised on them, as in EAGLE-3 (arXiv 2503.01840), unless `log_z` gives the
log-normaliser over the whole vocabulary: then p keeps its true values, and 1 - TV is the true probability
that a sampled draft token is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

TopkVariant = Literal["a", "b"]


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """-log q(label), and 0 for a label of -1, a token the student's vocabulary lacks.

    student: [n, vocab]; labels: [n] int64 -> [n]
    """
    return F.cross_entropy(student.float(), labels, ignore_index=-1, reduction="none")


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """-sum p log q: the KL divergence and the entropy of p, which has no gradient.  [n, vocab] -> [n]"""
    return -(teacher.float().softmax(-1) * student.float().log_softmax(-1)).sum(-1)


class _Distances(torch.autograd.Function):
    """TV and KL at once, with their gradients written down: a third of the passes over [n, vocab]."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, log_z: Tensor | None) -> tuple[Tensor, Tensor]:
        log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
        q, p = log_q.exp(), log_p.exp()
        kl = log_p.sub_(log_q).mul_(p).sum(-1)
        mass = torch.ones_like(kl)  # of p on these tokens
        if log_z is not None:
            mass = (teacher.logsumexp(-1) - log_z).exp().clamp(max=1)
            p *= mass[:, None]
        tv = 0.5 * (torch.sub(p, q, out=log_q).abs_().sum(-1) + 1 - mass)
        ctx.save_for_backward(p, q, mass)
        ctx.set_materialize_grads(False)
        return tv, mass * kl

    @staticmethod
    def backward(ctx: Any, d_tv: Tensor | None, d_kl: Tensor | None) -> tuple[Tensor | None, None, None]:
        p, q, mass = ctx.saved_tensors
        gradient = None
        if d_tv is not None:
            side = torch.sub(q, p).sign_()
            side -= (q * side).sum(-1, keepdim=True)
            gradient = side.mul_(q).mul_(0.5 * d_tv[:, None])
        if d_kl is not None:
            toward = (q * mass[:, None]).sub_(p).mul_(d_kl[:, None])
            gradient = toward if gradient is None else gradient.add_(toward)
        return gradient, None, None


def distances(student: Tensor, teacher: Tensor, log_z: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Total variation and KL divergence.  [n, vocab], log_z [n] -> [n], [n]

    TV = sum |p - q| / 2 = 1 - sum min(p, q).  KL(p || q); with log_z that of p renormalised on the draft
    vocabulary, times p's mass there.
    """
    tv, kl = _Distances.apply(student.float(), teacher.detach().float(), log_z)
    return tv, kl


def total_variation(student: Tensor, teacher: Tensor, log_z: Tensor | None = None) -> Tensor:
    """The first of `distances`."""
    return distances(student, teacher, log_z)[0]


def kl_divergence(student: Tensor, teacher: Tensor, log_z: Tensor | None = None) -> Tensor:
    """The second of `distances`."""
    return distances(student, teacher, log_z)[1]


def keep_top(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Logits of the teacher's k likeliest tokens, of both: [n, vocab] -> [n, min(k, vocab)] each.

    A distance between them is one between both distributions renormalised on these tokens.
    """
    if k >= teacher.shape[-1]:
        return student, teacher
    top, ids = teacher.topk(k, -1, sorted=False)
    return student.gather(-1, ids), top


def topk_kl(student: Tensor, teacher: Tensor, k: int, variant: TopkVariant) -> Tensor:
    """KL divergence on the teacher's k likeliest tokens.  [n, vocab] -> [n]

    Variant "a" renormalises both there; "b" sums these tokens' terms of the full divergence, which may be
    negative.
    """
    if variant == "a":
        return kl_divergence(*keep_top(student, teacher, k))
    log_q, log_p = keep_top(student.float().log_softmax(-1), teacher.float().log_softmax(-1), k)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def lk_hybrid(kl: Tensor, tv: Tensor, eta: float = 3.0) -> Tensor:
    """l * KL + (1 - l) * TV, l = exp(-eta * (1 - TV)) without gradient.  [n], [n] -> [n]

    KL leads while the two are far apart, where TV hardly has a gradient.  LK losses (arXiv 2602.23881).
    """
    share = torch.exp(-eta * (1 - tv.detach()))
    return share * kl + (1 - share) * tv


def lk_alpha(tv: Tensor) -> Tensor:
    """-log of the acceptance probability 1 - TV.  LK losses (arXiv 2602.23881).  [n] -> [n]"""
    return -(1 - tv).clamp(min=1e-10).log()


@dataclass(frozen=True)
class TermOptions:
    """Which terms `position_terms` computes beyond those of the label; all but these need a teacher."""

    distances: bool = False  # tv and kl
    soft_ce: bool = False
    support: int = 0  # distances on the teacher's `support` likeliest tokens only; 0: all
    topk: int = 0  # of topk_kl; 0: none
    topk_variant: TopkVariant = "b"

    @property
    def need_teacher(self) -> bool:
        """Whether any term compares with a teacher."""
        return self.distances or self.soft_ce or self.topk > 0


@dataclass(frozen=True)
class Terms:
    """Losses of each position.  All are of one shape: [n], or [blocks, drafts] after `view`."""

    ce: Tensor
    hit: Tensor  # bool: the label is the student's likeliest token
    reachable: Tensor  # bool: the label is in the student's vocabulary
    tv: Tensor | None = None
    kl: Tensor | None = None
    topk_kl: Tensor | None = None
    soft_ce: Tensor | None = None

    def view(self, *shape: int) -> Terms:
        """The same terms in another shape."""
        present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return replace(self, **{name: getattr(self, name).view(*shape) for name in present})

    @property
    def confidence(self) -> Tensor:
        """q(label), without gradient."""
        return torch.exp(-self.ce.detach()) * self.reachable


def position_terms(
    student: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    options: TermOptions | None = None,
    log_z: Tensor | None = None,
) -> Terms:
    """The terms an objective needs, of each position.

    student, teacher: [n, vocab] logits; labels: [n] ids in that vocabulary, -1: not in it; log_z: [n]
    Raises ValueError if a term needs a teacher and there is none.
    """
    options = options or TermOptions()
    if options.need_teacher and teacher is None:
        raise ValueError("these loss terms compare with a teacher: teacher logits are None")
    student = student.float()
    terms = {
        "ce": cross_entropy(student, labels),
        "hit": student.argmax(-1) == labels,
        "reachable": labels >= 0,
    }
    if teacher is not None and options.need_teacher:
        pair = keep_top(student, teacher, options.support) if options.support else (student, teacher)
        if options.distances:
            terms["tv"], terms["kl"] = distances(*pair, log_z)
        if options.soft_ce:
            terms["soft_ce"] = soft_cross_entropy(student, teacher)
        if options.topk:
            terms["topk_kl"] = topk_kl(student, teacher, options.topk, options.topk_variant)
    return Terms(**terms)
