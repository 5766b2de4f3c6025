"""Attention of a drafter in serving: over the drafter's own KV pool, under the target's block table."""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec_backend.drafters.layers import Rotary
from angelspec_backend.drafters.packed import PackedAttention
from angelspec_backend.engine import native
from angelspec_backend.engine.attention import attention_args, paged_attention
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool


class PagedAttend:
    """``Attend`` over one batch: causal, each row over its context in the pool and itself.

    Keys and values of the batch are stored on the way.
    """

    def __init__(self, pool: KVPool, batch: PackedBatch, cos_sin: Tensor) -> None:
        """cos_sin: of ``rotary_table``."""
        self._pool, self._batch, self._cos_sin = pool, batch, cos_sin

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``Attend``."""
        pool = self._pool
        pool.write(layer, key, value, self._batch.slot_mapping)
        scale = query.shape[-1] ** -0.5
        return paged_attention(query, pool.keys[layer], pool.values[layer], self._batch, scale)

    def fused(self, layer: int, qkv: Tensor, rotary: Rotary, attention: PackedAttention) -> Tensor:
        """See ``FusedAttend``."""
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        if not native.supports(qkv.dtype, qkv.device, dim):
            query, key, value = qkv.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
            query, key = attention.normed(query, key)
            return self(layer, rotary(query), rotary(key), value).flatten(1)
        pool, batch = self._pool, self._batch
        self._rope_and_cache(layer, qkv, heads, attention)
        out = torch.empty(len(qkv), heads * dim, dtype=qkv.dtype)
        args = attention_args(batch, heads, pool.keys[layer], pool.values[layer], dim**-0.5)
        args.query, args.out, args.query_stride = qkv.data_ptr(), out.data_ptr(), qkv.shape[1]
        native.paged_attention(args, qkv.dtype)
        return out

    def store(self, layer: int, kv: Tensor, rotary: Rotary, attention: PackedAttention) -> None:
        """Only store keys and values.  kv: [n, 2 * num_kv_heads * head_dim], overwritten"""
        if native.supports(kv.dtype, kv.device, attention.head_dim):
            self._rope_and_cache(layer, kv, 0, attention)
        else:
            key, value = kv.unflatten(-1, (-1, attention.head_dim)).chunk(2, 1)
            key = attention.normed(key, key)[1]
            self._pool.write(layer, rotary(key), value, self._batch.slot_mapping)

    def _rope_and_cache(self, layer: int, qkv: Tensor, num_heads: int, attention: PackedAttention) -> None:
        """Norm and rotate queries (so many heads of them) and keys in place, store keys and values."""
        batch = self._batch
        args = rope_args(self._pool, layer, self._cos_sin, qkv, num_heads, attention)
        args.positions, args.slot_mapping = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        native.rope_and_cache(args, qkv.dtype)


def rope_args(
    pool: KVPool, layer: int, cos_sin: Tensor, qkv: Tensor, num_heads: int, attention: PackedAttention
) -> native.RopeArgs:
    """What the kernel needs to norm and rotate queries and keys, all but ``positions`` and ``slot_mapping``.

    qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim]
    """
    return native.RopeArgs(
        qkv=qkv.data_ptr(),
        key_cache=pool.keys[layer].data_ptr(),
        value_cache=pool.values[layer].data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        query_norm=None if attention.query_norm is None else attention.query_norm.data_ptr(),
        key_norm=None if attention.key_norm is None else attention.key_norm.data_ptr(),
        key_stride=pool.keys[layer].stride(0),
        value_stride=pool.values[layer].stride(0),
        num_tokens=qkv.shape[0],
        num_heads=num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=cos_sin.shape[1],
        block_size=pool.block_size,
        num_threads=torch.get_num_threads(),
        eps=attention.eps,
    )


def rotary_table(
    num_positions: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Per position the cosines of one half, then the sines.  -> [num_positions, head_dim]"""
    rotary = Rotary.at(torch.arange(num_positions, device=device), head_dim, theta, dtype)
    half = head_dim // 2  # both halves are the same
    return torch.cat([rotary.cos[:, 0, :half], rotary.sin[:, 0, :half]], -1).contiguous()
