"""Flash attention over the block table, by what torch has for this GPU: not batch-invariant, but fast.

torch's own kernels (flash attention 2) read a block table whose blocks have a multiple of 256 tokens.  Where
the package flash_attn_3 is installed and the GPU is a Hopper, torch can be switched to its kernels, which
take blocks of any size.  In both, the number of splits of a context follows the whole batch, and with it the
order of summation.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.torch_attention import torch_paged_attention

_log = logging.getLogger(__name__)

FA2_BLOCK = 256
"""Flash attention 2 takes multiples of this block size."""
_TRIAL_CONTEXT = 37


def flash_supports(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether flash attention computes tensors of such types and sizes here; tried once for each."""
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    dim = key_cache.shape[3]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and key_cache.dtype == query.dtype
        and dim == value_dim
        and dim % 8 == 0
        and dim <= 256
        and _works(query.device, query.dtype, query.shape[1], num_kv_heads, dim, block_size)
    )


def flash_paged_attention(
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
    """``attention.paged_attention`` for what ``flash_supports``.  Nothing waits for the device.

    Raises:
        ValueError: softcap or sinks are asked for, which it cannot do.
    """
    if softcap or sinks is not None:
        raise ValueError(f"flash attention has no softcap here ({softcap}) and no sinks")
    from torch.nn.attention.varlen import varlen_attn  # not in every torch that the CPU can use

    num_rows, max_blocks = batch.block_table.shape
    block_size = key_cache.shape[2]
    if not num_rows:
        return torch.zeros_like(query)
    # Padding of a step that is no graph belongs to no row, and kernels count rows by their tokens.
    used = query.shape[0] if batch.graph_shape else batch.num_used or query.shape[0]
    # Only flash attention 2 wants to know where keys begin when a block table says it.
    starts = None
    if _implementation() == "FA2":
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * (
            max_blocks * block_size
        )
    out = varlen_attn(
        query[:used],
        key_cache.transpose(1, 2),  # [num_blocks, block_size, num_kv_heads, dim], a view
        value_cache.transpose(1, 2),
        batch.query_start,
        starts,
        batch.max_query or query.shape[0],
        max_blocks * block_size,
        scale=scale,
        window_size=(sliding_window - 1, 0) if sliding_window else (-1, 0),
        enable_gqa=query.shape[1] != key_cache.shape[1],
        seqused_k=batch.context_lens + batch.query_start.diff(),
        block_table=batch.block_table,
    )
    assert isinstance(out, Tensor)
    return out if used == len(query) else torch.cat([out, torch.zeros_like(query[used:])])


@functools.cache
def _implementation() -> str:
    """What torch's flash attention runs on: FA2, its own, or FA3 where that is installed for this GPU."""
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if active:
        return str(active)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if hopper and importlib.util.find_spec("flash_attn_interface"):
        try:
            attention.activate_flash_attention_impl("FA3")
        except Exception as error:  # whatever a foreign package raises while it is imported
            _log.warning("flash attention 3 is installed but cannot be used: %s", error)
        else:
            return "FA3"
    return "FA2"


@functools.cache
def _works(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, block_size: int
) -> bool:
    """Whether one small batch comes out as it should.  Not during the capture of a graph."""
    if _implementation() == "FA2" and block_size % FA2_BLOCK:
        return False
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    width = -(-(_TRIAL_CONTEXT + 2) // block_size)
    query = normal(3, num_heads, dim)
    keys, values = (normal(1 + 2 * width, num_kv_heads, block_size, dim) for _ in range(2))
    tokens = torch.arange(3, device=device)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    context = torch.tensor([3, _TRIAL_CONTEXT], dtype=torch.int32, device=device)
    table = torch.arange(1, 1 + 2 * width, dtype=torch.int32, device=device).view(2, width)
    batch = PackedBatch(tokens, tokens, tokens, starts, context, table, tokens, max_query=2)
    try:
        out = flash_paged_attention(query, keys, values, batch, dim**-0.5)
    except (RuntimeError, TypeError, ImportError, AttributeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _log.info("flash attention cannot read this KV pool (%s)", reason)
        return False
    expected = torch_paged_attention(query, keys, values, batch, dim**-0.5)
    return torch.allclose(out.float(), expected.float(), atol=0.03, rtol=0.03)
