"""Arrays to a device by one copy that nobody waits for.

A copy from ordinary memory blocks until all earlier work of the device is done, so a few of them in a step
leave the device idle.  Here all arrays lie in one page-locked buffer, which torch's allocator reuses only
when the copy has happened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes at whose multiples an array begins: kernels read 16 bytes at once."""


def upload(arrays: Sequence[NDArray], device: torch.device | str) -> list[Tensor]:
    """The arrays as tensors on a device; on the CPU they keep their memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if torch.device(device).type == "cpu":
        return tensors
    return split(join(tensors, pin_memory=True).to(device, non_blocking=True), tensors)


def join(tensors: Sequence[Tensor], pin_memory: bool = False) -> Tensor:
    """CPU tensors one behind the other.  -> [num_bytes] uint8"""
    starts = _starts(tensors)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin_memory)
    for place, tensor in zip(split(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def split(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what ``join`` joined, with the shapes and types of ``like``.  buffer: [num_bytes] uint8"""
    starts = _starts(like)
    return [
        buffer[start : start + each.nbytes].view(each.dtype).view(each.shape)
        for start, each in zip(starts, like, strict=False)
    ]


def buffer_of(first: Tensor) -> Tensor:
    """The whole buffer that an uploaded tensor lies in.  -> [num_bytes] uint8"""
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each begins in the buffer, and at last its length."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT)
    return starts
