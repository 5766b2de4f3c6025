"""A block drafter's network made fast for serving, and its context written to the KV pool."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from angelspec_backend.drafters.backbone import BlockAttention
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.layers import DecoderLayer
from angelspec_backend.drafters.packed import PackedAttention, pack_network
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


def pack_block_network(network: BlockNetwork, quantization: str = "none") -> BlockNetwork:
    """``pack_network`` for a block drafter, in place."""
    for layer in network.layers:
        decoder = cast(DecoderLayer, layer)
        attention = PackedBlockAttention(cast(BlockAttention, decoder.self_attn), quantization)
        decoder.register_module("self_attn", attention)
    return pack_network(network.requires_grad_(False).eval(), quantization)


def store_context(network: BlockNetwork, features: Tensor, positions: Tensor, attend: PagedAttend) -> None:
    """Write the context keys and values of some positions, in every layer.

    features: [n, num_taps, target_hidden]; positions: [n]; attend: over these n tokens.
    """
    rotary = network.rotary(positions, features.dtype)
    for index, context in enumerate(network.layer_context(features).unbind(0)):
        attention = cast(PackedBlockAttention, cast(DecoderLayer, network.layers[index]).self_attn)
        attend.store(index, attention.context_kv(context), rotary, attention)
