"""Memory in huge pages, for what is read from end to end in every step.

With pages of 4 KB the CPU looks one up in its page tables, and stops fetching ahead, every 64 cache lines;
on a virtual machine that takes a quarter of the memory bandwidth.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes that every piece of memory is aligned to: a cache line."""


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """``size`` zeros on the CPU, in huge pages where there are any; a page takes memory once it is written.

    Raises:
        OSError: there is no room for so many.
    """
    # Private anonymous memory is zero and free until written, while torch.zeros would touch every page.
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:size]


def room(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory in which tensors of these shapes lie side by side.

    Filled one by one, each original can be dropped before the next one takes its room.
    """
    sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors]
    parts = zeros(sum(sizes), torch.uint8).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
