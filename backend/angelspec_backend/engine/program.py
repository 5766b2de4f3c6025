"""Native kernels recorded once and run in one call: a small network costs no Python between them.

Only bf16 on the CPU.  The kernels are those that are also called one by one, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.native_args import ArgmaxArgs, CutArgs, MixArgs, Op, RowsArgs

KINDS = ("rows", "mix", "linear", "rope", "attention", "argmax", "cut")
"""Kinds of operations in the order of native_program.h."""


class Rows:
    """Rows that operations have in common: how many there are in a run, and memory for the most."""

    def __init__(self, room: int, same: Rows | None = None) -> None:
        """same: rows of which there are always as many."""
        self.room = room
        self._count: NDArray[np.int64] = np.zeros(1, np.int64) if same is None else same._count

    @property
    def count(self) -> int:
        """How many there are; operations on none are skipped."""
        return int(self._count[0])

    @count.setter
    def count(self, count: int) -> None:
        self._count[0] = count

    @property
    def address(self) -> int:
        """Where the kernels read ``count``."""
        return self._count.ctypes.data

    def tensor(self, width: int) -> Tensor:
        """Memory for an intermediate result.  -> [room, width]"""
        return torch.empty(self.room, width, dtype=torch.bfloat16)

    def numbers(self, dtype: type[np.generic] = np.int64) -> NDArray:
        """Memory for numbers that the caller fills in before a run, or reads after it.  -> [room]"""
        return np.zeros(self.room, dtype)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm."""

    weight: Tensor  # [n]
    eps: float


class Program:
    """Operations in the order in which they run.  Tensors are [room, n] of their rows, in bf16.

    Memory that is given to it is kept alive, and read and written by every run.
    """

    def __init__(self) -> None:
        self._recorded: list[Op] = []
        self._kept: list[object] = []
        self._ops: ctypes.Array[Op] | None = None

    def __len__(self) -> int:
        """The operations so far; one between two of them is an end for ``run``."""
        return len(self._recorded)

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Run the operations [begin, end)."""
        if self._ops is None or len(self._ops) != len(self._recorded):
            self._ops = (Op * len(self._recorded))(*self._recorded)
        native.run(self._ops, begin, len(self._recorded) if end is None else end)

    def rows(
        self,
        rows: Rows,
        x: Tensor,
        out: Tensor | None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        index: NDArray[np.int64] | None = None,
        nonzero: NDArray[np.int64] | None = None,
    ) -> None:
        """Copy, add and norm: out[r] = norm(residual[r] += x[index[r]]), each of these where it is given.

        x: [any, n]; index, nonzero: [room]; where ``nonzero`` is 0, so is out.
        """
        args = RowsArgs(
            x=x.data_ptr(),
            index=_pointer(index),
            nonzero=_pointer(nonzero),
            residual=_address(residual),
            weight=None if norm is None else norm.weight.data_ptr(),
            out=_address(out),
            x_stride=x.stride(0),
            out_stride=0 if out is None else out.stride(0),
            n=x.shape[1],
            eps=0 if norm is None else norm.eps,
        )
        self._record("rows", rows, args, x, out, norm, residual, index, nonzero)

    def mix(self, rows: Rows, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out[r] = sum of weight[k] * x[r][k].  x: [room, count * n]; weight: [count] fp32; out: [room, n]"""
        args = MixArgs(x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(weight), out.shape[1])
        self._record("mix", rows, args, x, weight, out)

    def linear(self, rows: Rows, linear: PackedLinear, x: Tensor) -> Tensor:
        """A product, whose layer ``supports``.  x: [room, in_features], dense -> [room, out_features]"""
        out, args = rows.tensor(linear.out_features), linear.native_args
        assert args is not None
        own = type(args).from_buffer_copy(args)
        own.x, own.out = x.data_ptr(), out.data_ptr()
        self._record("linear", rows, own, linear, x, out)
        return out

    def rope(self, rows: Rows, args: native.RopeArgs) -> None:
        """See ``native.rope_and_cache``; the caller keeps what the arguments point to."""
        self._record("rope", rows, args)

    def attention(self, rows: Rows, args: native.AttentionArgs) -> None:
        """See ``attention.paged_attention``; the rows are those of the block table.

        The caller keeps what the arguments point to, and may change them before a run.
        """
        self._record("attention", rows, args)

    def argmax(
        self, rows: Rows, logits: Tensor, names: Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest of each row.  logits: [room, n]; names: [n] int64 what is put out, None: its number
        -> [room], and its probabilities [room], see ``native.argmax``"""
        out, probability = rows.numbers(), rows.numbers(np.float32)
        args = ArgmaxArgs(
            logits.data_ptr(), _address(names), _pointer(out), _pointer(probability), logits.shape[1]
        )
        self._record("argmax", rows, args, logits, names, out, probability)
        return out, probability

    def cut(
        self,
        rows: Rows,
        probability: NDArray[np.float32],
        before: NDArray[np.float32] | None,
        least: NDArray[np.float32],
        following: Rows,
    ) -> NDArray[np.float32]:
        """Lower the number of the following rows to behind the last one that is likely enough, or to none.

        probability, before: [room], whose product must be at least ``least``.  Returns the products.
        """
        product = rows.numbers(np.float32)
        pointers = (_pointer(each) for each in (probability, before, product, least))
        args = CutArgs(*pointers, following.address)
        self._record("cut", rows, args, probability, before, product, least, following)
        return product

    def keep(self, *used: object) -> None:
        """Keep alive what recorded arguments point to."""
        self._kept += used

    def _record(self, kind: str, rows: Rows, args: ctypes.Structure, *kept: object) -> None:
        self._recorded.append(Op(KINDS.index(kind), rows.address, ctypes.addressof(args)))
        self._kept += [rows, args, *kept]


def supports(linear: PackedLinear) -> bool:
    """Whether a program can compute this layer."""
    return linear.native_args is not None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointer(array: NDArray | None) -> int | None:
    return None if array is None else array.ctypes.data
