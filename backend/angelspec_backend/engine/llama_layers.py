"""The decoder layers of a llama-like model: all in one native call, or kernel by kernel.

Both compute the same to the bit.  One call spares a step at one row the milliseconds that Python takes
between some hundred kernels; it needs linear layers of the native kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.attention import attention_args
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.linear_native import BLOCK


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_out: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear
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


class Step(Protocol):
    """One forward pass over a batch."""

    def run(self, begin: int, end: int, hidden: Tensor, delta: Tensor) -> Tensor:
        """The decoder layers [begin, end).

        hidden, delta: [num_tokens, hidden], both overwritten: the residual stream, and what is still to be
        added to it.  Returns the new delta, the output of the last MLP.
        """


class LayerByLayer:
    """A ``Step`` that calls kernel by kernel, for linear layers of any kind."""

    def __init__(self, decoder: Decoder, batch: PackedBatch, pool: KVPool) -> None:
        self._decoder, self._pool = decoder, pool
        layer, num_tokens = decoder.layers[0], len(batch.token_ids)
        self._dtype = decoder.cos_sin.dtype
        self._attended, self._activated = (
            torch.empty(num_tokens, linear.in_features, dtype=self._dtype)
            for linear in (layer.attention_out, layer.down)
        )
        self._attention, self._rope = _attention_and_rope(decoder, batch, pool)
        self._attention.out = self._attended.data_ptr()

    def run(self, begin: int, end: int, hidden: Tensor, delta: Tensor) -> Tensor:
        """See ``Step``."""
        normed = torch.empty_like(hidden)
        for index in range(begin, end):
            delta = self._layer(index, hidden, delta, normed)
        return delta

    def _layer(self, index: int, hidden: Tensor, delta: Tensor, normed: Tensor) -> Tensor:
        layer, eps, pool = self._decoder.layers[index], self._decoder.eps, self._pool
        native.rms_norm(delta, layer.input_norm, eps, normed, hidden)
        qkv = layer.qkv(normed)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        rope, attention = self._rope, self._attention
        rope.qkv = attention.query = qkv.data_ptr()
        rope.key_cache = attention.key_cache = pool.keys[index].data_ptr()
        rope.value_cache = attention.value_cache = pool.values[index].data_ptr()
        rope.query_norm, rope.key_norm = _address(layer.query_norm), _address(layer.key_norm)
        native.rope_and_cache(rope, self._dtype)
        attention.sliding_window = layer.sliding_window
        native.paged_attention(attention, self._dtype)

        delta = layer.attention_out(self._attended)
        native.rms_norm(delta, layer.post_norm, eps, normed, hidden)
        return layer.down(native.silu_and_mul(layer.gate_up(normed), self._activated))


class NativeLayers:
    """Starts steps that are one native call, over weights for which ``native_layers`` allows it."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seconds: Tensor | None = None  # [2] fp64, when set: time in linear layers and attention is added
        self._bound: tuple[KVPool, ctypes.Array[native.LayerArgs]] | None = None

    def start(self, batch: PackedBatch, pool: KVPool) -> Step:
        """Begin a forward pass."""
        if self._bound is None or self._bound[0] is not pool:
            layers = [_layer_args(layer, index, pool) for index, layer in enumerate(self.decoder.layers)]
            self._bound = pool, (native.LayerArgs * len(layers))(*layers)
        return _NativeStep(self.decoder, batch, pool, self._bound[1], self.seconds)


class _NativeStep:
    """A ``Step`` in one call, with the memory it needs."""

    def __init__(
        self,
        decoder: Decoder,
        batch: PackedBatch,
        pool: KVPool,
        layers: ctypes.Array[native.LayerArgs],
        seconds: Tensor | None,
    ) -> None:
        layer, num_tokens = decoder.layers[0], len(batch.token_ids)
        sizes = {
            "qkv": layer.qkv.out_features,
            "gate_up": layer.gate_up.out_features,
            "normed": layer.qkv.in_features,
            "attended": layer.attention_out.in_features,
            "activated": layer.down.in_features,
        }
        rows = -(-num_tokens // BLOCK) * BLOCK  # inputs of linear layers are kept in blocks of rows
        self._memory = [torch.empty(rows, size, dtype=torch.bfloat16) for size in sizes.values()]
        attention, rope = _attention_and_rope(decoder, batch, pool)
        self._layers, self._batch, self._seconds = (
            layers,
            batch,
            seconds,
        )  # kept, since the call points to them
        self._args = native.LayersArgs(
            attention=attention,
            rope=rope,
            seconds=_address(seconds),
            num_tokens=num_tokens,
            hidden_size=layer.qkv.in_features,
            attended_size=layer.attention_out.in_features,
            inter=layer.down.in_features,
            num_threads=torch.get_num_threads(),
            eps=decoder.eps,
            **{name: memory.data_ptr() for name, memory in zip(sizes, self._memory, strict=True)},
        )

    def run(self, begin: int, end: int, hidden: Tensor, delta: Tensor) -> Tensor:
        """See ``Step``."""
        args = self._args
        args.layers = ctypes.addressof(self._layers) + begin * ctypes.sizeof(native.LayerArgs)
        args.num_layers = end - begin
        args.hidden, args.delta = hidden.data_ptr(), delta.data_ptr()
        native.layers(args)
        return delta


def native_layers(decoder: Decoder) -> NativeLayers | None:
    """The decoder in one call, or None if a linear layer is not native."""
    linears = [linear for layer in decoder.layers for linear in layer.linears()]
    is_native = all(linear.native_args is not None for linear in linears)
    return NativeLayers(decoder) if is_native and decoder.cos_sin.dtype == torch.bfloat16 else None


def _layer_args(layer: DecoderLayer, index: int, pool: KVPool) -> native.LayerArgs:
    names = ("qkv", "attention_out", "gate_up", "down")
    norms = ("input_norm", "post_norm", "query_norm", "key_norm")
    return native.LayerArgs(
        **{name: linear.native_args for name, linear in zip(names, layer.linears(), strict=True)},
        **{name: _address(getattr(layer, name)) for name in norms},
        key_cache=pool.keys[index].data_ptr(),
        value_cache=pool.values[index].data_ptr(),
        sliding_window=layer.sliding_window,
    )


def _attention_and_rope(
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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
