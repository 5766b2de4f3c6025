"""Make every operation of a Hugging Face model give a row the same bits in any batch, on the CPU.

A row's logits must not depend on its batch mates or on how many tokens are verified at once,
else a near tie may flip between speculative and plain decoding.  Matrix products break this by
choosing another order of summation for another number of rows, and elementwise functions by
computing the last few elements of a tensor (and of each thread's share) with scalar code that
rounds differently from the vector code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

BLOCK = 16
"""Rows per product of a weight that is not packed: always the same shape, so always the same kernel."""


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """x / (1 + exp(-x)) in fp32.  exp, tanh, erf and log1p do round alike at every place of a tensor."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU, exact or with the tanh approximation, in fp32."""
    wide = x.float()
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta in fp32, linear above the threshold."""
    wide = x.float() * beta
    return torch.where(wide > threshold, wide, torch.log1p(torch.exp(wide))).div(beta).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in blocks of a fixed number of rows.  x: [..., in] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
    products = [F.linear(block, weight, bias) for block in padded.split(BLOCK)]
    return torch.cat(products)[: len(rows)].view(*x.shape[:-1], -1)


class RowIndependent(TorchFunctionMode):
    """While active, torch functions that depend on a row's place run as their equivalents above.

    It reaches code that a swap of modules cannot: MoE routers and gates written with functions.
    """

    _equivalents: ClassVar[dict[Callable[..., Any], Callable[..., Tensor]]] = {
        F.silu: silu,
        F.gelu: gelu,
        F.softplus: softplus,
        F.sigmoid: sigmoid,
        torch.sigmoid: sigmoid,
        Tensor.sigmoid: sigmoid,
        F.linear: linear,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._equivalents.get(func, func)(*args, **(kwargs or {}))
