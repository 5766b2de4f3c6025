"""Losses without the logits of all positions in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from angelspec_backend.training.losses import Terms


def chunked_terms(
    function: Callable[..., Terms], tensors: Sequence[Tensor | None], chunk: int, recompute: bool = True
) -> Terms:
    """`function` on consecutive chunks of the first axis, the results joined.

    function: maps slices of `tensors` to Terms; what it makes inside, such as logits [chunk, vocab], is
      thrown away and made again in the backward pass, so that memory holds one chunk of it.  Parameters it
      closes over get their gradients.
    tensors: [n, ...] each, or None, which is handed on
    chunk: positions at a time; for block objectives no need to keep blocks whole
    recompute: False keeps what the backward pass needs instead: faster, when memory allows
    Raises ValueError if the first axes differ in length or chunk is not positive.
    """
    lengths = {len(tensor) for tensor in tensors if tensor is not None}
    if len(lengths) != 1:
        raise ValueError(f"tensors must have one length, got {sorted(lengths)}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    (length,) = lengths
    parts = []
    for start in range(0, max(length, 1), chunk):
        slices = [None if tensor is None else tensor[start : start + chunk] for tensor in tensors]
        if recompute and torch.is_grad_enabled():
            parts.append(checkpoint(function, *slices, use_reentrant=False))
        else:
            parts.append(function(*slices))
    return join(parts)


def join(parts: Sequence[Terms]) -> Terms:
    """Terms of consecutive positions as one."""
    present = [field.name for field in fields(Terms) if getattr(parts[0], field.name) is not None]
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in present})
