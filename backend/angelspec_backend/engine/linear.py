"""Linear layers whose rows do not depend on how many rows are computed together.

A matrix kernel may sum in another order for another number of rows, and then a token's logits depend on
its batch mates.  oneDNN with weights packed for a batch-size hint of 1 keeps one order over a wide range
of row counts, and is up to twice as fast as ``F.linear``; the range is checked, not assumed.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.engine import linear_native, native
from angelspec_backend.engine.linear_native import NativeMatmul

_log = logging.getLogger(__name__)

ROW_RANGES = ((2, 512), (2, 256), (2, 128), (2, 64), (2, 32), (16, 16))
"""Row counts (lowest, highest) that one kernel call may get, best first; the last is one fixed shape."""

ANY_ROWS = (1, 1 << 30)
"""The row range of the native kernels, which compute every row by itself."""

ROW_COUNTS = (2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64))
"""Row counts that kernels are called with; others are padded.  For every count it meets oneDNN takes
milliseconds to make code and buffers, about 0.5 MB a shape, and keeps them.  One row alone is none of
them: kernels pick another order of summation for it."""


class PackedLinear(nn.Module):
    """``F.linear`` with row-independent results.

    weight: [out_features, in_features]; bias: [out_features] or None.  On the CPU only the packed copy of
    the weight is kept; elsewhere ``F.linear`` is called, which ``FixedOrder`` replaces on a GPU.
    quantization: "none", or "int8" for bf16 weights on the CPU rounded to 8 bits.  gated: the outputs are
    silu of the products with the first half of the weight's rows times those with the second half.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, quantization: str = "none", gated: bool = False
    ) -> None:
        super().__init__()
        self.out_features = len(weight) // 2 if gated else len(weight)
        self.in_features, self.gated = weight.shape[1], gated
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.row_range: tuple[int, int] | None = None
        if weight.device.type == "cpu":
            self._matmul = _best_matmul(weight.detach(), self.bias, quantization, gated)
            self.row_range = ANY_ROWS
            if not isinstance(self._matmul, NativeMatmul):
                self.row_range = find_row_range(*weight.shape, weight.dtype, torch.get_num_threads())
        else:
            self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]"""
        if self.row_range is None:
            y = F.linear(x, self.weight, self.bias)
            return activate(y) if self.gated else y
        low, high = self.row_range
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        if not len(x):
            return x.new_empty(0, self.out_features)
        if isinstance(self._matmul, NativeMatmul):
            return self._matmul(x.contiguous())
        within = low <= len(x) <= high
        y = _padded(self._matmul, x.contiguous(), high) if within else _in_chunks(self._matmul, x, low, high)
        return activate(y) if self.gated else y

    @property
    def native_args(self) -> native.LinearArgs | None:
        """What a native call over many layers needs to compute this one; None if it cannot."""
        matmul = self.native_matmul
        return matmul.args if matmul and not matmul.padding else None

    @property
    def native_matmul(self) -> NativeMatmul | None:
        """The native product, if that is what computes this layer."""
        matmul = self._matmul if self.row_range is not None else None
        return matmul if isinstance(matmul, NativeMatmul) else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, row_range={self.row_range}"


def activate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.  gate_up: [n, 2 * inter], gates first -> [n, inter]"""
    if native.supports(gate_up.dtype, gate_up.device):
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        return native.silu_and_mul(gate_up.contiguous(), out)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def fuse(*linears: nn.Linear, quantization: str = "none") -> PackedLinear:
    """One linear whose output is the outputs of ``linears`` side by side.

    The weights move: the given modules are left without weight and bias, so that the memory is freed.
    """
    weight = (
        linears[0].weight if len(linears) == 1 else torch.cat([linear.weight.detach() for linear in linears])
    )
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_bias_or_zeros(linear) for linear in linears])
    for linear in linears:
        linear.register_parameter("weight", None)
        linear.register_parameter("bias", None)
    return PackedLinear(weight, bias, quantization)


def move_to_huge_pages(linears: Iterable[PackedLinear]) -> None:
    """Keep the weights of native layers side by side in huge pages, in this order."""
    linear_native.move_to_huge_pages([m for linear in linears if (m := linear.native_matmul)])


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


@functools.cache
def find_row_range(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int
) -> tuple[int, int]:
    """The widest of ROW_RANGES in which a row of this shape is the same to the bit for every row count.

    Tried on a random matrix, once per shape; ``num_threads`` only tells settings apart.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight = normal(out_features, 8) @ normal(8, in_features)  # full randn would take seconds
    matmul = _packed_matmul(weight, None)
    for low, high in ROW_RANGES:
        if _rows_agree(matmul, normal(high, in_features), low):
            return low, high
    _log.warning(
        "linear %dx%d %s: a row depends on its place in the call; results may depend on the batch",
        out_features,
        in_features,
        dtype,
    )
    return ROW_RANGES[-1]


def _rows_agree(matmul: Callable[[Tensor], Tensor], x: Tensor, low: int) -> bool:
    """Whether the rows of matmul(x) are those of every smaller call.  x: [num_rows, in_features]"""
    whole = matmul(x)
    if low == len(x):  # one fixed shape: only the place of a row varies
        return torch.equal(matmul(x.roll(1, 0)).roll(-1, 0), whole)
    for index, count in enumerate(count for count in ROW_COUNTS if low <= count < len(x)):
        start = len(x) - count if index % 2 else 0
        if not torch.equal(matmul(x[start : start + count].contiguous()), whole[start : start + count]):
            return False
    return True


def _best_matmul(
    weight: Tensor, bias: Tensor | None, quantization: str, gated: bool
) -> Callable[[Tensor], Tensor]:
    """All outputs of the weight side by side, or from a NativeMatmul those of a gated layer."""
    if weight.dtype == torch.bfloat16:  # what a model keeps in fp32 stays so
        quantized = quantization == "int8"
        # Without AMX oneDNN is as fast as the kernel for bf16 weights.
        if quantized or native.linear_kernel() == "amx":
            return NativeMatmul(weight, bias, quantized=quantized, gated=gated)
    return _packed_matmul(weight, bias)


def _packed_matmul(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight: [out_features, in_features] -> a function from [n, in_features] to [n, out_features]"""
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not (torch.backends.mkldnn.is_available() and supported):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x: linear(x, packed, bias, "none", [], "")


def _in_chunks(matmul: Callable[[Tensor], Tensor], rows: Tensor, low: int, high: int) -> Tensor:
    """matmul in calls of low to high rows.  rows: [n, in_features]; missing rows are padded with zeros."""
    n = rows.shape[0]
    padded = -(-n // high) * high if low == high else max(n, low)
    chunks = F.pad(rows, (0, 0, 0, padded - n)).tensor_split(-(-padded // high))  # as equal as can be
    return torch.cat([_padded(matmul, chunk, high) for chunk in chunks])[:n]


def padded_rows(n: int) -> int:
    """The row count that a batch of n rows is best padded to, so that the layers need not; at least 2."""
    return max(n, 2) if native.linear_kernel() == "amx" else _row_count(n)


def _row_count(n: int) -> int:
    index = bisect.bisect_left(ROW_COUNTS, n)
    return ROW_COUNTS[index] if index < len(ROW_COUNTS) else n


def _padded(matmul: Callable[[Tensor], Tensor], x: Tensor, high: int) -> Tensor:
    """matmul in a call of one of ROW_COUNTS, at most high, or as many rows as x has."""
    padding = min(_row_count(len(x)), high) - len(x)
    return matmul(F.pad(x, (0, 0, 0, padding)))[: len(x)] if padding > 0 else matmul(x)
