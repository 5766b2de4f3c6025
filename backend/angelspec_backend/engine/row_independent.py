"""Make every operation of a Hugging Face model give a row the same bits in any batch.

A row's logits must not depend on its batch mates or on how many tokens are verified at once,
else a near tie may flip between speculative and plain decoding.  Matrix products break this by
choosing another order of summation for another number of rows, and elementwise functions on the CPU
by computing the last few elements of a tensor (and of each thread's share) with scalar code that
rounds differently from the vector code.  A GPU rounds elementwise functions alike everywhere, and its
softmax and layer norm compute a row in one way, but sums and means split rows among threads by their number.
"""

from __future__ import annotations

import contextlib
import importlib.util
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


class FixedOrder(TorchFunctionMode):
    """The same on a GPU: products of weights and sums along rows run in our own kernels."""

    def __init__(self, device_type: str = "cuda") -> None:
        """device_type: where tensors must be; others are left alone."""
        super().__init__()
        # Imported here, since triton is there only where torch comes for a GPU.
        from angelspec_backend.engine import triton_linear

        self._kernels, self._device_type = triton_linear, device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS or func in _SUMS:
            found = self._replaced(func, args, kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _replaced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """The result of our own kernel, or None for calls of another kind."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.device.type != self._device_type or not _is_float(x):
            return None
        if func is F.linear:
            weight, bias = _given(args, kwargs, "input", "weight", "bias")[1:]
            return self._kernels.fixed_order_linear(x, weight, bias) if weight.dtype == x.dtype else None
        if func in _PRODUCTS:
            other = args[1] if len(args) == 2 and not kwargs else None
            if not isinstance(other, Tensor) or other.dim() != 2 or x.dim() < 2 or other.dtype != x.dtype:
                return None
            return self._kernels.fixed_order_linear(x, other.t())
        _, dim, keepdim, dtype = _given(args, kwargs, "input", "dim", "keepdim", "dtype")
        if dim not in (-1, x.dim() - 1, (-1,), [-1]) or dtype not in (None, x.dtype) or not x.dim():
            return None
        return self._kernels.fixed_order_sum(x, keepdim=bool(keepdim), mean=_SUMS[func])


_PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SUMS: dict[Any, bool] = {torch.mean: True, Tensor.mean: True, torch.sum: False, Tensor.sum: False}


def _given(args: Any, kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Arguments by name, None for those not given."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _is_float(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def row_independent(
    device: torch.device, batch_invariant: bool
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What a forward pass on this device runs in, so that its rows do not depend on each other."""
    if device.type == "cpu":
        return RowIndependent
    if batch_invariant and importlib.util.find_spec("triton") is not None:
        return FixedOrder
    return contextlib.nullcontext
