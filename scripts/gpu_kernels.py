"""Checks of the GPU's kernels, each against a reference and against itself in another batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine.attention import Attention, paged_attention
from angelspec_backend.engine.batch import PackedBatch, pack
from angelspec_backend.engine.flash_attention import FA2_BLOCK, flash_paged_attention, flash_supports
from angelspec_backend.engine.torch_attention import sdpa_paged_attention, torch_paged_attention
from benchmark_steps import median_seconds
from gpu_steps import synchronized

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference to the reference, of values that are standard normal."""
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 100}, {"softcap": 30.0}, {"sinks": True})


@dataclass(frozen=True)
class Case:
    """Random caches and queries, and the rows that attend: (tokens before, queries)."""

    rows: tuple[tuple[int, int], ...]
    query: Tensor  # [num_tokens, num_heads, dim]
    keys: Tensor  # [num_blocks, num_kv_heads, block_size, dim]
    values: Tensor

    def batch(self) -> PackedBatch:
        """The rows' queries as a batch; row r owns the blocks 1 + r * width ..."""
        block_size = self.keys.shape[2]
        width = -(-max(context + count for context, count in self.rows) // block_size)
        records = np.zeros(len(self.rows), ROW)
        records["num_computed"], records["num_tokens"] = np.array(self.rows).T
        records["num_blocks"] = width
        table = 1 + np.arange(len(self.rows) * width, dtype=np.int32)
        ids = np.zeros(records["num_tokens"].sum(), np.int32)
        return pack(records, ids, DraftOutput.empty(len(records)), table, block_size, self.query.device)

    def attend(self, function: Attention, **options: Any) -> Tensor:
        """[num_tokens, num_heads, dim]"""
        sinks = torch.linspace(-2, 2, self.query.shape[1], device=self.query.device)
        given = options | ({"sinks": sinks} if options.get("sinks") else {})
        return function(
            self.query, self.keys, self.values, self.batch(), self.query.shape[2] ** -0.5, **given
        )


def make_case(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    device: str,
    block_size: int,
) -> Case:
    """heads: (query, key/value)."""
    torch.manual_seed(0)
    width = -(-max(context + count for context, count in rows) // block_size)
    cache = (1 + len(rows) * width, heads[1], block_size, dim)
    tokens = sum(count for _, count in rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return Case(tuple(rows), normal(tokens, heads[0], dim), normal(*cache), normal(*cache))


def check_attention(
    device: str,
    rows: Sequence[tuple[int, int]],
    dims: Sequence[int] = (64, 80, 128, 256),
    block_sizes: Sequence[int] = (16, FA2_BLOCK),
    repeats: int = 10,
) -> list[dict[str, Any]]:
    """Every implementation against the reference, the first query alone against in the batch, and times.

    rows: (tokens before, queries) of at least two rows.
    """
    results = []
    shapes = itertools.product(((9, 3), (8, 1)), dims, TOLERANCE, block_sizes, VARIANTS)
    for heads, dim, dtype, block_size, variant in shapes:
        case = make_case(rows, heads, dim, dtype, device, block_size)
        expected = case.attend(torch_paged_attention, **variant).float()
        for name, function in _implementations(case, variant).items():
            out = case.attend(function, **variant)
            error = float((out.float() - expected).abs().max())
            run = synchronized(lambda c=case, f=function, v=variant: c.attend(f, **v), device)  # type: ignore[misc]
            results.append(
                {
                    "implementation": name,
                    "heads": heads,
                    "head_dim": dim,
                    "block_size": block_size,
                    "dtype": str(dtype).removeprefix("torch."),
                    **variant,
                    "largest_error": error,
                    "agrees": error <= TOLERANCE[dtype],
                    "batch_invariant": torch.equal(_first_alone(case, function, variant), out[0]),
                    "ms": median_seconds([run], repeats)[0] * 1e3,
                }
            )
    return results


def _implementations(case: Case, variant: dict[str, Any]) -> dict[str, Attention]:
    """What can compute a variant here."""
    found: dict[str, Attention] = {"default": paged_attention}
    if not variant.keys() & {"softcap", "sinks"}:
        found["sdpa"] = sdpa_paged_attention
        if case.query.is_cuda and flash_supports(case.query, case.keys, case.values):
            found["flash"] = flash_paged_attention
    return found


def _first_alone(case: Case, function: Attention, variant: dict[str, Any]) -> Tensor:
    """What the batch's first query gets without the others.  [num_heads, dim]"""
    # A batch of one token is padded to two, the second of no row.
    alone = replace(case, rows=((case.rows[0][0], 1),), query=case.query[:2])
    return alone.attend(function, **variant)[0]


def check_products(
    device: str,
    sizes: Sequence[tuple[int, int]] = ((576, 576), (4096, 4096), (12288, 4096), (32000, 2048)),
    counts: Sequence[int] = (1, 2, 8, 64, 65, 512),
    repeats: int = 20,
) -> list[dict[str, Any]]:
    """The products of one fixed order: right, the same to the bit for any row count, and their price.

    sizes: (outputs, inputs) of weights; counts: rows.
    """
    from angelspec_backend.engine.triton_linear import fixed_order_linear  # there is no triton everywhere

    results = []
    for (outputs, inputs), dtype in itertools.product(sizes, TOLERANCE):
        torch.manual_seed(0)
        x = torch.randn(max(counts), inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
        whole = fixed_order_linear(x, weight)
        error = float((whole.float() - F.linear(x.double(), weight.double()).float()).abs().max())
        same = all(torch.equal(fixed_order_linear(x[:count], weight), whole[:count]) for count in counts)
        times = {}
        for count in counts:
            calls = [
                synchronized(lambda f=function, n=count: f(x[:n], weight), device)  # type: ignore[misc]  # noqa: B023
                for function in (fixed_order_linear, F.linear)
            ]
            ours, torchs = median_seconds(calls, repeats)
            times[str(count)] = {"ms": ours * 1e3, "torch_ms": torchs * 1e3}
        results.append(
            {
                "weight": (outputs, inputs),
                "dtype": str(dtype).removeprefix("torch."),
                "largest_error": error,
                "agrees": error <= TOLERANCE[dtype],
                "batch_invariant": same,
                "rows": times,
            }
        )
    return results
