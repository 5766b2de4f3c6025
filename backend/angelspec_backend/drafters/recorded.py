"""What the recorded programs of chain and block drafters share: places in the KV pool, and half layers.

A layer is recorded in two halves.  Keys and values are stored for all tokens, and the rest is computed only
for those whose output somebody reads.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from angelspec_backend.drafters.heads import ConfidenceHead, MarkovHead
from angelspec_backend.drafters.layers import DecoderLayer
from angelspec_backend.drafters.packed import PackedAttention, PackedMixture, PackedNorm, PackedSwiGLU
from angelspec_backend.drafters.paged import rope_args
from angelspec_backend.engine import native
from angelspec_backend.engine.attention import attention_args
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.program import Norm, Program, Rows, supports


class Tokens(Rows):
    """Tokens and where their keys and values lie."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.positions, self.slots = self.numbers(), self.numbers()

    def place(
        self,
        positions: NDArray[np.int64],
        table: NDArray[np.int32],
        row_of: NDArray[np.int64],
        block_size: int,
    ) -> None:
        """Set how many there are and where.  positions, row_of: [n]; table: [num_rows, max_blocks]"""
        self.count = n = len(positions)
        self.positions[:n] = positions
        block, within = np.divmod(positions, block_size)
        self.slots[:n] = table[row_of, block]
        self.slots[:n] *= block_size
        self.slots[:n] += within


class Queries(Rows):
    """Rows of attention: each has some queries side by side, which all see the same positions."""

    def __init__(self, room: int, same: Rows | None = None, per_row: int = 1) -> None:
        """per_row: queries of each, unless ``ask`` says otherwise."""
        super().__init__(room, same)
        self._starts = (per_row * np.arange(room + 1)).astype(np.int32)  # prefix sums of their numbers
        self._seen = self.numbers(np.int32)  # the last position that is seen
        self._args: list[native.AttentionArgs] = []
        self._table = np.zeros((1, 1), np.int32)

    def ask(
        self,
        seen: NDArray[np.integer],
        table: NDArray[np.int32],
        lens: NDArray[np.integer] | None = None,
    ) -> None:
        """Set how many there are and what they see.  seen, lens: [n]; table: [n, max_blocks]"""
        self.count = n = len(seen)
        self._seen[:n] = seen
        if lens is not None:
            np.cumsum(lens, out=self._starts[1 : n + 1])
        self._table = np.ascontiguousarray(table)
        for args in self._args:
            args.block_table, args.max_blocks = self._table.ctypes.data, table.shape[1]

    def attend(
        self, program: Program, pool: KVPool, layer: int, attention: PackedAttention, query: Tensor
    ) -> Tensor:
        """Record attention.  query: [num_queries, at least num_heads * head_dim] -> [num_queries, ...]"""
        heads, dim = attention.num_heads, attention.head_dim
        starts, seen, table = (torch.from_numpy(each) for each in (self._starts, self._seen, self._table))
        batch = PackedBatch(query, query, query, starts, seen, table, query)
        args = attention_args(batch, heads, pool.keys[layer], pool.values[layer], dim**-0.5)
        out = torch.empty(len(query), heads * dim, dtype=torch.bfloat16)
        args.query, args.query_stride, args.out = query.data_ptr(), query.stride(0), out.data_ptr()
        args.bidirectional = 1
        self._args.append(args)
        program.attention(self, args)
        program.keep(query, out, starts, seen)
        return out


def record_keys(
    program: Program,
    tokens: Tokens,
    pool: KVPool,
    cos_sin: Tensor,
    layer: int,
    attention: PackedAttention,
    linear: PackedLinear,
    x: Tensor,
) -> Tensor:
    """The first half: project, rotate, and store keys and values.

    linear: of queries, keys and values, or of keys and values only; x: [room, its input]
    -> its output, the queries rotated.
    """
    qkv = program.linear(tokens, linear, x)
    kv_heads = 2 * attention.num_kv_heads
    args = rope_args(
        pool, layer, cos_sin, qkv, linear.out_features // attention.head_dim - kv_heads, attention
    )
    args.positions, args.slot_mapping = tokens.positions.ctypes.data, tokens.slots.ctypes.data
    program.rope(tokens, args)
    program.keep(cos_sin, pool)
    return qkv


def record_output(
    program: Program, rows: Rows, layer: DecoderLayer | nn.Module, attended: Tensor, residual: Tensor
) -> Tensor:
    """The second half, behind attention: its output projection and the MLP.

    attended: [room, num_heads * head_dim]; residual: [room, hidden], to which attention is added
    -> the output of the MLP, which is still to be added to it.
    """
    attention, mlp = cast(PackedAttention, layer.self_attn), cast(PackedSwiGLU, layer.mlp)
    delta = program.linear(rows, attention.out, attended)
    normed = rows.tensor(residual.shape[1])
    program.rows(rows, delta, normed, norm=norm_of(layer.post_attention_layernorm), residual=residual)
    return program.linear(rows, mlp.down, program.linear(rows, mlp.gate_up, normed))


def norm_of(module: object) -> Norm:
    """A packed norm as a program takes it."""
    norm = cast(PackedNorm, module)
    return Norm(cast(Tensor, norm.weight), norm.eps)


def can_record(network: nn.Module, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a program can compute a packed network: bf16 on the CPU, with layers of the kernels' kinds."""
    parameters = [*network.parameters(), *network.buffers()]
    on_cpu = all(each.device.type == "cpu" for each in parameters)
    if not on_cpu or dtype != torch.bfloat16 or not native.supports(dtype, torch.device("cpu"), head_dim):
        return False
    for module in network.modules():
        if isinstance(module, (PackedMixture, MarkovHead, ConfidenceHead)):
            return False
        if isinstance(module, PackedLinear) and not supports(module):
            return False
    return True


def enlarged(rooms: tuple[int, ...], needed: tuple[int, ...]) -> tuple[int, ...]:
    """Rooms that are large enough; powers of two, so that they do not grow often."""
    return tuple(
        room if need <= room else 1 << (need - 1).bit_length()
        for room, need in zip(rooms, needed, strict=True)
    )
