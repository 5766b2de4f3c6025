"""Linear layers whose weights take 8 bits: half the memory traffic of bf16, which bounds small batches.

A weight is an integer of -127 to 127 times a scale per output channel (symmetric; the largest magnitude
of a channel becomes 127).  Such integers are exact in bf16, so activations stay bf16, and the products
are summed as in a bf16 layer; the scale multiplies the sum.  CPU only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.engine import native

BLOCK = 32
"""Outputs computed together, and inputs in one step of a sum; weights are padded to multiples with zeros."""


class QuantizationError(ValueError):
    """The weights cannot be quantized here; the message says why."""


class Int8Matmul:
    """x @ weight.T + bias with the weight rounded to 8 bits.

    weight: [out_features, in_features] bf16; bias: [out_features] bf16 or None.  ``kernel`` is one of
    native.INT8_KERNELS, by default the best of this machine; rows do not depend on each other with any, but
    kernels round differently.  Needs what ``check_supported`` checks.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: str = "") -> None:
        self.out_features, self.in_features = weight.shape
        codes, scale = quantize(weight)
        self._padding = -self.in_features % BLOCK
        self._weight, self._scale, self._bias = pack(codes), scale, bias  # the kernel reads their memory
        self._args = native.Int8Args(
            weight=self._weight.data_ptr(),
            scale=scale.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            in_features=self.in_features + self._padding,
            out_features=self.out_features,
            kernel=native.INT8_KERNELS.index(kernel or native.int8_kernel()),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in_features] bf16, dense -> [n, out_features]"""
        out = x.new_empty(len(x), self.out_features)
        if self._padding:
            x = F.pad(x, (0, self._padding))
        args = self._args
        args.x, args.out, args.rows = x.data_ptr(), out.data_ptr(), len(x)
        args.num_threads = torch.get_num_threads()
        native.int8_linear(args)
        return out


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
    if native.int8_kernel() == "none":
        raise QuantizationError("quantization 'int8' needs g++ and a CPU with AVX512-BF16 and AVX512-VBMI")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers and their scales; an error is at most half a scale.

    weight: [out_features, in_features] -> int8 [out_features, in_features], fp32 [out_features]
    """
    steps = weight.detach().to(torch.float32, copy=True)  # large: from here on in place
    low, high = steps.aminmax(dim=1)
    scale = torch.maximum(-low, high) / 127
    steps /= scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return steps.round_().clamp_(-127, 127).to(torch.int8), scale


def pack(codes: Tensor) -> Tensor:
    """The order in which the kernels read a weight: uint8, sign bit and magnitude.

    codes: int8 [out_features, in_features] -> [blocks of 32 outputs, steps of 32 inputs, 1024]
    """
    out_features, in_features = codes.shape
    codes = F.pad(codes, (0, -in_features % BLOCK, 0, -out_features % BLOCK))
    packed = codes.abs().view(torch.uint8) | ((codes < 0).to(torch.uint8) << 7)
    blocks, steps = packed.shape[0] // BLOCK, packed.shape[1] // BLOCK
    # Of a step, 64 bytes widen to two rows of a tile; bytes are interleaved in lanes of 16.
    pieces = packed.view(blocks, 2, 4, 4, steps, 8, 2, 2)  # tile, lane, output, step, rows, row, parity
    return pieces.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(blocks, steps, BLOCK * BLOCK)
