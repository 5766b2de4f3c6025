"""Simulated acceptance: what teacher-forced drafts of training blocks say about accepted lengths.

A draft is accepted only if all before it are.  So the products are taken inside each block and averaged
afterwards: a product of average accuracies would ignore that easy blocks are easy throughout.  The bonus
token is not counted here: a serving round yields one token more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Survival:
    """Sums over blocks; adding two gives those of both batches.  Each is [drafts], float64."""

    survived: Tensor  # blocks whose drafts up to this one are accepted, or the sum of these probabilities
    blocks: Tensor  # blocks that have supervised drafts up to this one

    def __add__(self, other: Survival) -> Survival:
        return Survival(self.survived + other.survived, self.blocks + other.blocks)

    @property
    def rates(self) -> Tensor:
        """[drafts] share of blocks in which the draft is accepted, together with all before it."""
        return self.survived / self.blocks.clamp(min=1)

    @property
    def accepted_length(self) -> float:
        """Accepted drafts of a block on average."""
        return float(self.rates.sum())


def survival(accept: Tensor, valid: Tensor) -> Survival:
    """Survival of each draft of a batch of blocks.

    accept: [blocks, drafts], hits (bool: accepted or not) or acceptance probabilities 1 - TV
    valid: [blocks, drafts] supervised drafts.  A draft counts if it and all before it are valid.
    """
    counts = valid.long().cumprod(-1)
    return Survival((accept.double().cumprod(-1) * counts).sum(0), counts.sum(0).double())


def accepted_lengths(hits: Tensor, valid: Tensor) -> Tensor:
    """Drafts accepted in each block: the hits before the first miss or masked draft.

    hits, valid: [blocks, drafts] bool -> [blocks] int64
    """
    return (hits & valid).long().cumprod(-1).sum(-1)


def position_means(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the valid drafts at each place in the block, 0 where there is none, and how many there are.

    values, valid: [blocks, drafts] -> [drafts], [drafts]
    """
    counts = valid.sum(0)
    return torch.where(valid, values, 0).sum(0) / counts.clamp(min=1), counts
