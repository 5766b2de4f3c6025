"""The KV pool: keys and values of all sequences, in blocks that a block table strings together."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches per token.  Key and value sizes may differ (latent attention)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVPool:
    """Key and value caches, one pair per attention layer.

    Position p of a sequence lives in block ``table[p // block_size]`` at offset ``p % block_size``.
    Block 0 is the null block: dummy tokens write there and no sequence owns it.
    """

    keys: tuple[Tensor, ...]  # per layer [num_blocks, num_kv_heads, block_size, key_dim]
    values: tuple[Tensor, ...]  # per layer [num_blocks, num_kv_heads, block_size, value_dim]
    num_blocks: int
    block_size: int

    @staticmethod
    def allocate(
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVPool:
        """A pool of zeros.  On the CPU a page takes memory only once it has been written.

        Raises:
            MemoryError: says how large the pool is and which option makes it smaller.
        """
        try:
            shapes = [(num_blocks, spec.num_kv_heads, block_size) for spec in specs]
            keys = [_zeros((*s, spec.key_dim), dtype, device) for s, spec in zip(shapes, specs, strict=True)]
            values = [
                _zeros((*s, spec.value_dim), dtype, device) for s, spec in zip(shapes, specs, strict=True)
            ]
        except (OSError, torch.OutOfMemoryError) as error:
            per_token = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in specs) * dtype.itemsize
            size = per_token * block_size * num_blocks / 2**30
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens needs {size:.1f} GiB, "
                f"which this machine does not have; lower num_blocks"
            ) from error
        return KVPool(tuple(keys), tuple(values), num_blocks, block_size)

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes over all layers, in bytes."""
        caches = (*self.keys, *self.values)
        return sum(cache.shape[1] * cache.shape[3] * cache.element_size() for cache in caches)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store the keys and values of a batch.

        key: [num_tokens, num_kv_heads, key_dim]; value: [num_tokens, num_kv_heads, value_dim];
        slot_mapping: [num_tokens] block * block_size + offset.
        """
        block = slot_mapping // self.block_size
        offset = slot_mapping % self.block_size
        self.keys[layer][block, :, offset] = key
        self.values[layer][block, :, offset] = value


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would touch every page; private anonymous memory is zero and free until written.
    size = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(size * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)
