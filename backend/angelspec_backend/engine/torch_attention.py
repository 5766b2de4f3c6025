"""Paged attention by torch alone: the reference, the fallback anywhere, and one for GPUs without triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.engine.batch import PackedBatch


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
