"""What flash attention is called with, checked by its signature in plain torch; its kernels need a GPU."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from angelspec_backend.engine import attention, flash_attention
from angelspec_backend.engine.attention import torch_paged_attention
from angelspec_backend.engine.flash_attention import flash_paged_attention, flash_supports
from test_attention import make_case

varlen = pytest.importorskip("torch.nn.attention.varlen")
SIGNATURE = inspect.signature(varlen.varlen_attn)


def emulated(*args, **kwargs) -> Tensor:
    """varlen_attn over a block table by its documentation, with what its kernels check; in fp32."""
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    query, key, value, starts, table, used = (
        a[name] for name in ("query", "key", "value", "cu_seq_q", "block_table", "seqused_k")
    )
    _, page, num_kv_heads, dim = key.shape
    num_rows, pages = table.shape
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (starts, table, used))
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert starts.shape == (num_rows + 1,)
    assert used.shape == (num_rows,)
    assert a["max_k"] == pages * page >= int(used.max())
    assert a["max_q"] == int(starts.diff().max())
    if flash_attention._implementation() == "FA2":
        assert page % 256 == 0
        assert a["cu_seq_k"].dtype == torch.int32
        assert a["cu_seq_k"].tolist() == [row * pages * page for row in range(num_rows + 1)]
    else:
        assert a["cu_seq_k"] is None
    if a["max_q"] == 1:  # then the kernel counts tokens by rows
        assert len(query) == num_rows
    group = query.shape[1] // num_kv_heads
    assert a["enable_gqa"] == (group > 1)
    left, right = a["window_size"]
    assert right == 0
    out = torch.full_like(query, float("nan"))
    for row in range(num_rows):
        first, last = int(starts[row]), int(starts[row + 1])
        keys, values = (
            each[table[row].long()].reshape(-1, num_kv_heads, dim)[: used[row]].repeat_interleave(group, 1)
            for each in (key, value)
        )
        back = used[row] - last + torch.arange(first, last)[:, None] - torch.arange(int(used[row]))
        visible = (back >= 0) & ((left < 0) | (back <= left))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys.float()) * a["scale"]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)
    return out


@pytest.fixture(params=["FA2", "FA3"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(varlen, "varlen_attn", emulated)
    monkeypatch.setattr(flash_attention, "_implementation", lambda: request.param)
    flash_attention._works.cache_clear()
    yield request.param
    flash_attention._works.cache_clear()


def with_lengths(case):
    lens = case.batch.query_start.diff()
    num_used = int(case.batch.query_start[-1])
    return replace(case, batch=replace(case.batch, max_query=int(lens.max()), num_used=num_used))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=4),
    heads=st.sampled_from([(6, 2), (4, 4), (8, 1)]),
    window=st.sampled_from([0, 0, 1, 40]),
    impl=st.sampled_from([("FA2", 256), ("FA3", 16), ("FA3", 256)]),
)
def test_its_arguments_mean_our_attention(rows, heads, window, impl):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", emulated)
        patch.setattr(flash_attention, "_implementation", lambda: impl[0])
        case = with_lengths(make_case(rows, heads=heads, block_size=impl[1], sliding_window=window))
        found, expected = case.attend(flash_paged_attention), case.attend(torch_paged_attention)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_token_of_no_row_gets_zeros(implementation):
    case = with_lengths(make_case([(20, 1)], block_size=256))
    padded = torch.cat([case.query, torch.full_like(case.query, float("nan"))])
    out = replace(case, query=padded).attend(flash_paged_attention)
    torch.testing.assert_close(out[:1], case.attend(torch_paged_attention), rtol=1e-4, atol=1e-4)
    assert not out[1:].any()


def test_it_is_tried_before_it_is_trusted(implementation, monkeypatch):
    def supported(
        block_size: int, dtype: torch.dtype = torch.bfloat16, dims: tuple[int, int] = (64, 64)
    ) -> bool:
        case = make_case([(20, 1)], dtype, dims=dims, block_size=block_size)
        return flash_supports(case.query, case.keys, case.values)

    assert supported(256)
    assert supported(16) == (implementation == "FA3")
    assert not supported(256, torch.float32)
    assert not supported(256, dims=(64, 32))
    for broken in (lambda *a, **k: emulated(*a, **k) + 1, lambda query: query):
        flash_attention._works.cache_clear()
        monkeypatch.setattr(varlen, "varlen_attn", broken)
        assert not supported(256)


def test_softcap_and_sinks_are_refused(implementation):
    for options in ({"softcap": 3.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="no softcap"):
            make_case([(20, 1)], block_size=256, **options).attend(flash_paged_attention)


def test_the_cpu_and_batch_invariant_engines_never_take_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(attention, "flash_paged_attention", refuse)
    monkeypatch.setattr(attention, "flash_supports", lambda *args: True)
    case = make_case([(20, 3)])
    for batch_invariant in (False, True):
        replace(case, options=case.options | {"batch_invariant": batch_invariant}).attend()
