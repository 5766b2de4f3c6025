"""Where training blocks start, and what they have to predict.

An anchor is a token that serving would have just sampled, so it must be supervised itself.  The block at
anchor a drafts the tokens at a + 1, a + 2, ..., in both label conventions; these differ only in the slot a
draft is read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLabels:
    """What each block predicts.  All are [blocks, drafts]."""

    ids: Tensor  # token ids; filler where invalid
    teacher: Tensor  # positions whose target logits are the teacher of a draft
    valid: (
        Tensor  # bool: the label exists, is supervised, lies in the anchor's document, and the block is kept
    )


def eligible_anchors(
    loss_mask: Tensor,
    block_size: int,
    doc_ids: Tensor | None = None,
    rule: Literal["whole", "tails"] = "tails",
) -> Tensor:
    """[seq] bool: where a block may be anchored.

    loss_mask: [seq] supervised tokens; doc_ids: [seq], -1: padding
    block_size: slots of a block, the anchor included
    "whole": the block's last slot lies in the same document (AngelSpec's rule, by which a document's last
      tokens are hardly ever predicted from nearby).
    "tails": at least the next token is supervised in the same document; what lies beyond the end is masked.
    """
    seq = len(loss_mask)
    reach = block_size - 1 if rule == "whole" else 1
    supervised = loss_mask.bool()
    inside = torch.arange(seq, device=loss_mask.device) + reach < seq
    ahead = (torch.arange(seq, device=loss_mask.device) + reach).clamp(max=seq - 1)
    if doc_ids is not None:
        inside = inside & (doc_ids >= 0) & (doc_ids[ahead] == doc_ids)
    if rule == "tails":
        inside = inside & supervised[ahead]
    return supervised & inside


def choose_anchors(
    eligible: Tensor, count: int, generator: torch.Generator, doc_ids: Tensor | None = None
) -> Tensor:
    """Up to `count` eligible anchors of each document, or of the row without doc_ids, uniformly, ascending.

    eligible: [seq] bool; doc_ids: [seq]; generator: of the CPU -> [blocks] positions
    """
    places = eligible.nonzero()[:, 0].cpu()
    shuffled = places[torch.randperm(len(places), generator=generator)]
    if doc_ids is None:
        return shuffled[:count].sort().values.to(eligible.device)
    docs = doc_ids.cpu()[shuffled]
    grouped = docs.argsort(stable=True)
    sizes = docs.unique(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rank = torch.arange(len(docs)) - starts  # of each within its document
    return shuffled[grouped][rank < count].sort().values.to(eligible.device)


def pad_anchors(anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Exactly `count` anchors, position 0 filling up, and which are real: [count], [count] bool.

    Raises ValueError if there are more than count.
    """
    if len(anchors) > count:
        raise ValueError(f"{len(anchors)} anchors do not fit in {count}")
    padded = anchors.new_zeros(count)
    padded[: len(anchors)] = anchors
    return padded, torch.arange(count, device=anchors.device) < len(anchors)


def block_labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    num_drafts: int,
    doc_ids: Tensor | None = None,
    keep: Tensor | None = None,
) -> BlockLabels:
    """What the drafts of each block have to be.

    input_ids, loss_mask, doc_ids: [seq]; anchors: [blocks]; keep: [blocks] bool, all by default
    Masked drafts past the end repeat the row's last token.
    """
    seq = len(input_ids)
    wanted = anchors[:, None] + 1 + torch.arange(num_drafts, device=anchors.device)
    places = wanted.clamp(max=seq - 1)
    valid = (wanted < seq) & loss_mask.bool()[places]
    if doc_ids is not None:
        valid = valid & (doc_ids[places] == doc_ids[anchors][:, None]) & (doc_ids[anchors] >= 0)[:, None]
    if keep is not None:
        valid = valid & keep[:, None]
    return BlockLabels(input_ids[places], places - 1, valid)
