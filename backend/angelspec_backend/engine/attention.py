"""Attention of a packed ragged batch over the paged KV pool: one signature, five implementations.

The native kernel on the CPU, a kernel in the Triton language on a GPU, and where these cannot be had, torch's
own attention on a GPU and plain torch anywhere.  All but torch's own are batch-invariant: what a query gets
is bit-identical alone, beside other rows, inside a verify block, and on any number of threads.  A GPU that
need not be takes flash attention where it is installed for the pool's block size.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.flash_attention import flash_paged_attention, flash_supports
from angelspec_backend.engine.torch_attention import sdpa_paged_attention, torch_paged_attention


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
    batch_invariant: bool = True,
) -> Tensor:
    """Causal attention of every query over its row's context and itself, already written to the cache.

    query: [num_tokens, num_heads, key_dim], heads dense; key_cache: [num_blocks, num_kv_heads, block_size,
    key_dim], each block dense; value_cache: the same with value_dim.  Of the batch, query_start, context_lens
    and block_table are used, and max_query by flash attention.  sliding_window: positions a query sees,
    itself included, 0 for all; softcap: scores become softcap * tanh(score / softcap), 0 for off; sinks:
    [num_heads] one more logit per head that only takes weight away; batch_invariant: False allows flash
    attention.

    Returns: [num_tokens, num_heads, value_dim], dense; tokens of no row get zeros.
    """
    if native.supports(query.dtype, query.device, key_cache.shape[3], value_cache.shape[3]):
        attend: Attention = native_paged_attention
    elif (
        not (batch_invariant or softcap)
        and sinks is None
        and query.device.type == "cuda"
        and flash_supports(query, key_cache, value_cache)
    ):
        attend = flash_paged_attention
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
        key_stride=key_cache.stride(0),
        value_stride=value_cache.stride(0),
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
