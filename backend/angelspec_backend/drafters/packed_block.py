"""A block drafter's network made fast for serving, and its context written to the KV pool."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from angelspec_backend.drafters.backbone import BlockAttention
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.heads import HiddenCorrection
from angelspec_backend.drafters.layers import DecoderLayer
from angelspec_backend.drafters.packed import PackedAttention, PackedSwiGLU, pack_network
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.engine.linear import PackedLinear


class PackedBlockAttention(PackedAttention):
    """``BlockAttention`` with one product for queries, keys and values, and one for those of the context."""

    def __init__(self, attention: BlockAttention, quantization: str) -> None:
        super().__init__(attention, quantization)
        projections = (attention.k_proj, attention.v_proj)
        if attention.own_projections:
            projections = (attention.k_proj_target, attention.v_proj_target)
        weight = torch.cat([projection.weight.detach() for projection in projections])
        self.context_kv = PackedLinear(weight, None, quantization)


class PackedCorrection(HiddenCorrection):
    """``HiddenCorrection`` with gate and up as one product, and a small ``down`` folded into the LM head.

    lm_head(hidden + down(x)) = lm_head(hidden) + (lm_head down)(x): the first is one product for all slots of
    a block, and the second, which each slot needs for itself, reads intermediate / hidden of the LM head.
    """

    def __init__(self, correction: HiddenCorrection, lm_head: Tensor, quantization: str) -> None:
        """lm_head: [draft vocabulary, hidden]"""
        nn.Module.__init__(self)
        gate, up, down = (
            getattr(correction, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")
        )
        self.folded = 2 * down.shape[1] <= down.shape[0]
        if self.folded:
            down = (lm_head.float() @ down.float()).to(down.dtype)
        self.mlp = PackedSwiGLU(gate, up, down, quantization)
        self.hidden_norm, self.embed_norm = correction.hidden_norm, correction.embed_norm

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, 2 * hidden] -> [n, hidden], or [n, draft vocabulary] if ``folded``"""
        return self.mlp(x)

    def logit_bias(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """See ``HiddenCorrection.logit_bias``.  [n, hidden] twice"""
        return self(torch.cat([self.hidden_norm(hidden), self.embed_norm(previous)], -1))


def pack_block_network(network: BlockNetwork, quantization: str = "none") -> BlockNetwork:
    """``pack_network`` for a block drafter, in place."""
    for layer in network.layers:
        decoder = cast(DecoderLayer, layer)
        attention = PackedBlockAttention(cast(BlockAttention, decoder.self_attn), quantization)
        decoder.register_module("self_attn", attention)
    if network.hidden_correction is not None:
        network.hidden_correction = PackedCorrection(
            network.hidden_correction, network.lm_head.weight, quantization
        )
    return pack_network(network, quantization)


def store_context(network: BlockNetwork, features: Tensor, positions: Tensor, attend: PagedAttend) -> None:
    """Write the context keys and values of some positions, in every layer.

    features: [n, num_taps, target_hidden]; positions: [n]; attend: over these n tokens.
    """
    rotary = network.rotary(positions, features.dtype)
    for index, context in enumerate(network.layer_context(features).unbind(0)):
        attention = cast(PackedBlockAttention, cast(DecoderLayer, network.layers[index]).self_attn)
        attend.store(index, attention.context_kv(context), rotary, attention)
