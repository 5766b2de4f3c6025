"""Attention of a packed ragged batch over the paged KV pool: one signature, four implementations.

The native kernel on the CPU, a kernel in the Triton language on a GPU, and where these cannot be had, torch's
own attention on a GPU and plain torch anywhere.  All but torch's own are batch-invariant: what a query gets
is bit-identical alone, beside other rows, inside a verify block, and on any number of threads.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.batch import PackedBatch


class Attention(Protocol):
    """The signature of every implementation, see ``paged_attention``."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PackedBatch,
        scale: float,
        *,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every query over its row's context and itself, already written to the cache.

    query: [num_tokens, num_heads, key_dim], heads dense; key_cache: [num_blocks, num_kv_heads, block_size,
    key_dim]; value_cache: the same with value_dim.  Of the batch, query_start, context_lens and block_table
    are used.  sliding_window: positions a query sees, itself included, 0 for all; softcap: scores become
    softcap * tanh(score / softcap), 0 for off; sinks: [num_heads] one more logit per head that only takes
    weight away.

    Returns: [num_tokens, num_heads, value_dim], dense; tokens of no row get zeros.
    """
    if native.supports(query.dtype, query.device, key_cache.shape[3], value_cache.shape[3]):
        attend: Attention = native_paged_attention
    elif query.device.type == "cuda" and _has_triton():
        # Imported here, since triton is there only where torch comes for a GPU.
        from angelspec_backend.engine.triton_attention import triton_paged_attention as attend
    elif query.device.type == "cuda" and not softcap and sinks is None:
        attend = sdpa_paged_attention
    else:
        attend = torch_paged_attention
    return attend(
        query,
        key_cache,
        value_cache,
        batch,
        scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def native_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The native CPU kernel, for what ``native.supports``."""
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    sinks = None if sinks is None else sinks.float().contiguous()
    args = attention_args(batch, query.shape[1], key_cache, value_cache, scale, sliding_window, softcap)
    args.query, args.out, args.query_stride = query.data_ptr(), out.data_ptr(), query.stride(0)
    args.sinks = None if sinks is None else sinks.data_ptr()
    native.paged_attention(args, query.dtype)
    return out


def attention_args(
    batch: PackedBatch,
    num_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> native.AttentionArgs:
    """The native kernel's arguments for one batch, all but ``query``, ``query_stride`` and ``out``."""
    num_rows, max_blocks = batch.block_table.shape
    return native.AttentionArgs(
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        query_start=batch.query_start.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_table=batch.block_table.data_ptr(),
        num_tokens=batch.token_ids.shape[0],
        num_rows=num_rows,
        max_blocks=max_blocks,
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[1],
        key_dim=key_cache.shape[3],
        value_dim=value_cache.shape[3],
        block_size=key_cache.shape[2],
        sliding_window=sliding_window,
        num_threads=torch.get_num_threads(),
        scale=scale,
        softcap=softcap,
    )


def torch_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, one query at a time in fp32: the reference, and the fallback anywhere."""
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    for context, mine, keys, values in _gathered_rows(batch, key_cache, value_cache):
        for token in range(mine.start, mine.stop):
            last = context + token - mine.start
            first = max(last - sliding_window + 1, 0) if sliding_window else 0
            visible = slice(first, last + 1)
            out[token] = _attend(query[token], keys[visible], values[visible], scale, softcap, sinks)
    return out


def sdpa_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same by torch's own attention, row by row: for GPUs without triton.  Not batch-invariant.

    Raises:
        ValueError: softcap or sinks are asked for, which it cannot do.
    """
    if softcap or sinks is not None:
        raise ValueError(f"torch's own attention has no softcap ({softcap}) and no sinks")
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    for context, mine, keys, values in _gathered_rows(batch, key_cache, value_cache):
        end = len(keys)
        at = torch.arange(end, device=query.device)
        back = at[context:, None] - at  # [queries, end] how far a query looks back
        q, k, v = (each.transpose(0, 1)[None] for each in (query[mine], keys, values))
        visible = (back >= 0) & (back < (sliding_window or end))
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
        )  # [1, num_heads, queries, value_dim]
        out[mine] = attended[0].transpose(0, 1)
    return out


def _gathered_rows(
    batch: PackedBatch, key_cache: Tensor, value_cache: Tensor
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Per row: tokens before its first query, where its queries are, and its keys and values, in order.

    keys, values: [context + queries, num_kv_heads, dim]
    """
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    for row, context in enumerate(contexts):
        mine, blocks = slice(starts[row], starts[row + 1]), batch.block_table[row]
        end = context + mine.stop - mine.start
        yield context, mine, _gather(key_cache, blocks, end), _gather(value_cache, blocks, end)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` positions of a sequence.  -> [length, num_kv_heads, dim]"""
    block_size = cache.shape[2]
    used = blocks[: -(-length // block_size)].long()
    return cache[used].transpose(1, 2).reshape(-1, cache.shape[1], cache.shape[3])[:length]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """query: [num_heads, key_dim]; keys, values: [length, num_kv_heads, dim] -> [num_heads, value_dim]"""
    num_kv_heads = keys.shape[1]
    grouped = query.float().view(num_kv_heads, -1, query.shape[1])  # [num_kv_heads, group, key_dim]
    scores = grouped @ keys.float().permute(1, 2, 0) * scale  # [num_kv_heads, group, length]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, -1, 1)
        top = torch.maximum(top, sink)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    out = weights @ values.float().transpose(0, 1) / total  # [num_kv_heads, group, value_dim]
    return out.reshape(query.shape[0], -1).to(query.dtype)
