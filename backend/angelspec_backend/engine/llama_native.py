"""A whole forward pass of a llama-like model in one native call.

Between two passes over the weights everything else has left the caches, and the first use of a torch
operator then costs up to a millisecond; so as little Python as can be lies between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from angelspec_backend.engine import huge_pages, native
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.linear_native import BLOCK
from angelspec_backend.engine.llama_layers import Decoder, DecoderLayer, address, attention_and_rope


class NativeForward:
    """Forward passes over weights for which ``native_forward`` allows it."""

    def __init__(self, decoder: Decoder, embedding: Tensor, final_norm: Tensor, head: PackedLinear) -> None:
        """embedding: [vocab_size, hidden]; final_norm: [hidden]"""
        self.seconds: Tensor | None = None  # [2] fp64, when set: time in linear layers and attention is added
        self._decoder, self._embedding, self._final_norm, self._head = decoder, embedding, final_norm, head
        self._pool: KVPool | None = None  # of the layers' arguments
        self._layers: ctypes.Array[native.LayerArgs] | None = None
        self._scratch = huge_pages.zeros(0, torch.bfloat16)

    def run(self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute a batch and store its keys and values.

        taps: layers, ascending.  Returns logits [num_logits, vocab_size], and the outputs of the tapped
        layers [num_taps, num_tokens, hidden].
        """
        decoder, num_tokens = self._decoder, len(batch.token_ids)
        layer, hidden_size = decoder.layers[0], self._embedding.shape[1]
        logits = torch.empty(len(batch.logits_index), self._head.out_features, dtype=torch.bfloat16)
        tapped = torch.empty(len(taps), num_tokens, hidden_size, dtype=torch.bfloat16)
        attention, rope = attention_and_rope(decoder, batch, pool)
        tap_ids = (ctypes.c_int64 * len(taps))(*taps)
        args = native.ForwardArgs(
            layers=ctypes.addressof(self._layers_of(pool)),
            head=self._head.native_args,
            attention=attention,
            rope=rope,
            token_ids=batch.token_ids.data_ptr(),
            embedding=self._embedding.data_ptr(),
            final_norm=self._final_norm.data_ptr(),
            logits_index=batch.logits_index.data_ptr(),
            logits=logits.data_ptr(),
            taps=ctypes.addressof(tap_ids),
            tapped=tapped.data_ptr(),
            seconds=address(self.seconds),
            num_layers=len(decoder.layers),
            num_tokens=num_tokens,
            num_logits=len(logits),
            num_taps=len(taps),
            hidden_size=hidden_size,
            attended_size=layer.attention_out.in_features,
            inter=layer.down.in_features,
            num_threads=torch.get_num_threads(),
            eps=decoder.eps,
            **self._scratch_for(num_tokens),
        )
        native.forward(args)
        return logits, tapped

    def _scratch_for(self, num_tokens: int) -> dict[str, int]:
        """Addresses of the scratch memory by name, for so many tokens at least; it is kept."""
        layer, hidden_size = self._decoder.layers[0], self._embedding.shape[1]
        sizes = {
            "hidden": hidden_size,
            "delta": hidden_size,
            "qkv": layer.qkv.out_features,
            "normed": hidden_size,
            "attended": layer.attention_out.in_features,
            "activated": layer.down.in_features,
        }
        rows = -(-num_tokens // BLOCK) * BLOCK  # inputs of linear layers are kept in blocks of rows
        if len(self._scratch) < rows * sum(sizes.values()):
            self._scratch = huge_pages.zeros(rows * sum(sizes.values()), torch.bfloat16)
        places, at = {}, self._scratch.data_ptr()
        for name, size in sizes.items():
            places[name] = at
            at += rows * size * self._scratch.itemsize
        return places

    def _layers_of(self, pool: KVPool) -> ctypes.Array[native.LayerArgs]:
        if self._layers is None or self._pool is not pool:
            layers = [_layer_args(layer, index, pool) for index, layer in enumerate(self._decoder.layers)]
            self._pool, self._layers = pool, (native.LayerArgs * len(layers))(*layers)
        return self._layers


def native_forward(
    decoder: Decoder, embedding: Tensor, final_norm: Tensor, head: PackedLinear
) -> NativeForward | None:
    """The model in one call, or None if a linear layer is not native."""
    linears = [head, *(linear for layer in decoder.layers for linear in layer.linears())]
    is_native = all(linear.native_args is not None for linear in linears)
    if not is_native or decoder.cos_sin.dtype != torch.bfloat16:
        return None
    return NativeForward(decoder, embedding.contiguous(), final_norm, head)


def _layer_args(layer: DecoderLayer, index: int, pool: KVPool) -> native.LayerArgs:
    names = ("qkv", "attention_out", "gate_up", "down")
    norms = ("input_norm", "post_norm", "query_norm", "key_norm")
    return native.LayerArgs(
        **{name: linear.native_args for name, linear in zip(names, layer.linears(), strict=True)},
        **{name: address(getattr(layer, name)) for name in norms},
        key_cache=pool.keys[index].data_ptr(),
        value_cache=pool.values[index].data_ptr(),
        sliding_window=layer.sliding_window,
    )
