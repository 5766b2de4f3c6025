"""Steps padded to the shapes of CUDA graphs, and the graphs' bookkeeping, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine import batch as batch_module
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.cuda_graphs import CudaGraphs
from angelspec_backend.engine.graph_shapes import GraphShapes, round_up
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.upload import ALIGNMENT, join, split
from families import COMMON, tiny_model

BLOCK_SIZE, PER_ROW, MAX_ROWS = 4, 12, 9
NUM_BLOCKS = 1 + MAX_ROWS * PER_ROW
SHAPES = GraphShapes(BLOCK_SIZE, max_context=256, max_tokens=84)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return ModelRunner(
        tiny_model(request.param), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, fused=request.param == "gpt2"
    )


def verify_step(rng: np.random.Generator, num_rows: int, num_drafts: int):
    """Arguments of ``pack``: rows at any place of their text, each with as many drafts."""
    rows = np.zeros(num_rows, ROW)
    rows["num_tokens"], rows["sample"] = 1, 1
    rows["num_computed"] = rng.integers(0, PER_ROW * BLOCK_SIZE - num_drafts, num_rows)
    rows["num_blocks"] = -(-(rows["num_computed"] + 1 + num_drafts) // BLOCK_SIZE)
    table = [1 + row * PER_ROW + np.arange(count) for row, count in enumerate(rows["num_blocks"])]
    ids = rng.integers(0, COMMON["vocab_size"], num_rows * (1 + num_drafts)).astype(np.int32)
    drafts = DraftOutput.of(ids[num_rows:], np.full(num_rows, num_drafts, np.int32))
    return rows, ids[:num_rows], drafts, np.concatenate(table).astype(np.int32), BLOCK_SIZE


def test_row_counts_are_rounded_up_a_little():
    counts = [round_up(count) for count in range(1, 65)]
    assert all(count <= rounded <= 1.5 * count for count, rounded in enumerate(counts, 1))
    assert sorted(set(counts)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, MAX_ROWS), st.integers(0, 6), st.integers(0, 99))
def test_padding_leaves_the_bits_of_every_row(runner, num_rows, num_drafts, seed):
    step = verify_step(np.random.default_rng(seed), num_rows, num_drafts)
    expected = runner.forward(pack(*step))
    padded = pack(*step, shapes=SHAPES)
    assert padded.graph_shape is not None
    assert torch.equal(runner.forward(padded), expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, MAX_ROWS), st.integers(0, 6), st.integers(0, 99))
def test_a_padded_batch_has_its_shape_and_touches_nothing_but_the_null_block(num_rows, num_drafts, seed):
    step = verify_step(np.random.default_rng(seed), num_rows, num_drafts)
    plain, padded = pack(*step), pack(*step, shapes=SHAPES)
    shape, used = padded.graph_shape, num_rows * (1 + num_drafts)
    assert (shape.tokens_per_row, padded.num_used, padded.max_query) == (1 + num_drafts, used, 1 + num_drafts)
    assert padded.block_table.shape == (shape.num_rows, shape.max_blocks)
    lens = padded.query_start.diff()
    assert lens.tolist() == [shape.tokens_per_row] * shape.num_rows
    for own, bare in zip(padded.tensors(), plain.tensors(), strict=True):
        assert own.dtype == bare.dtype
    width = plain.block_table.shape[1]
    assert torch.equal(padded.block_table[:num_rows, :width], plain.block_table)
    assert not padded.block_table[num_rows:].any()
    assert not padded.block_table[:, width:].any()
    for name in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(padded, name)[:used], getattr(plain, name)[:used])
        assert not getattr(padded, name)[used:].any()
    assert not padded.context_lens[num_rows:].any()


def test_steps_of_other_kinds_are_not_padded():
    def fits(**changes) -> bool:
        rows, _, drafts, *_ = verify_step(np.random.default_rng(0), 4, 2)
        for name, value in changes.items():
            (drafts.lens if name == "lens" else rows[name])[1] = value
        return SHAPES.fit(rows, drafts.lens) is not None

    assert fits()
    assert not fits(num_tokens=5)
    assert not fits(sample=0)
    assert not fits(lens=1)
    rows, _, drafts, *_ = verify_step(np.random.default_rng(0), 9, 6)
    assert SHAPES.fit(rows, drafts.lens).num_tokens == 84
    assert replace(SHAPES, max_tokens=83).fit(rows, drafts.lens) is None
    assert SHAPES.fit(rows[:0], drafts.lens[:0]) is None


def test_few_shapes_cover_all_steps_of_an_engine():
    shapes, found = GraphShapes(16, max_context=8000), set()
    for num_rows in range(1, 65):
        rows = np.zeros(num_rows, ROW)
        rows["num_tokens"] = rows["sample"] = 1
        for blocks in range(1, 501):
            rows["num_blocks"] = blocks
            found.add(shapes.fit(rows, np.full(num_rows, 4, np.int32)))
    assert len(found) <= 12 * 6
    assert max(shape.max_blocks for shape in found) == 500


def test_arrays_joined_for_one_copy_come_apart_again():
    tensors = [torch.arange(3), torch.zeros(0, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int32)]
    parts = split(join(tensors), tensors)
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    assert all(part.data_ptr() % ALIGNMENT == 0 for part in parts if part.numel())


def upload_joined(arrays, device):
    """What ``upload`` does on a GPU."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return split(join(tensors), tensors)


def test_replayed_steps_equal_steps_run_one_by_one(runner, monkeypatch):
    monkeypatch.setattr(batch_module, "upload", upload_joined)
    runs = []

    def forward(batch, taps):
        runs.append(batch.graph_shape)
        return runner.network.forward_with_taps(batch, runner.pool, taps)

    graphs = CudaGraphs(
        forward, SHAPES, capture=lambda work: work
    )  # a replay is the same work on the same memory
    rng, taps, shapes = np.random.default_rng(0), (0, 2), []
    for num_rows, num_drafts in [(3, 2), (3, 2), (5, 0), (3, 2), (6, 0), (1, 5), (2, 3), (5, 0)]:
        step = verify_step(rng, num_rows, num_drafts)
        batch = pack(*step, shapes=graphs.shapes)
        logits, states = graphs.run(batch, taps)
        results = [each[: batch.num_used].clone() for each in (logits, *states)]
        expected, hidden = runner.forward_with_taps(pack(*step), taps)
        for result, wanted in zip(
            results, (expected, *(each[: batch.num_used] for each in hidden)), strict=True
        ):
            assert torch.equal(result, wanted)
        shapes.append(batch.graph_shape)
    assert runs == shapes


def test_a_model_that_cannot_be_captured_runs_on_without_graphs(runner, monkeypatch, caplog):
    monkeypatch.setattr(batch_module, "upload", upload_joined)

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    graphs = CudaGraphs(runner._eager, SHAPES, capture=refuse)
    step = verify_step(np.random.default_rng(0), 3, 2)
    logits, _ = graphs.run(pack(*step, shapes=graphs.shapes), ())
    assert torch.equal(logits[:9], runner.forward(pack(*step)))
    assert graphs.shapes is None
    assert "cannot be captured: operation not permitted when stream is capturing" in caplog.text
