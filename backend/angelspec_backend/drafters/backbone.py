"""The backbone that DFlash, DFlare, DFly and DSpark share: a block of slots over the target's hidden states.

A block is the anchor (the newest token) and mask tokens behind it.  It sees context keys and values made of
the target's hidden states at the positions before the anchor, and all slots of itself, in one pass.

Parameters are named as in AngelSpec checkpoints.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.drafters.layers import Attend, Attention, DecoderLayer, LayerShape, RMSNorm, Rotary
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts

KeyValue = tuple[Tensor, Tensor]


class BlockAttention(Attention):
    """Attention whose context, the target's hidden states, may have projections of its own (DFlare)."""

    def __init__(self, shape: LayerShape, own_projections: bool) -> None:
        super().__init__(shape)
        self.own_projections = own_projections
        if own_projections:
            kv = shape.num_kv_heads * shape.head_dim
            self.k_proj_target = nn.Linear(shape.hidden, kv, bias=False)
            self.v_proj_target = nn.Linear(shape.hidden, kv, bias=False)

    def context_key_value(self, context: Tensor, rotary: Rotary) -> KeyValue:
        """context: [n, hidden], not normed by the layer -> keys and values [n, num_kv_heads, head_dim]"""
        if not self.own_projections:
            return self.key_value(context, rotary)
        key = self.k_norm(self.heads(self.k_proj_target(context)))
        return rotary(key), self.heads(self.v_proj_target(context))


class BlockBackbone(nn.Module):
    """Context, block input and layers of a block drafter."""

    embed_tokens: Tensor  # [vocab_size, hidden], the target's

    def __init__(self, spec: DrafterSpec, target: TargetParts) -> None:
        """Random weights.

        Raises:
            ValueError: spec and target contradict each other.
        """
        super().__init__()
        shape, kind = spec.shape, spec.kind
        hidden, num_taps = shape.hidden, len(spec.tap_ids)
        for name, found, expected in (
            ("vocab_size", spec.vocab_size, target.vocab_size),
            ("hidden", hidden, target.hidden_size),
            *([("target_hidden", spec.target_hidden, hidden)] if kind in ("dflare", "dfly") else []),
        ):
            if found != expected:
                raise ValueError(f"{name} is {found}, but must be {expected}")
        self.spec = spec
        self.register_buffer("embed_tokens", target.embed_tokens, persistent=False)
        self.layer_fusion_weights: nn.Parameter | None = None
        self.context_proj = None
        if kind in ("dflare", "dfly"):
            self.layer_fusion_weights = nn.Parameter(_initial_fusion(kind, spec.num_layers, num_taps))
        if kind != "dflare":
            self.context_proj = nn.Linear(num_taps * spec.target_hidden, hidden, bias=False)
        self.context_norm = RMSNorm(hidden, shape.eps)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, BlockAttention(shape, kind == "dflare")) for _ in range(spec.num_layers)
        )
        self.final_norm = RMSNorm(hidden, shape.eps)

    def layer_context(self, features: Tensor) -> Tensor:
        """What the context projections of each layer get.

        features: [n, num_taps, target_hidden] -> [num_layers, n, hidden]
        """
        context = None if self.context_proj is None else self.context_proj(features.flatten(-2))
        if self.layer_fusion_weights is not None:
            weights = self.layer_fusion_weights.float().softmax(-1).to(features.dtype)  # [num_layers, taps]
            mixed = torch.einsum("lt,nth->lnh", weights, features)
            context = mixed if context is None else context + mixed
        assert context is not None
        return self.context_norm(context).expand(len(self.layers), -1, -1)

    def context_key_values(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context, per layer [n, num_kv_heads, head_dim].

        features: [n, num_taps, target_hidden]; positions: [n].
        """
        rotary = self.rotary(positions, features.dtype)
        contexts = self.layer_context(features).unbind(0)
        attentions = [cast(BlockAttention, layer.self_attn) for layer in self.layers]
        return [
            attention.context_key_value(context, rotary)
            for attention, context in zip(attentions, contexts, strict=True)
        ]

    def block_ids(self, anchor_ids: Tensor) -> Tensor:
        """The input of blocks: [...] -> [..., block_size]"""
        ids = anchor_ids[..., None].repeat_interleave(self.spec.block_size, -1)
        ids[..., 1:] = self.spec.mask_token_id
        return ids

    def block_hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The backbone over slots of any blocks: token_ids, positions: [n] -> [n, hidden], after the norm."""
        hidden = F.embedding(token_ids, self.embed_tokens)
        rotary = self.rotary(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, attend, index)
        return self.final_norm(hidden)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        return Rotary.at(positions, self.spec.shape.head_dim, self.spec.shape.rope_theta, dtype)


def _initial_fusion(kind: str, num_layers: int, num_taps: int) -> Tensor:
    """Logits of the weights of the taps [num_layers, num_taps]: for DFlare each layer leans on the taps of
    its own relative depth, for DFly, which adds this to a projection of all taps, they are equal."""
    if kind == "dfly":
        return torch.zeros(num_layers, num_taps)
    depth = torch.arange(num_layers) / max(num_layers - 1, 1) * (num_taps - 1)
    return -2.0 * (torch.arange(num_taps) - depth.round()[:, None]).abs()
