"""Which keys a training query may see, as dense boolean masks (True: may attend).

A packed row holds several documents one after the other; doc_ids says whose each position is, -1 is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(
    anchors: Tensor, keep: Tensor, block_size: int, context: int, doc_ids: Tensor | None = None
) -> Tensor:
    """Anchored blocks: context strictly before the anchor, and the own block in both directions.

    anchors: [blocks] positions; keep: [blocks] bool, a block without it sees nothing and nobody sees it;
    context: number of context positions; doc_ids: [context] to keep blocks inside their document
    Returns [blocks * block_size, context + blocks * block_size].  Columns are the context, then the slots of
    block 0, block 1, ...; rows are those slots.
    """
    blocks = len(anchors)
    positions = torch.arange(context, device=anchors.device)
    sees = (positions < anchors[:, None]) & keep[:, None]  # [blocks, context]
    if doc_ids is not None:
        own = doc_ids[anchors.clamp(0, context - 1)]
        sees = sees & (doc_ids == own[:, None]) & (own >= 0)[:, None]
        keep = keep & (own >= 0)
    own_block = torch.diag(keep)  # [blocks, blocks]
    rows = torch.cat([sees, own_block.repeat_interleave(block_size, 1)], 1)
    return rows.repeat_interleave(block_size, 0).view(blocks * block_size, -1)


def block_positions(anchors: Tensor, block_size: int, positions: Tensor) -> Tensor:
    """RoPE positions of the columns of `block_mask`: slot k of a block stands k after its anchor.

    anchors: [blocks] places in the row; positions: [context] position of each inside its document
    Returns [context + blocks * block_size].
    """
    slots = positions[anchors][:, None] + torch.arange(block_size, device=anchors.device)
    return torch.cat([positions, slots.flatten()])


def step_mask(seq: int, step: int, doc_ids: Tensor | None = None) -> Tensor:
    """Test-time training, queries of one step (0 first): causal on step 0's keys, then the own row's only.

    doc_ids: [seq], to stay inside a document; padding then sees itself only
    Returns [seq, (step + 1) * seq]; columns are the keys of step 0, step 1, ...
    """
    diagonal = torch.eye(seq, dtype=torch.bool, device=None if doc_ids is None else doc_ids.device)
    causal = torch.ones_like(diagonal).tril()
    if doc_ids is not None:
        causal = causal & (doc_ids == doc_ids[:, None]) & (doc_ids >= 0)[:, None] | diagonal
    return torch.cat([causal] + [diagonal] * step, 1)
