"""Linear layers computed by the native kernels, with weights of bf16 or of 8 bits.

With 8 bits a weight is an integer of -127 to 127 times a scale per output channel (symmetric; the largest
magnitude of a channel becomes 127): half the memory traffic of bf16, which bounds small batches.  Such
integers are exact in bf16, so activations stay bf16, and the products are summed as in a bf16 layer; the
scale multiplies the sum.

An output is one sum over the inputs in ascending order, so a row is the same for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.engine import huge_pages, native

BLOCK = 32
"""Outputs computed together, and inputs in one step of a sum; weights are padded to multiples with zeros."""

GATES = BLOCK // 2
"""Gates in a block of a gated layer; the other half are the factors that they let through."""


class QuantizationError(ValueError):
    """The weights cannot be quantized here; the message says why."""


class NativeMatmul:
    """x @ weight.T + bias for bf16 tensors on the CPU.

    weight: [out_features, in_features]; bias: [out_features] or None.  quantized: round the weight to 8
    bits.  gated: the first half of the weight's rows are gates, and the layer's outputs are silu(gate) times
    the second half.  ``kernel`` is one of native.LINEAR_KERNELS, by default the best of this machine; kernels
    round differently.  Needs what ``check_supported`` checks.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, quantized: bool, gated: bool = False, kernel: str = ""
    ) -> None:
        self.out_features = len(weight) // 2 if gated else len(weight)
        self.in_features = weight.shape[1]
        self.padding = -self.in_features % BLOCK
        scale = None
        if gated:
            weight, bias = pair_gates(weight), None if bias is None else pair_gates(bias)
        if quantized:
            codes, scale = quantize(weight)
            self._weight = pack_codes(codes)
        else:
            self._weight = pack(weight)
        self._scale, self._bias = (
            None if x is None else F.pad(x, (0, -len(x) % BLOCK)) for x in (scale, bias)
        )
        self.args = native.LinearArgs(  # the kernel reads the tensors' memory
            weight=self._weight.data_ptr(),
            scale=None if self._scale is None else self._scale.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            in_features=self.in_features + self.padding,
            out_features=self.out_features,
            gated=gated,
            weight_bits=8 if quantized else 16,
            kernel=native.LINEAR_KERNELS.index(kernel or native.linear_kernel()),
        )

    @property
    def weight(self) -> Tensor:
        """The packed weight."""
        return self._weight

    @weight.setter
    def weight(self, same: Tensor) -> None:
        """Read it elsewhere."""
        self._weight = same
        self.args.weight = same.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in_features] bf16, dense -> [n, out_features]"""
        out = x.new_empty(len(x), self.out_features)
        if self.padding:
            x = F.pad(x, (0, self.padding))
        args = self.args
        args.x, args.out, args.rows = x.data_ptr(), out.data_ptr(), len(x)
        args.num_threads = torch.get_num_threads()
        native.linear(args)
        return out


def move_to_huge_pages(matmuls: Sequence[NativeMatmul]) -> None:
    """Keep the weights side by side in huge pages, in this order, best that in which they are read."""
    for matmul, place in zip(matmuls, huge_pages.room([each.weight for each in matmuls]), strict=True):
        matmul.weight = place.copy_(matmul.weight)


def check_supported(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        QuantizationError: says what is needed.
    """
    if device.type != "cpu":
        raise QuantizationError(f"quantization 'int8' is for the CPU; this model is on '{device}'")
    if dtype != torch.bfloat16:
        raise QuantizationError(
            f"quantization 'int8' needs dtype bfloat16, got {str(dtype).removeprefix('torch.')}"
        )
    if native.linear_kernel() == "none":
        raise QuantizationError("quantization 'int8' needs g++ and a CPU with AVX512-BF16 and AVX512-VBMI")


def resolve_quantization(wanted: str, dtype: torch.dtype, device: torch.device | str) -> str:
    """What to quantize to: "auto" means "int8" where the kernels are, else "none".

    Raises:
        QuantizationError: "int8" is wanted where it cannot be computed.
    """
    if wanted == "none":
        return wanted
    try:
        check_supported(dtype, torch.device(device))
    except QuantizationError:
        if wanted == "auto":
            return "none"
        raise
    return "int8"


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers and their scales; an error is at most half a scale.

    weight: [out_features, in_features] -> int8 [out_features, in_features], fp32 [out_features]
    """
    steps = weight.detach().to(torch.float32, copy=True)  # large: from here on in place
    low, high = steps.aminmax(dim=1)
    scale = torch.maximum(-low, high) / 127
    steps /= scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return steps.round_().clamp_(-127, 127).to(torch.int8), scale


def pair_gates(rows: Tensor) -> Tensor:
    """The order in which a gated layer is packed: GATES gates, their factors, the next gates.

    rows: [2 * n, ...] all gates, then all factors -> [2 * n padded to BLOCK, ...], padded with zeros
    """
    halves = rows.detach().unflatten(0, (2, -1))  # [2, n, ...]
    padded = torch.cat([halves, halves.new_zeros(2, -halves.shape[1] % GATES, *halves.shape[2:])], 1)
    return padded.unflatten(1, (-1, GATES)).transpose(0, 1).flatten(0, 2)


def pack(weight: Tensor) -> Tensor:
    """The order in which the kernels read a weight: of each step two tiles of pairs of inputs.

    weight: bf16 [out_features, in_features] -> [blocks of 32 outputs, steps of 32 inputs, 1024]
    """
    out_features, in_features = weight.shape
    weight = F.pad(weight.detach(), (0, -in_features % BLOCK, 0, -out_features % BLOCK))
    blocks, steps = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    pieces = weight.view(blocks, 2, 16, steps, 16, 2)  # tile, output, step, pair, parity
    return pieces.permute(0, 3, 1, 4, 2, 5).reshape(blocks, steps, BLOCK * BLOCK)


def pack_codes(codes: Tensor) -> Tensor:
    """The order in which the kernels read 8-bit weights: uint8, sign bit and magnitude.

    codes: int8 [out_features, in_features] -> [blocks of 32 outputs, steps of 32 inputs, 1024]
    """
    out_features, in_features = codes.shape
    codes = F.pad(codes, (0, -in_features % BLOCK, 0, -out_features % BLOCK))
    packed = codes.abs().view(torch.uint8) | ((codes < 0).to(torch.uint8) << 7)
    blocks, steps = packed.shape[0] // BLOCK, packed.shape[1] // BLOCK
    # Of a step, 64 bytes widen to two rows of a tile; bytes are interleaved in lanes of 16.
    pieces = packed.view(blocks, 2, 4, 4, steps, 8, 2, 2)  # tile, lane, output, step, rows, row, parity
    return pieces.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(blocks, steps, BLOCK * BLOCK)
