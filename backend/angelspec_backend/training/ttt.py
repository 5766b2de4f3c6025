"""Test-time training of drafters that draft one token at a time: MTP and EAGLE-3.

At step i (0 first) row j stands where serving is i drafts after position j + 1: it reads the embedding of
token j + 1 + i, and its logits are for token j + 2 + i, about which the target speaks at position j + 1 + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from angelspec_backend.training.losses import TermOptions, Terms, TopkVariant, lk_hybrid
from angelspec_backend.training.objectives import end_to_end_surrogate, end_to_end_tv, masked_mean


@dataclass(frozen=True)
class StepRows:
    """What the rows of a sequence read and predict at one step.  Each is [seq]; invalid rows hold filler."""

    tokens: Tensor  # ids whose embeddings are read, unless a step reads its own drafts
    labels: Tensor  # ids predicted
    teacher: Tensor  # positions whose target logits are the teacher
    valid: Tensor  # bool


def shift_left(values: Tensor, by: int) -> Tensor:
    """values[j + by] at j, and 0 past the end: [seq] -> [seq]."""
    return torch.cat([values[by:], values.new_zeros(min(by, len(values)))])


def step_rows(
    input_ids: Tensor, loss_mask: Tensor, step: int, doc_ids: Tensor | None = None, mask_shift: int = 2
) -> StepRows:
    """The rows of one step.

    input_ids: [seq]; loss_mask: [seq], tokens to be predicted
    doc_ids: [seq], -1: padding; None: one document
    mask_shift: 2 looks the mask up at the label; EAGLE-3 as first published uses 0
    A row is valid if its label is supervised, exists and lies in the row's own document.
    """
    seq = len(input_ids)
    positions = torch.arange(seq, device=input_ids.device)
    valid = shift_left(loss_mask.bool(), mask_shift + step)
    if doc_ids is not None:
        inside = positions + 2 + step < seq
        valid = valid & inside & (doc_ids >= 0) & (shift_left(doc_ids, 2 + step) == doc_ids)
    return StepRows(
        tokens=shift_left(input_ids, 1 + step),
        labels=shift_left(input_ids, 2 + step),
        teacher=(positions + 1 + step).clamp(max=seq - 1),
        valid=valid,
    )


@dataclass(frozen=True)
class StepObjective:
    """total = sum_i step_weight_i * (ce_weight * CE_i + distill_weight * distill_i) + e2e_weight * E2E"""

    distill: Literal["none", "kl", "tv", "lk", "topk_kl", "soft_ce"] = "kl"
    ce_weight: float = 0.0
    distill_weight: float = 1.0
    support: int = 0  # kl, tv and lk on the teacher's likeliest tokens only; 0: all
    topk: int = 0
    topk_variant: TopkVariant = "a"
    lk_eta: float = 3.0
    e2e_weight: float = 0.0
    e2e_form: Literal["direct", "surrogate"] = "direct"
    step_weights: tuple[float, ...] = (1.0, 0.8, 0.64)

    @property
    def terms(self) -> TermOptions:
        """What `position_terms` has to compute."""
        return TermOptions(
            distances=self.distill in ("tv", "kl", "lk") or self.e2e_weight > 0,
            soft_ce=self.distill == "soft_ce",
            support=self.support,
            topk=self.topk if self.distill == "topk_kl" else 0,
            topk_variant=self.topk_variant,
        )


@dataclass(frozen=True)
class StepsLoss:
    """A scalar to minimise and what it is made of."""

    total: Tensor
    ce: Tensor  # [steps] means over valid rows
    distill: Tensor  # [steps]
    e2e: Tensor | None


def distill_term(terms: Terms, objective: StepObjective) -> Tensor:
    """The distillation term of each row of a step."""
    if objective.distill == "lk" and terms.kl is not None and terms.tv is not None:
        return lk_hybrid(terms.kl, terms.tv, objective.lk_eta)
    value = getattr(terms, objective.distill, None)
    return torch.zeros_like(terms.ce) if value is None else value


def steps_loss(terms: Sequence[Terms], valid: Tensor, objective: StepObjective) -> StepsLoss:
    """The objective over all steps of a sequence.

    terms: of each step, [seq] each; valid: [steps, seq] bool
    Raises ValueError if there are more steps than weights.
    """
    if len(terms) > len(objective.step_weights):
        raise ValueError(f"{len(terms)} steps, but only {len(objective.step_weights)} step_weights")
    ce = torch.stack([masked_mean(t.ce, v & t.reachable) for t, v in zip(terms, valid, strict=True)])
    distill = torch.stack(
        [masked_mean(distill_term(t, objective), v) for t, v in zip(terms, valid, strict=True)]
    )
    weights = torch.tensor(objective.step_weights[: len(terms)], device=ce.device)
    total = (weights * (objective.ce_weight * ce + objective.distill_weight * distill)).sum()
    e2e = None
    tvs = [t.tv for t in terms if t.tv is not None]
    if objective.e2e_weight and tvs:
        form = end_to_end_tv if objective.e2e_form == "direct" else end_to_end_surrogate
        whole = valid.all(0)[:, None].expand(-1, len(terms))  # a chain counts if all its steps do
        e2e = form(torch.stack(tvs, -1), whole)
        total = total + objective.e2e_weight * e2e
    return StepsLoss(total, ce, distill, e2e)
