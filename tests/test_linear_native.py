"""Linear layers of the native kernels: close to the exact product, rows that do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from angelspec_backend.core.config import ConfigError, EngineConfig, load_config
from angelspec_backend.engine import linear_native, native
from angelspec_backend.engine.hf_model import HuggingFaceModel
from angelspec_backend.engine.linear import PackedLinear, fuse
from angelspec_backend.engine.linear_native import NativeMatmul, QuantizationError, quantize
from angelspec_backend.engine.llama import FusedLlama
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.runner import ModelRunner
from check_quantization import logits_of
from families import tiny_model

BLOCKS = {"num_blocks": 16, "block_size": 8}
SHAPES = ((96, 64), (960, 576), (576, 1536), (199, 40), (1, 1), (33, 31))
has_kernels = pytest.mark.skipif(native.linear_kernel() == "none", reason="no AVX512-BF16")


def kernels() -> list[str]:
    """The kernels of this machine; AMX machines can run the other one too."""
    best = native.LINEAR_KERNELS.index(native.linear_kernel())
    return list(native.LINEAR_KERNELS[1 : best + 1]) or ["none"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000), st.floats(1e-30, 1e30))
def test_a_quantized_weight_is_within_half_a_step_of_the_weight(out_features, in_features, seed, size):
    weight = (normal(out_features, in_features, seed=seed) * size).bfloat16()
    weight[seed % out_features] = 0  # a channel without a scale
    codes, scale = quantize(weight)
    error = (codes.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5001).all()
    assert codes.abs().max() <= 127
    nonzero = weight.abs().amax(1) > 0
    assert (codes.abs().amax(1)[nonzero] == 127).all()


@has_kernels
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inter", [1, 16, 24, 96, 160])
def test_a_gated_layer_is_the_activation_of_its_products(inter, bias, quantized, kernel):
    weight, offset = normal(2 * inter, 96), normal(2 * inter, seed=2) if bias else None
    plain = NativeMatmul(weight, offset, quantized=quantized, kernel=kernel)
    gated = NativeMatmul(weight, offset, quantized=quantized, gated=True, kernel=kernel)
    for rows in (1, 3, 16, 33, 70):
        x = normal(rows, 96, seed=rows)
        expected = native.silu_and_mul(plain(x), torch.empty(rows, inter, dtype=torch.bfloat16))
        assert torch.equal(gated(x), expected)
    if not (bias or quantized):
        gate, up = plain(x).chunk(2, -1)
        torch.testing.assert_close(expected, nn.functional.silu(gate) * up, rtol=0.01, atol=0.01)


@has_kernels
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_with_bf16_weights_is_exact_but_for_rounding(shape, bias, kernel):
    weight, x = normal(*shape), normal(70, shape[1], seed=1)
    offset = normal(shape[0], seed=2) if bias else None
    out = NativeMatmul(weight, offset, quantized=False, kernel=kernel)(x).double()
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    sizes = x.double().abs() @ weight.double().abs().T
    assert ((out - exact).abs() <= exact.abs() * 2**-8 + sizes * 1e-5).all()


@has_kernels
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_rounded_weights_and_within_its_bound_of_fp32(shape, bias, kernel):
    weight, x = normal(*shape), normal(70, shape[1], seed=1)
    offset = normal(shape[0], seed=2) if bias else None
    out = NativeMatmul(weight, offset, quantized=True, kernel=kernel)(x).double()
    codes, scale = quantize(weight)
    added = 0 if offset is None else offset.double()
    rounded = x.double() @ (codes.double() * scale.double()[:, None]).T + added
    sizes = x.double().abs() @ (codes.double() * scale.double()[:, None]).abs().T
    rounding = rounded.abs() * 2**-8 + sizes * 1e-5  # of the result to bf16, and of the sum
    assert ((out - rounded).abs() <= rounding).all()
    exact = (x.float() @ weight.float().T).double() + added
    bound = x.double().abs().sum(1, keepdim=True) * scale.double() / 2
    assert ((out - exact).abs() <= bound * 1.001 + rounding + 1e-5).all()


@has_kernels
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_to_the_bit_for_any_number_of_rows_and_threads(shape, quantized, kernel):
    matmul = NativeMatmul(normal(*shape), normal(shape[0], seed=2), quantized=quantized, kernel=kernel)
    x = normal(512, shape[1], seed=1)
    whole, threads = matmul(x), torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert torch.equal(matmul(x), whole)
            for count in (*range(1, 35), 47, 63, 64, 65, 96, 127, 128, 129, 200, 255, 257, 384, 511):
                start = (count * 37) % (513 - count)
                rows = x[start : start + count].contiguous()
                assert torch.equal(matmul(rows), whole[start : start + count]), (num_threads, count)
    finally:
        torch.set_num_threads(threads)


@has_kernels
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("quantized", [False, True])
def test_neighbouring_rows_do_not_matter_even_when_not_finite(quantized, kernel):
    matmul, x = NativeMatmul(normal(96, 64), None, quantized=quantized, kernel=kernel), normal(40, 64)
    expected = matmul(x)
    x[10], x[30] = float("nan"), float("inf")
    keep = [i for i in range(40) if i not in (10, 30)]
    out = matmul(x)
    assert torch.equal(out[keep], expected[keep])
    assert not out[[10, 30]].isfinite().any()


@has_kernels
def test_tiles_of_other_kernels_in_the_same_thread_are_left_right():
    plain, rounded = PackedLinear(normal(96, 64)), PackedLinear(normal(96, 64), None, "int8")
    x = normal(64, 64)
    expected = plain(x), rounded(x)
    for count in (2, 64, 17, 40, 64):
        assert torch.equal(rounded(x[:count]), expected[1][:count])
        assert torch.equal(plain(x[:count]), expected[0][:count])


@has_kernels
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33, 600])
def test_a_packed_layer_takes_any_number_of_rows(num_rows):
    layer, x = nn.Linear(64, 96).bfloat16(), normal(600, 64)
    expected = NativeMatmul(layer.weight.detach(), layer.bias.detach(), quantized=True)(x)
    assert torch.equal(fuse(layer, quantization="int8")(x[:num_rows]), expected[:num_rows])


@has_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_quantized_model_is_batch_invariant_and_close_to_the_plain_one(family, fused):
    tokens = np.arange(3, 15)
    runners = [
        ModelRunner(tiny_model(family, torch.bfloat16), **BLOCKS, fused=fused, quantization=quantization)
        for quantization in ("none", "int8")
    ]
    assert all(runner.batch_invariant for runner in runners)
    assert runners[1].describe()["quantization"] == "int8"
    network = FusedLlama if fused and family == "llama" else HuggingFaceModel
    assert isinstance(runners[1].network, network)
    exact, rounded = (
        logits_of(runner, tokens.astype(np.int32), block_size=BLOCKS["block_size"]) for runner in runners
    )
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.05 * exact.norm()


def test_what_the_kernels_do_not_compute_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(LoadError, match="needs dtype bfloat16, got float32"):
        ModelRunner(tiny_model("llama"), **BLOCKS, quantization="int8")
    with pytest.raises(QuantizationError, match="is for the CPU; this model is on 'cuda'"):
        linear_native.check_supported(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(native, "linear_kernel", lambda: "none")
    with pytest.raises(LoadError, match="needs g\\+\\+ and a CPU with AVX512-BF16"):
        ModelRunner(tiny_model("llama", torch.bfloat16), **BLOCKS, quantization="int8")


def test_the_configuration_knows_none_and_int8():
    assert EngineConfig().quantization == "none"
    assert load_config({"quantization": "int8"}).quantization == "int8"
    with pytest.raises(ConfigError, match=r"quantization: .*'none' or 'int8', got 'int4'"):
        load_config({"quantization": "int4"})
    with pytest.raises(ConfigError, match="quantization 'int8' needs dtype bfloat16, got 'float32'"):
        load_config({"quantization": "int8", "dtype": "float32"})
