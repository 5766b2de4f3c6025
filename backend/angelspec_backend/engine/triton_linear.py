"""Products and sums of a GPU that add in one fixed order, in the Triton language.

A library's product picks its tiles, and whether it splits the sum, by the number of rows; then a row's bits
depend on its batch mates.  Here every product of a weight runs the same binary with the same tiles for any
number of rows, and no sum is split, so a row is a function of itself and the weight (the idea: He and others,
Defeating nondeterminism in LLM inference, 2025).  Sums are in fp32.

Annotations are not postponed in this file, since triton reads ``tl.constexpr`` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 64
"""Rows of a tile, used or not: the smallest product of a Hopper's tensor cores."""
SUM_BLOCK = 1024
"""Columns that a sum reads at once."""


# A specialised row count would be another binary.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x: tl.tensor,  # [num_rows, IN]
    weight: tl.tensor,  # [OUT, IN]
    bias: tl.tensor,  # [OUT] or None
    out: tl.tensor,  # [num_rows, OUT]
    num_rows: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One tile of x @ weight.T + bias.  Programs next to each other share their part of the weight."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < OUT
    x_at = x + row.to(tl.int64)[:, None] * IN + at[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * IN + at[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        if IN % BLOCK_K:
            inside = at < IN - start
            a = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at + start, mask=is_column[None, :] & inside[:, None], other=0.0)
        else:
            a = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            b = tl.load(weight_at + start, mask=is_column[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * OUT + column[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def sum_kernel(
    x: tl.tensor,  # [num_rows, COLUMNS]
    out: tl.tensor,  # [num_rows]
    COLUMNS: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The sum of one row, over DIVISOR."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        total += tl.load(x + row * COLUMNS + start + at, mask=start + at < COLUMNS, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total, 0) / DIVISOR).to(out.dtype.element_ty))


def tiles(out_features: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and stages of a product.  They follow from the weight alone, never from the rows.

    A narrow tile gives a small weight enough programs to read it with; 64 KiB of stages fit every GPU
    since Ampere.
    """
    block_n, num_stages = (32, 5) if out_features <= 8192 else (64, 4) if out_features <= 16384 else (128, 3)
    block_k = 128 // dtype.itemsize  # a line of the cache
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_stages": num_stages}


def fixed_order_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, every row the same to the bit in any company.

    x: [..., in_features]; weight: [out_features, in_features]; bias: [out_features]; fp16, bf16 or fp32, x
    and weight alike.  -> [..., out_features]
    """
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features).contiguous()
    out = x.new_empty(len(rows), out_features)
    if len(rows):
        sizes = tiles(out_features, weight.dtype)
        grid = (triton.cdiv(len(rows), BLOCK_M), triton.cdiv(out_features, sizes["BLOCK_N"]))
        with torch.cuda.device_of(x):  # kernels go to the current device, which need not be the tensors'
            linear_kernel[grid](
                rows,
                weight.contiguous(),
                bias,
                out,
                len(rows),
                OUT=out_features,
                IN=in_features,
                UPCAST=x.device.type == "cpu",  # the interpreter has no products of bf16
                **sizes,
            )
    return out.view(*x.shape[:-1], out_features)


def fixed_order_sum(x: Tensor, *, keepdim: bool = False, mean: bool = False) -> Tensor:
    """The sum or mean over the last dimension, in fp32.  x: [..., n] of floats -> [...] or [..., 1]"""
    columns = x.shape[-1]
    out = x.new_empty(x.shape[:-1])
    if out.numel():
        with torch.cuda.device_of(x):
            sum_kernel[(out.numel(),)](
                x.contiguous(), out, COLUMNS=columns, DIVISOR=columns if mean else 1, BLOCK=SUM_BLOCK
            )
    return out[..., None] if keepdim else out
