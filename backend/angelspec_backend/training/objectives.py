"""The objective of a block drafter, from the terms of its draft slots.

Everything here is [blocks, drafts]: column j is the (j+1)-th draft token, whose label is the token at
position anchor + 1 + j, in both label conventions.  Every term's mean is sum(w * term) / sum(w) with
w = valid * position weight, so the scale does not depend on the weighting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from angelspec_backend.training.losses import TermOptions, Terms, TopkVariant, lk_alpha, lk_hybrid


@dataclass(frozen=True)
class BlockObjective:
    """Weights of the terms.

    total = mix * (LK if lk_weight else KL) + (1 - mix) * (ce_weight * CE + l1_weight * L1)
            + e2e_weight * E2E + confidence_weight * BCE,  mix = lk_weight or else kl_weight
    """

    weighting: Literal["decay", "dpace"] = "decay"
    decay_gamma: float | None = None  # decay: weight exp(-j / gamma) of draft j; None: 1
    dpace_alpha: float = 0.5
    dpace_over_masked: bool = False  # whether D-PACE's products run over masked drafts too
    ce_weight: float = 1.0
    l1_weight: float = 0.0
    kl_weight: float = 0.0
    kl_topk: int = 10
    kl_variant: TopkVariant = "b"
    lk_weight: float = 0.0
    lk_type: Literal["hybrid", "alpha"] = "hybrid"
    lk_eta: float = 3.0
    e2e_weight: float = 0.0
    confidence_weight: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        for name, allowed in (("weighting", ("decay", "dpace")), ("lk_type", ("hybrid", "alpha"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("dpace_alpha", "kl_weight", "lk_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def terms(self) -> TermOptions:
        """What `position_terms` has to compute."""
        compares = self.l1_weight or self.lk_weight or self.e2e_weight or self.confidence_weight
        return TermOptions(
            distances=bool(compares),
            topk=self.kl_topk if self.kl_weight > 0 and not self.lk_weight else 0,
            topk_variant=self.kl_variant,
        )


@dataclass(frozen=True)
class BlockLoss:
    """A scalar to minimise and what it is made of, by name: ce, l1, kl, lk, e2e_tv, confidence."""

    total: Tensor
    parts: dict[str, Tensor]


def decay_weights(num_drafts: int, gamma: float | None) -> Tensor:
    """exp(-j / gamma), [num_drafts]; ones without gamma.  DFlash (arXiv 2602.06036)."""
    return torch.ones(num_drafts) if gamma is None else torch.exp(-torch.arange(num_drafts) / gamma)


def dpace_weights(confidence: Tensor, alpha: float, valid: Tensor | None = None) -> Tensor:
    """D-PACE (arXiv 2605.18810): how much of the accepted length hangs on each draft.

    weight_k = sum over m >= k of prod over i <= m of s_i,  s = (1 - alpha) * confidence + alpha
    confidence: [blocks, drafts] q(label); valid: [blocks, drafts] drafts that count; others have s = 1 and
    add nothing; None: all count -> [blocks, drafts]
    """
    smooth = (1 - alpha) * confidence + alpha
    if valid is not None:
        smooth = torch.where(valid, smooth, 1.0)
    survival = smooth.cumprod(-1)
    if valid is not None:
        survival = survival * valid
    return survival.flip(-1).cumsum(-1).flip(-1)


def expected_accepted(tv: Tensor, valid: Tensor) -> Tensor:
    """Expected number of accepted drafts, sum_j prod_{i<=j} (1 - TV_i): [blocks, drafts] -> [blocks].

    Masked drafts neither count nor stop what follows.
    """
    alpha = torch.where(valid, 1 - tv, 1.0)
    return (alpha.cumprod(-1) * valid).sum(-1)


def end_to_end_tv(tv: Tensor, valid: Tensor) -> Tensor:
    """1 - expected accepted share of the valid drafts, averaged over blocks that have any.

    tv: [blocks, drafts]; valid: [blocks, drafts] bool -> scalar
    """
    count = valid.sum(-1)
    share = expected_accepted(tv, valid) / count.clamp(min=1)
    return masked_mean(1 - share, (count > 0).to(tv.dtype))


def end_to_end_surrogate(tv: Tensor, valid: Tensor) -> Tensor:
    """A weighted sum of TVs whose gradient is that of `end_to_end_tv`.

    sum_m W_m * TV_m / (number of valid drafts), W_m = d expected_accepted / d (1 - TV_m) without gradient,
    averaged like `end_to_end_tv`.  Shapes as there.
    """
    alpha = torch.where(valid, 1 - tv.detach(), 1.0)
    before = torch.cat([torch.ones_like(alpha[:, :1]), alpha[:, :-1].cumprod(-1)], -1)
    later = torch.zeros_like(alpha)  # valid drafts m.. that survive, given that draft m does
    for m in reversed(range(alpha.shape[1])):
        following = alpha[:, m + 1] * later[:, m + 1] if m + 1 < alpha.shape[1] else 0.0
        later[:, m] = valid[:, m] + following
    count = valid.sum(-1)
    share = (before * later * torch.where(valid, tv, 0.0)).sum(-1) / count.clamp(min=1)
    return masked_mean(share, (count > 0).to(tv.dtype))


def block_loss(
    terms: Terms, valid: Tensor, objective: BlockObjective, confidence_logits: Tensor | None = None
) -> BlockLoss:
    """The objective of a batch of blocks.

    terms: [blocks, drafts]; valid: [blocks, drafts] bool, supervised drafts of real blocks;
    confidence_logits: [blocks, drafts], of a confidence head, whose target is the acceptance 1 - TV.
    Raises ValueError if the objective weighs a confidence and there is none.
    """
    if objective.weighting == "dpace":
        counted = None if objective.dpace_over_masked else valid
        weight = valid * dpace_weights(terms.confidence, objective.dpace_alpha, counted)
    else:
        weight = valid * decay_weights(valid.shape[1], objective.decay_gamma).to(valid.device)
    parts = {"ce": masked_mean(terms.ce, weight * terms.reachable)}
    total = objective.ce_weight * parts["ce"]
    if objective.l1_weight and terms.tv is not None:
        parts["l1"] = masked_mean(2 * terms.tv, weight)
        total = total + objective.l1_weight * parts["l1"]
    if objective.lk_weight and terms.tv is not None and terms.kl is not None:
        alpha = objective.lk_type == "alpha"
        lk = lk_alpha(terms.tv) if alpha else lk_hybrid(terms.kl, terms.tv, objective.lk_eta)
        parts["lk"] = masked_mean(lk, weight)
        total = _mix(parts["lk"], total, objective.lk_weight)
    elif objective.kl_weight and terms.topk_kl is not None:
        parts["kl"] = masked_mean(terms.topk_kl, weight)
        total = _mix(parts["kl"], total, objective.kl_weight)
    if objective.e2e_weight and terms.tv is not None:
        parts["e2e_tv"] = end_to_end_tv(terms.tv, valid)
        total = total + objective.e2e_weight * parts["e2e_tv"]
    if objective.confidence_weight and terms.tv is not None:
        if confidence_logits is None:
            raise ValueError("confidence_weight is above 0, but the drafter gave no confidence logits")
        target = (1 - terms.tv.detach()).clamp(0, 1)
        bce = F.binary_cross_entropy_with_logits(confidence_logits.float(), target, reduction="none")
        parts["confidence"] = masked_mean(bce, weight)
        total = total + objective.confidence_weight * parts["confidence"]
    return BlockLoss(total, parts)


def _mix(term: Tensor, rest: Tensor, share: float) -> Tensor:
    """share * term + (1 - share) * rest; without a backward pass through a rest of no weight."""
    return term if share == 1 else share * term + (1 - share) * rest


def masked_mean(values: Tensor, weight: Tensor) -> Tensor:
    """sum(weight * values) / sum(weight), and 0 when no value counts."""
    total = weight.sum()
    return (weight * values).sum() / torch.where(total > 0, total, 1)
