"""The decoder layers of a llama-like model, and how they are computed kernel by kernel.

``llama_native`` computes the same to the bit in one call, which spares a step the milliseconds that Python
takes between some hundred kernels, but needs linear layers of the native kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.attention import attention_args
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_out: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # gated
    down: PackedLinear
    sliding_window: int  # positions a token sees, itself included; 0: all

    def linears(self) -> tuple[PackedLinear, ...]:
        """In the order in which they are computed."""
        return self.qkv, self.attention_out, self.gate_up, self.down


@dataclass(frozen=True)
class Decoder:
    """The decoder layers and what they have in common."""

    layers: Sequence[DecoderLayer]
    cos_sin: Tensor  # [max_positions, rotary_dim] the cosines of one half, then the sines
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


class LayerByLayer:
    """The decoder layers of one forward pass, kernel by kernel, for linear layers of any kind."""

    def __init__(self, decoder: Decoder, batch: PackedBatch, pool: KVPool) -> None:
        self._decoder, self._pool = decoder, pool
        layer, num_tokens = decoder.layers[0], len(batch.token_ids)
        self._dtype = decoder.cos_sin.dtype
        self._attended = torch.empty(num_tokens, layer.attention_out.in_features, dtype=self._dtype)
        self._attention, self._rope = attention_and_rope(decoder, batch, pool)
        self._attention.out = self._attended.data_ptr()

    def run(self, hidden: Tensor, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """All layers.

        hidden: [num_tokens, hidden] the residual stream, which becomes that in front of the last MLP.
        Returns the output of that MLP, [num_tokens, hidden], and the outputs of the tapped layers.
        """
        normed, delta = torch.empty_like(hidden), torch.zeros_like(hidden)  # delta: still to be added
        tapped: list[Tensor] = []
        for index in range(len(self._decoder.layers)):
            delta = self._layer(index, hidden, delta, normed)
            if index in taps:
                tapped.append(hidden + delta)
        return delta, tapped

    def _layer(self, index: int, hidden: Tensor, delta: Tensor, normed: Tensor) -> Tensor:
        layer, eps, pool = self._decoder.layers[index], self._decoder.eps, self._pool
        native.rms_norm(delta, layer.input_norm, eps, normed, hidden)
        qkv = layer.qkv(normed)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        rope, attention = self._rope, self._attention
        rope.qkv = attention.query = qkv.data_ptr()
        rope.key_cache = attention.key_cache = pool.keys[index].data_ptr()
        rope.value_cache = attention.value_cache = pool.values[index].data_ptr()
        rope.query_norm, rope.key_norm = address(layer.query_norm), address(layer.key_norm)
        native.rope_and_cache(rope, self._dtype)
        attention.sliding_window = layer.sliding_window
        native.paged_attention(attention, self._dtype)

        delta = layer.attention_out(self._attended)
        native.rms_norm(delta, layer.post_norm, eps, normed, hidden)
        return layer.down(layer.gate_up(normed))


def attention_and_rope(
    decoder: Decoder, batch: PackedBatch, pool: KVPool
) -> tuple[native.AttentionArgs, native.RopeArgs]:
    """The arguments that all layers share."""
    keys, values = pool.keys[0], pool.values[0]
    attention = attention_args(batch, decoder.num_heads, keys, values, decoder.head_dim**-0.5)
    attention.query_stride = decoder.layers[0].qkv.out_features
    rope = native.RopeArgs(
        cos_sin=decoder.cos_sin.data_ptr(),
        positions=batch.positions.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        key_stride=keys.stride(0),
        value_stride=values.stride(0),
        num_tokens=len(batch.token_ids),
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        rotary_dim=decoder.cos_sin.shape[1],
        block_size=pool.block_size,
        num_threads=torch.get_num_threads(),
        eps=decoder.eps,
    )
    return attention, rope


def address(tensor: Tensor | None) -> int | None:
    """Of its first element."""
    return None if tensor is None else tensor.data_ptr()
