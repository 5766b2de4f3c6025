"""Hidden states as the loop and the drafters' host handle them: bytes that are cut, kept and joined.

They lie in arrays of numpy or, where they stay on a device, in tensors of torch.  Core imports no torch, so
whoever reads them from a message says how such tensors are copied and joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class States(Protocol):
    """Bytes in an array of numpy or a tensor of torch: what both can do alike."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> States: ...

    def reshape(self, *shape: int) -> States: ...


@dataclass(frozen=True)
class StateArrays:
    """What arrays and tensors are asked for by other names."""

    copy: Callable[[Any], Any]
    join: Callable[[list[Any]], Any]  # several runs, not none -> one new run


IN_NUMPY = StateArrays(copy=np.ndarray.copy, join=np.concatenate)
