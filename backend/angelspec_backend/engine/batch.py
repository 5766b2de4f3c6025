"""One engine step as a packed ragged batch: prefill, decode and verify are the same thing.

Every row brings some tokens to compute, behind those its draft tokens, and all rows lie one after
the other in flat arrays.  What a row is (a prompt chunk, one token, one token and k drafts) is
visible only in its lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput, RowRanges, StepInput
from angelspec_backend.engine.graph_shapes import GraphShape, GraphShapes
from angelspec_backend.engine.linear import padded_rows
from angelspec_backend.engine.upload import upload


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of a step and where their keys and values go, on the model's device."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset where this token's K/V is written
    query_start: Tensor  # [num_rows + 1] int32, prefix sums of the rows' token counts
    context_lens: Tensor  # [num_rows] int32, tokens before the row's first query (its position)
    block_table: Tensor  # [num_rows, max_blocks] int32, padded with 0
    logits_index: Tensor  # [num_logits] int64, where in the batch logits are wanted
    max_query: int = 0  # tokens of the longest row
    graph_shape: GraphShape | None = None  # what the batch was padded to, with rows of the null block
    num_used: int | None = None  # the tokens that are not padding, the first ones; None: all

    def tensors(self) -> list[Tensor]:
        """Its tensors, in the order of the fields."""
        ends = [self.query_start, self.context_lens, self.block_table, self.logits_index]
        return [self.token_ids, self.positions, self.slot_mapping, *ends]

    @staticmethod
    def of(
        tensors: list[Tensor],
        max_query: int,
        graph_shape: GraphShape | None = None,
        num_used: int | None = None,
    ) -> PackedBatch:
        """A batch of tensors in the order of ``tensors``."""
        ids, positions, slots, starts, context, table, wanted = tensors
        return PackedBatch(
            ids, positions, slots, starts, context, table, wanted, max_query, graph_shape, num_used
        )

    def with_tensors(self, tensors: list[Tensor]) -> PackedBatch:
        """The same with other tensors, in the order of ``tensors``."""
        return self.of(tensors, self.max_query, self.graph_shape, self.num_used)


def pack(
    rows: NDArray[np.void],
    token_ids: NDArray[np.int32],
    drafts: DraftOutput,
    block_table: NDArray[np.int32],
    block_size: int,
    device: torch.device | str = "cpu",
    shapes: GraphShapes | None = None,
) -> PackedBatch:
    """Lay a step out as one batch: per row its known tokens, then its draft tokens.

    Logits are wanted at the last known token and at every draft of each sampling row.  The batch is
    padded to a row count of linear layers with dummies that belong to no row and write to the null block.
    A step that fits one of ``shapes`` is padded to it, with rows that read and write the null block.

    rows: [num_rows] of ROW; token_ids: [sum(num_tokens)]; drafts: per row; block_table: [sum(num_blocks)].
    The arguments must be consistent, see ``check_step``.
    """
    shape = shapes.fit(rows, drafts.lens) if shapes else None
    known = rows["num_tokens"].astype(np.int64)  # [num_rows]
    lens = known + drafts.lens  # [num_rows]
    query_start = np.concatenate([[0], np.cumsum(lens)])  # [num_rows + 1]
    num_tokens = int(query_start[-1])
    row_of, offset = ragged(lens)  # [num_tokens] twice: its row, and its index within the row
    known_of = known[row_of]

    size = shape.num_tokens if shape else padded_rows(num_tokens)
    ids = np.zeros(size, np.int64)
    positions = np.zeros_like(ids)
    slots = np.zeros_like(ids)
    is_draft = np.zeros(size, bool)
    is_draft[:num_tokens] = offset >= known_of
    ids[:num_tokens][~is_draft[:num_tokens]] = token_ids
    ids[is_draft] = drafts.token_ids
    positions[:num_tokens] = rows["num_computed"].astype(np.int64)[row_of] + offset

    table = pad_block_table(block_table, rows["num_blocks"])
    block, within = np.divmod(positions[:num_tokens], block_size)
    slots[:num_tokens] = table[row_of, block].astype(np.int64) * block_size + within
    wanted = np.flatnonzero((offset >= known_of - 1) & (rows["sample"][row_of] == 1))
    context = rows["num_computed"].astype(np.int32)
    if shape:
        missing = shape.num_rows - len(rows)
        query_start = np.arange(shape.num_rows + 1) * shape.tokens_per_row
        context = np.pad(context, (0, missing))
        table = np.pad(table, ((0, missing), (0, shape.max_blocks - table.shape[1])))
        wanted = np.arange(size)
    starts = query_start.astype(np.int32)
    on_device = upload([ids, positions, slots, starts, context, table, wanted], device)
    return PackedBatch.of(on_device, int(lens.max(initial=0)), shape, num_tokens)


def ragged(lens: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and index within the row of every entry of a ragged array.  [num_rows] -> [sum(lens)] twice."""
    row_of = np.repeat(np.arange(len(lens)), lens)
    return row_of, np.arange(len(row_of)) - np.repeat(np.cumsum(lens) - lens, lens)


def pad_block_table(block_table: NDArray[np.int32], num_blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """The ragged block table as a matrix, padded with 0.

    block_table: [sum(num_blocks)]; num_blocks: [num_rows] -> [num_rows, max(num_blocks)]
    """
    width = max(int(num_blocks.max(initial=0)), 1)
    table = np.zeros((len(num_blocks), width), np.int32)
    table[np.arange(width) < num_blocks[:, None]] = block_table
    return table


def check_step(
    step: StepInput,
    drafts: DraftOutput,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    max_context: int,
    num_layers: int,
) -> None:
    """Refuse a step whose arrays contradict each other or point outside the model or the KV pool.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """
    rows = step.rows
    if rows.dtype != ROW or rows.ndim != 1:
        raise ValueError(f"rows: expected [num_rows] of ROW, got {rows.dtype} of shape {rows.shape}")
    ranges = RowRanges(rows)
    for name, low, high in (
        ("num_tokens", 1, max_context),
        ("num_computed", 0, max_context - 1),
        ("num_blocks", 1, num_blocks - 1),
        ("sample", 0, 1),
        ("num_taps", 0, num_layers),
    ):
        if ranges.outside(name, low, high):
            _check_range(name, rows[name], low, high)
    _check_sum("token_ids", step.token_ids, "num_tokens", ranges.total("num_tokens"))
    _check_sum("block_table", step.block_table, "num_blocks", ranges.total("num_blocks"))
    _check_range("token_ids", step.token_ids, 0, vocab_size - 1)
    _check_range("block_table", step.block_table, 1, num_blocks - 1)
    _check_sum("tap_ids", step.tap_ids, "num_taps", ranges.total("num_taps"))
    _check_taps(step, num_layers)

    if drafts.lens.shape != rows.shape:
        raise ValueError(f"draft lens: expected one per row ({len(rows)}), got shape {drafts.lens.shape}")
    allowed = np.where(rows["sample"] == 1, np.maximum(rows["num_draft_tokens"], 0), 0)
    for row in ((drafts.lens < 0) | (drafts.lens > allowed)).nonzero()[0][:1]:
        raise ValueError(f"draft lens: row {row} has {drafts.lens[row]} drafts, allowed: 0 to {allowed[row]}")
    _check_sum("draft token_ids", drafts.token_ids, "draft lens", int(drafts.lens.sum(dtype=np.int64)))
    _check_range("draft token_ids", drafts.token_ids, 0, vocab_size - 1)

    end = rows["num_computed"].astype(np.int64) + rows["num_tokens"] + drafts.lens
    room = np.minimum(rows["num_blocks"].astype(np.int64) * block_size, max_context)
    for row in (end > room).nonzero()[0][:1]:
        raise ValueError(
            f"row {row} reaches position {end[row] - 1}, but its {rows['num_blocks'][row]} blocks of "
            f"{block_size} and the context of {max_context} allow at most {room[row] - 1}"
        )


def _check_taps(step: StepInput, num_layers: int) -> None:
    if len(step.tap_ids) == 0:
        return
    _check_range("tap_ids", step.tap_ids, 0, num_layers - 1)
    ends = np.cumsum(step.rows["num_taps"])  # [num_rows]
    falls = step.tap_ids[1:] <= step.tap_ids[:-1]  # entry i + 1 is not above entry i
    falls[ends[(ends > 0) & (ends < len(step.tap_ids))] - 1] = False  # it begins a row
    for entry in falls.nonzero()[0][:1]:
        row = np.searchsorted(ends, entry, side="right")
        raise ValueError(f"tap_ids: those of row {row} are not ascending")


def _check_range(name: str, values: NDArray, low: int, high: int) -> None:
    for index in ((values < low) | (values > high)).nonzero()[0][:1]:
        raise ValueError(f"{name}: entry {index} is {values[index]}, allowed: {low} to {high}")


def _check_sum(name: str, flat: NDArray, lens_name: str, total: int) -> None:
    if flat.shape != (total,):
        raise ValueError(f"{name}: expected {total} entries (the sum of {lens_name}), got shape {flat.shape}")
