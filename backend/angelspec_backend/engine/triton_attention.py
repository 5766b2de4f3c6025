"""Paged attention on a GPU, in the Triton language: one kernel for prefill, decode and verify rows.

A row's queries are cut into tiles, and its context into splits of a fixed size that begin at multiples of
that size.  Every (tile, key/value head, split) is a program that writes a partial softmax (flash-decoding;
Dao et al.: Flash-Decoding for long-context inference, 2023); a second kernel folds the partial results of a
query in the order of the context.  So what a query gets is a function of its position and its context alone:
more queries in its tile, or more rows, only add keys it does not see, and these change no bit.

Needs the ``triton`` package.  With ``TRITON_INTERPRET=1`` set before triton is first imported, the kernels
run on CPU tensors, for tests.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.triton_kernels import attend_split, fold_splits

SPLIT = 256
"""Positions of a split: small enough that one long row occupies a GPU, large enough to amortise the fold."""
KEYS, MAX_KEY_BYTES = 64, 512
"""Positions that a program reads at once, half of them where one takes more bytes; divides SPLIT."""
MIN_TILE = 16
"""Query heads of a tile, at least: the smallest tile of the tensor cores."""
MAX_PARTIAL_BYTES = 1 << 27
"""Memory for partial results; a longer batch is computed in several launches."""


def triton_paged_attention(
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
    """``attention.paged_attention`` on a GPU.  Launches kernels only: nothing waits for the device.

    query: [num_tokens, num_heads, key_dim], last dimension dense.
    Returns: [num_tokens, num_heads, value_dim], dense; tokens of no row get zeros.
    """
    num_tokens, num_heads, key_dim = query.shape
    num_rows, max_blocks = batch.block_table.shape
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    if query.stride(2) != 1:
        query = query.contiguous()
    key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()  # as they are on a GPU
    out = query.new_zeros(num_tokens, num_heads, value_dim)
    if not num_rows:
        return out
    group = num_heads // num_kv_heads
    tile = max(MIN_TILE, triton.next_power_of_2(group))
    queries = tile // group
    # How tokens spread over rows is known on the device only; each row begins a tile, so there are at most:
    num_tiles = num_tokens // queries + num_rows
    num_splits = triton.cdiv(max_blocks * block_size, SPLIT)
    per_tile = num_kv_heads * num_splits * tile * (value_dim + 2)
    tiles_per_launch = min(num_tiles, max(1, MAX_PARTIAL_BYTES // (4 * per_tile)))
    partial = torch.empty(tiles_per_launch * per_tile, dtype=torch.float32, device=query.device)
    key_pad, value_pad = _padded(key_dim), _padded(value_dim)
    large = max(key_pad, value_pad) * query.element_size() > MAX_KEY_BYTES
    layout = {
        "GROUP": group,
        "QUERIES": queries,
        "TILE": tile,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": value_pad,
        "SPLIT": SPLIT,
        "WINDOW": sliding_window,
    }
    # Kernels go to the current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        for first in range(0, num_tiles, tiles_per_launch):
            count = min(tiles_per_launch, num_tiles - first)
            tiles = (batch.query_start, batch.context_lens, num_rows, first)
            attend_split[(count, num_kv_heads, num_splits)](
                query,
                key_cache,
                value_cache,
                batch.block_table,
                partial,
                *tiles,
                max_blocks,
                query.stride(0),
                query.stride(1),
                scale,
                **layout,
                KEY_DIM=key_dim,
                KEY_PAD=key_pad,
                KEYS=KEYS // 2 if large else KEYS,  # an RTX has 99 KiB of shared memory
                BLOCK_SIZE=block_size,
                SOFTCAP=softcap,
                UPCAST=query.device.type == "cpu",  # the interpreter has no products of bf16
            )
            fold_splits[(count, num_kv_heads)](partial, sinks, out, *tiles, num_splits, **layout)
    return out


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
