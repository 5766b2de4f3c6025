"""The KV pool: keys and values of all sequences, in blocks that a block table strings together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec_backend.engine import huge_pages


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
        shapes = [
            (spec.num_kv_heads, block_size, dim) for spec in specs for dim in (spec.key_dim, spec.value_dim)
        ]
        try:
            caches = _interleaved if torch.device(device).type == "cpu" else _separate
            both = caches(shapes, num_blocks, dtype, device)
        except (OSError, torch.OutOfMemoryError) as error:
            size = sum(math.prod(shape) for shape in shapes) * num_blocks * dtype.itemsize / 2**30
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens needs {size:.1f} GiB, "
                f"which this machine does not have; lower num_blocks"
            ) from error
        return KVPool(tuple(both[::2]), tuple(both[1::2]), num_blocks, block_size)

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


def _separate(
    shapes: Sequence[tuple[int, ...]], num_blocks: int, dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Per shape a cache of zeros of its own.  -> each [num_blocks, *shape]"""
    return [torch.zeros((num_blocks, *shape), dtype=dtype, device=device) for shape in shapes]


def _interleaved(
    shapes: Sequence[tuple[int, ...]], num_blocks: int, dtype: torch.dtype, _: torch.device | str
) -> list[Tensor]:
    """Caches of zeros in which a block of all layers is one piece of memory.  -> each [num_blocks, *shape]

    So used blocks fill huge pages, without a partly filled one per layer.
    """
    sizes = [math.prod(shape) for shape in shapes]
    flat = huge_pages.zeros(num_blocks * sum(sizes), dtype).view(num_blocks, -1)
    return [part.unflatten(1, shape) for part, shape in zip(flat.split(sizes, 1), shapes, strict=True)]
