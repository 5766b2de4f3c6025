"""The GPU's products and sums of one fixed order: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from angelspec_backend.engine import hf_model
from angelspec_backend.engine.row_independent import FixedOrder
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.triton_linear import fixed_order_linear, fixed_order_sum
from families import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(33, 40), (96, 576), (130, 31)])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (70,)])
def test_it_is_a_linear_layer_for_inputs_of_any_shape(shape, sizes, dtype, bias):
    weight, x = normal(*sizes, dtype=dtype), normal(*shape, sizes[1], dtype=dtype)
    offset = normal(sizes[0], dtype=dtype) if bias else None
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    found = fixed_order_linear(x, weight, offset)
    assert found.dtype == dtype
    rtol, atol = (8e-3, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_for_any_number_of_rows(dtype):
    weight, x = normal(96, 200, dtype=dtype), normal(200, 200, dtype=dtype)
    whole = fixed_order_linear(x, weight)
    for count in (1, 2, 3, 16, 17, 63, 64, 65, 129):
        start = (count * 37) % (201 - count)
        assert torch.equal(fixed_order_linear(x[start : start + count], weight), whole[start : start + count])


def test_neighbouring_rows_do_not_matter_even_when_not_finite():
    weight, x = normal(40, 64), normal(20, 64)
    expected = fixed_order_linear(x, weight)
    x[3], x[7] = float("nan"), float("inf")
    keep = [row for row in range(20) if row not in (3, 7)]
    assert torch.equal(fixed_order_linear(x, weight)[keep], expected[keep])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 31, 1024, 2500])
def test_sums_and_means_of_rows(columns, dtype):
    x = normal(4, 3, columns, dtype=dtype)
    tolerance = {"rtol": 8e-3, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    whole = fixed_order_sum(x)
    torch.testing.assert_close(whole.double(), x.double().sum(-1), **tolerance)
    mean = fixed_order_sum(x, keepdim=True, mean=True)
    torch.testing.assert_close(mean.double(), x.double().mean(-1, keepdim=True), **tolerance)
    assert torch.equal(fixed_order_sum(x[1, 2]), whole[1, 2])


def test_only_products_of_weights_and_sums_along_rows_are_replaced():
    x, weight = normal(3, 40), normal(33, 40)
    ours, mean, total = fixed_order_linear(x, weight), fixed_order_sum(x, mean=True), fixed_order_sum(x)
    with FixedOrder(DEVICE.type):
        for same in (F.linear(x, weight), F.linear(x, weight=weight, bias=None), x @ weight.t()):
            assert torch.equal(same, ours)
        assert torch.equal(x.mean(-1), mean)
        assert torch.equal(torch.mean(x, dim=1, keepdim=True), mean[:, None])
        assert torch.equal(x.sum(dim=(-1,)), total)
        results = (
            x.mean(0),
            x.sum(),
            (x > 0).sum(-1),
            x.sum(-1, dtype=torch.float64),
            x[None] @ weight.t()[None],
        )
    others = (x.mean(0), x.sum(), (x > 0).sum(-1), x.sum(-1, dtype=torch.float64), x[None] @ weight.t()[None])
    assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
    plain = x.mean(-1)
    with FixedOrder("meta"):  # for tensors elsewhere
        assert torch.equal(x.mean(-1), plain)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="models use it there")
def test_a_model_runs_on_it(monkeypatch):
    def model():
        return tiny_model("qwen3", num_hidden_layers=1)

    tokens = torch.arange(3, 15)
    with torch.inference_mode():
        expected = model()(tokens[None], use_cache=False).logits[0]
        with FixedOrder("cpu"):
            logits = model()(tokens[None], use_cache=False).logits[0]
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    monkeypatch.setattr(hf_model, "row_independent", lambda device, invariant: lambda: FixedOrder("cpu"))
    monkeypatch.setattr(hf_model, "pack_weights", lambda *args: None)
    assert ModelRunner(model(), num_blocks=32, block_size=4, fused=False).batch_invariant
