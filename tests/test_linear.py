"""Packed linears: the right product, and every row the same to the bit in any company."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from angelspec_backend.engine import linear as linear_module
from angelspec_backend.engine.linear import ROW_RANGES, PackedLinear, find_row_range, fuse

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((96, 64), (960, 576), (576, 1536), (199, 40))


def make_linear(out_features: int, in_features: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (0,), (3, 5), (1, 129), (300,)])
def test_it_is_a_linear_layer_for_inputs_of_any_shape(shape, dtype, bias):
    plain = make_linear(96, 64, bias, dtype)
    x = torch.randn(*shape, 64).to(dtype)
    expected = plain(x)
    packed = PackedLinear(plain.weight, plain.bias)
    assert packed(x).shape == expected.shape
    torch.testing.assert_close(packed(x), expected, rtol=1.6e-2, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_to_the_bit_for_any_number_of_rows(shape, dtype, bias):
    plain = make_linear(*shape, bias, dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(300, shape[1]).to(dtype)
    whole = packed(x)
    for count in (1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 65, 127, 128, 129, 130, 191, 255, 256, 257, 299):
        start = (count * 37) % (301 - count)
        assert torch.equal(packed(x[start : start + count]), whole[start : start + count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbouring_rows_do_not_matter_even_when_not_finite(dtype):
    packed = PackedLinear(make_linear(96, 64, False, dtype).weight)
    x = torch.randn(40, 64).to(dtype)
    expected = packed(x)
    x[10] = float("nan")
    x[30] = float("inf")
    keep = [i for i in range(40) if i not in (10, 30)]
    assert torch.equal(packed(x)[keep], expected[keep])


@pytest.mark.parametrize(
    ("agrees", "expected"),
    [
        (lambda count: True, (2, 512)),
        (lambda count: count <= 256, (2, 256)),
        (lambda count: count <= 128, (2, 128)),
        (lambda count: count <= 64, (2, 64)),
        (lambda count: count <= 32, (2, 32)),
        (lambda count: count in (16, 32, 64), (16, 16)),
    ],
)
def test_the_check_steps_down_to_row_counts_that_agree(monkeypatch, agrees, expected):
    """A kernel that gives other results for other row counts."""

    def packed_matmul(weight, bias):
        return lambda x: x + (0 if agrees(len(x)) else len(x))

    monkeypatch.setattr(linear_module, "_packed_matmul", packed_matmul)
    assert find_row_range.__wrapped__(96, 64, torch.float32, 1) == expected


def test_a_kernel_whose_rows_depend_on_their_place_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(
        linear_module, "_packed_matmul", lambda w, b: lambda x: x + torch.arange(len(x))[:, None]
    )
    assert find_row_range.__wrapped__(96, 64, torch.float32, 1) == (16, 16)
    assert "results may depend on the batch" in caplog.text


@pytest.mark.parametrize("row_range", [*ROW_RANGES, (4, 5), (3, 4)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 15, 16, 17, 33, 128, 129, 300])
def test_calls_have_allowed_row_counts_and_rows_keep_their_order(row_range, num_rows):
    low, high = row_range
    seen = []

    def matmul(x):
        seen.append(len(x))
        return x * 2

    x = torch.arange(num_rows * 3.0).view(num_rows, 3)
    assert torch.equal(linear_module._in_chunks(matmul, x, low, high), x * 2)
    assert all(low <= count <= high for count in seen)


def test_no_rows_need_no_product():
    linear = PackedLinear(torch.randn(48, 32))
    linear._matmul = None
    assert linear(torch.zeros(0, 32)).shape == (0, 48)


def test_each_shape_is_checked_once():
    find_row_range.cache_clear()
    for _ in range(3):
        PackedLinear(torch.randn(48, 32))
    assert find_row_range.cache_info().misses == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
def test_fused_layers_equal_the_single_ones(dtype, biases):
    layers = [make_linear(out, 64, bias, dtype) for out, bias in zip((48, 16, 32), biases, strict=True)]
    x = torch.randn(5, 64).to(dtype)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    fused = fuse(*layers)
    assert fused.out_features == 96
    torch.testing.assert_close(fused(x), expected, rtol=1.6e-2, atol=1e-5)


def test_fusing_frees_the_weights_but_not_a_tied_embedding():
    embedding = nn.Embedding(64, 32)
    head = nn.Linear(32, 64, bias=False)
    head.weight = embedding.weight
    single = nn.Linear(32, 64)
    weight = weakref.ref(single.weight)
    x = torch.randn(2, 32)
    expected = head(x)
    packed = fuse(head)
    fuse(single)
    gc.collect()
    assert weight() is None
    assert single.bias is None
    torch.testing.assert_close(packed(x), expected)
    assert embedding.weight.shape == (64, 32)
