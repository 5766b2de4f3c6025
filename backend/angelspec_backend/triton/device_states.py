"""Hidden states that stay on the device they are on, as tensors of torch (option ``hidden_states_on``).

Processes share the memory of such tensors, but not their streams, so each waits for its own.  Only those
that are told to leave hidden states on a device import this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.core.hidden_states import StateArrays
from angelspec_backend.triton.codec import STATES

IN_TORCH = StateArrays(copy=torch.clone, join=torch.cat)


def read(tensors: Iterable[Any]) -> dict[str, Any]:
    """Of Triton's tensors hidden states as tensors of torch, the others as arrays, by name."""
    return {
        tensor.name(): _received(tensor) if tensor.name() in STATES else tensor.as_numpy()
        for tensor in tensors
    }


def complete(tensor: Tensor) -> Tensor:
    """The tensor, once all is computed that it depends on."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def _received(tensor: Any) -> Tensor:
    states = torch.from_dlpack(tensor.to_dlpack())
    # A GPU may have yet to run what reads it when Triton takes the memory back: on the CPU nothing is late.
    return complete(states.clone()) if states.is_cuda else states
