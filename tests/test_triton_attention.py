"""The GPU's attention kernels: on a GPU where there is one, else by triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from angelspec_backend.engine.attention import torch_paged_attention
from angelspec_backend.engine.runner import ModelRunner
from families import tiny_model
from test_attention import DTYPES, Case, make_case
from traces import Piece, batch_of, random_tables

pytest.importorskip("triton")
from angelspec_backend.engine import hf_attention, triton_attention
from angelspec_backend.engine.triton_attention import SPLIT, triton_paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attend(case: Case) -> Tensor:
    """The kernel's result, on the CPU."""
    moved = case.batch.with_tensors([tensor.to(DEVICE) for tensor in case.batch.tensors()])
    options = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.options.items()}
    tensors = (case.query.to(DEVICE), case.keys.to(DEVICE), case.values.to(DEVICE))
    return Case(*tensors, moved, options).attend(triton_paged_attention).cpu()


def assert_close(out: Tensor, expected: Tensor) -> None:
    # In bf16 the weights of the softmax are rounded too, so a sum that cancels keeps an absolute error.
    rtol, atol = (1.6e-2, 2e-2) if out.dtype == torch.bfloat16 else (1e-5, 2e-5)
    torch.testing.assert_close(out.double(), expected.double(), rtol=rtol, atol=atol)


row = st.tuples(
    st.integers(0, 70) | st.sampled_from([63, 64, SPLIT - 1, SPLIT, SPLIT + 50]),
    st.sampled_from([1, 1, 2, 5, 9, 20]),
)
cases = st.builds(
    make_case,
    rows=st.lists(row, min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (8, 1), (20, 1)]),
    dims=st.sampled_from([(8, 8), (40, 40), (64, 64), (24, 16), (128, 128), (256, 256)]),
    block_size=st.sampled_from([1, 7, 16, 100]),
    sinks=st.booleans(),
    sliding_window=st.sampled_from([0, 0, 1, 7, 64, 130]),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    seed=st.integers(0, 99),
)


@settings(max_examples=15, deadline=None)
@given(cases)
def test_the_kernel_agrees_with_torch_on_ragged_batches(case):
    assert_close(attend(case), case.attend(torch_paged_attention))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 130])
def test_each_query_of_a_long_row_gets_alone_what_it_gets_beside_the_others(window, dtype):
    case = make_case([(2 * SPLIT + 40, 9)], dtype, (2, 1), (16, 16), sliding_window=window)
    whole = attend(case)
    assert_close(whole, case.attend(torch_paged_attention))
    for query in range(9):
        assert torch.equal(attend(case.take((0, query, query + 1)))[0], whole[query])


@settings(max_examples=10, deadline=None)
@given(case=cases, data=st.data())
def test_a_query_is_the_same_to_the_bit_alone_and_in_any_batch(case, data):
    whole = attend(case)
    starts = case.batch.query_start.tolist()
    picks = []
    for _ in range(2):
        row = data.draw(st.integers(0, len(starts) - 2))
        start = data.draw(st.integers(0, starts[row + 1] - starts[row] - 1))
        picks.append((row, start, data.draw(st.integers(start + 1, starts[row + 1] - starts[row]))))
    row, start, _ = picks[0]
    alone = attend(case.take((row, start, start + 1)))
    assert torch.equal(alone[0], whole[starts[row] + start])
    expected = torch.cat([whole[starts[row] + start : starts[row] + end] for row, start, end in picks])
    assert torch.equal(attend(case.take(*picks)), expected)


def test_a_longer_table_and_less_memory_change_nothing(monkeypatch):
    case = make_case([(SPLIT + 40, 9), (0, 1), (30, 20)], sinks=True)
    expected = attend(case)
    table = torch.nn.functional.pad(case.batch.block_table, (0, 70))
    assert torch.equal(attend(replace(case, batch=replace(case.batch, block_table=table))), expected)
    monkeypatch.setattr(triton_attention, "MAX_PARTIAL_BYTES", 1)  # one tile per launch
    assert torch.equal(attend(case), expected)


def test_queries_inside_a_fused_matrix_and_tokens_of_no_row():
    case = make_case([(20, 1), (3, 4)])
    query = torch.randn(7, 6 * 64 + 100)[:, : 6 * 64].view(7, 6, 64)
    query[:5] = case.query
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    batch = replace(case.batch, token_ids=torch.zeros(7, dtype=torch.int64))
    for layout in (query, heads_first):
        out = attend(replace(case, query=layout, batch=batch))
        assert torch.equal(out[:5], attend(case))
        assert not out[5:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_give_finite_results(dtype):
    case = make_case([(100, 3)], dtype)
    for factor in (1e-20, 1e4):
        out = attend(replace(case, query=case.query * factor))
        assert out.isfinite().all()
        assert out.abs().max() <= case.values.abs().max() * 1.01


@pytest.mark.skipif(DEVICE.type == "cuda", reason="paged_attention uses it there")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_run_on_it(family, monkeypatch):
    def attend(*args, batch_invariant, **options):
        return triton_paged_attention(*args, **options)

    monkeypatch.setattr(hf_attention, "paged_attention", attend)
    tokens = np.random.default_rng(0).integers(3, 190, 12)
    with torch.inference_mode():
        expected = tiny_model(family)(torch.from_numpy(tokens[None]), use_cache=False).logits[0]
    runner = ModelRunner(tiny_model(family), num_blocks=32, block_size=4)
    assert runner.batch_invariant
    tables = random_tables(np.random.default_rng(0), 1, 12, 4, 32)
    pieces = (Piece(0, 0, tokens[:7]), Piece(0, 7, tokens[7:8]), Piece(0, 8, tokens[8:], drafts=3))
    for piece in pieces:  # prefill, decode, verify
        logits = runner.forward(batch_of([piece], tables, 4))
        worst = (logits - expected[list(piece.logit_positions)]).abs().max()
        assert worst < 2e-5 * expected.abs().max()
