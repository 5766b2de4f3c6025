"""Attention of training blocks over their context and themselves, without a mask for every slot.

All slots of a block see the same context, so a mask of blocks is enough; and the own block, the only other
thing they see, is a small product of its own.  Query heads that share keys go through one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec_backend.drafters.backbone import KeyValue


@dataclass(frozen=True)
class BlockAttend:
    """``Attend`` of all blocks of padded rows."""

    context: Sequence[KeyValue]  # per layer [rows * length, num_kv_heads, head_dim]
    sees: Tensor  # [rows, blocks, length] bool: the context that a block sees, maybe none

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value: [rows * blocks * block_size, heads, head_dim], see ``Attend``"""
        rows, blocks, length = self.sees.shape
        size, num_kv, dim = len(query) // (rows * blocks), key.shape[1], query.shape[2]
        groups = query.shape[1] // num_kv
        # [rows, kv, blocks, block_size * groups, dim]
        queries = query.view(rows, blocks, size, num_kv, groups, dim).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
        queries = queries * dim**-0.5
        keys, values = (each.view(rows, length, num_kv, dim).transpose(1, 2) for each in self.context[layer])
        own_keys, own_values = (
            each.view(rows, blocks, size, num_kv, dim).permute(0, 3, 1, 2, 4) for each in (key, value)
        )  # [rows, kv, blocks, block_size, dim]
        far = (queries.flatten(2, 3) @ keys.mT).unflatten(2, (blocks, -1))  # [.., blocks, slots, length]
        far = far.masked_fill(~self.sees[:, None, :, None], -torch.inf)
        scores = torch.cat([far, queries @ own_keys.mT], -1)  # [rows, kv, blocks, slots, length + block_size]
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        near = weights[..., length:] @ own_values
        out = (weights[..., :length].flatten(2, 3) @ values).view_as(near) + near
        out = out.unflatten(3, (size, groups)).permute(
            0, 2, 3, 1, 4, 5
        )  # [rows, blocks, size, kv, groups, dim]
        return out.reshape(rows * blocks * size, num_kv * groups, dim)
