"""A block drafter in training: all blocks of packed sequences at once, under a dense mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.drafters.backbone import KeyValue
from angelspec_backend.drafters.blocks import BlockNetwork, Slot


@dataclass(frozen=True)
class MaskedAttend:
    """Attention over given context keys and values, followed by those of the tokens at hand."""

    context: Sequence[KeyValue]  # per layer [rows * context, num_kv_heads, head_dim]; may be empty
    mask: Tensor  # [rows, queries, context + queries] True: may be seen

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value: [rows * queries, heads, head_dim], see ``Attend``"""
        rows = len(self.mask)
        parts = [(key, value)] if not self.context else [self.context[layer], (key, value)]
        keys, values = (
            torch.cat([part.unflatten(0, (rows, -1)) for part in which], 1).transpose(1, 2)
            for which in zip(*parts, strict=True)
        )  # [rows, num_kv_heads, context + queries, head_dim]
        groups = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            query.unflatten(0, (rows, -1)).transpose(1, 2),
            keys.repeat_interleave(groups, 1),
            values.repeat_interleave(groups, 1),
            attn_mask=self.mask[:, None],
        )  # [rows, num_heads, queries, head_dim]
        return out.transpose(1, 2).flatten(0, 1)


def previous_ids(token_ids: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    """The tokens before each draft: the anchor's, then those behind it.

    token_ids: [rows, length]; anchors: [rows, num_blocks] indexes into it -> [rows, num_blocks, num_drafts];
    behind the end it is the last token.
    """
    at = anchors[..., None] + torch.arange(num_drafts, device=anchors.device)
    at = at.clamp(max=token_ids.shape[-1] - 1)
    return token_ids.gather(1, at.flatten(1)).view(at.shape)


def block_hidden_states(
    network: BlockNetwork,
    features: Tensor,
    token_ids: Tensor,
    anchors: Tensor,
    mask: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """The backbone over all blocks of some rows, each a sequence or several packed ones.

    features: [rows, length, num_taps, target_hidden]; token_ids: [rows, length]; anchors: [rows, num_blocks]
    indexes of the anchors; mask: [rows, num_blocks * block_size, length + num_blocks * block_size] which
    context and which slots a slot sees; positions: [rows, length] rotary positions, the
    indexes if not given.  Returns [rows, num_blocks, block_size, hidden].
    """
    if positions is None:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand(token_ids.shape)
    context = network.context_key_values(features.flatten(0, 1), positions.flatten())
    block_ids = network.block_ids(token_ids.gather(1, anchors))  # [rows, num_blocks, block_size]
    slots = torch.arange(network.spec.block_size, device=token_ids.device)
    at = positions.gather(1, anchors)[..., None] + slots
    hidden = network.block_hidden(block_ids.flatten(), at.flatten(), MaskedAttend(context, mask))
    return hidden.view(*block_ids.shape, -1)


def train_forward(
    network: BlockNetwork,
    features: Tensor,
    token_ids: Tensor,
    anchors: Tensor,
    mask: Tensor,
    positions: Tensor | None = None,
) -> tuple[Tensor, Slot]:
    """Teacher-forced logits of all drafts of all blocks; arguments as in ``block_hidden_states``.

    Draft j of a block is the token at anchor + 1 + j, in both label conventions.
    Returns the hidden states that the head got [rows, num_blocks, num_drafts, hidden], and logits [rows,
    num_blocks, num_drafts, draft_vocab] with confidences (before the sigmoid) [rows, num_blocks, num_drafts].
    """
    hidden = block_hidden_states(network, features, token_ids, anchors, mask, positions)
    hidden = network.drafting(hidden)
    return hidden, network.teacher_forced(hidden, previous_ids(token_ids, anchors, network.spec.num_drafts))
