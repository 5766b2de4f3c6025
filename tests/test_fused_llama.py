"""The fused fast path: the logits of the Hugging Face model, to the same bits however texts are batched."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from angelspec_backend.engine import native
from angelspec_backend.engine.checkpoint import of_model
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.llama import MODEL_TYPES, FusedLlama, supports
from families import COMMON, tiny_model
from traces import Piece, batch_of, random_steps, random_tables, wanted_logits

pytestmark = pytest.mark.skipif(not native.available(), reason="no g++")

NUM_TEXTS, LENGTH, BLOCK_SIZE, NUM_BLOCKS = 5, 37, 4, 64
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
VARIANTS = {
    "llama": ("llama", {}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, one kv head, odd sizes": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 40, "intermediate_size": 100},
    ),
    **{f"llama, {name} rope": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": 7}),
    "ministral": ("ministral", {"sliding_window": 7, **LAYERS}),
    "qwen2": ("qwen2", {}),
    "qwen2, sliding": ("qwen2", {"sliding_window": 7, "use_sliding_window": True, **LAYERS}),
    "qwen3": ("qwen3", {}),
    "qwen3, sliding": ("qwen3", {"sliding_window": 7, "use_sliding_window": True, **LAYERS}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
}


class Engine:
    """A fused model with its pool."""

    def __init__(self, model) -> None:
        self.fused = FusedLlama(of_model(model))
        self.pool = KVPool.allocate(self.fused.layer_specs(), NUM_BLOCKS, BLOCK_SIZE, self.fused.dtype)

    def run_trace(self, texts: np.ndarray, seed: int):
        """(text, position, logits) of every sampled position on a random way through the texts."""
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, len(texts), texts.shape[1], BLOCK_SIZE, NUM_BLOCKS)
        for step in random_steps(rng, texts, COMMON["vocab_size"]):
            logits = self.fused.forward(batch_of(step, tables, BLOCK_SIZE), self.pool)
            yield from wanted_logits(step, texts, logits)


def random_texts() -> np.ndarray:
    return np.random.default_rng(1).integers(3, COMMON["vocab_size"], (NUM_TEXTS, LENGTH))


def whole_text(tokens: np.ndarray) -> tuple[object, int]:
    """One row that computes a text and wants all its logits."""
    tables = random_tables(np.random.default_rng(0), 1, len(tokens), BLOCK_SIZE, NUM_BLOCKS)
    return batch_of([Piece(0, 0, tokens, drafts=len(tokens) - 1)], tables, BLOCK_SIZE)


def test_every_supported_type_is_tested_here():
    assert {family for family, _ in VARIANTS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_steps_with_wrong_drafts_equal_the_eager_forward(variant):
    family, options = VARIANTS[variant]
    model, texts = tiny_model(family, **options), random_texts()
    assert supports(model.config, torch.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(texts), use_cache=False).logits  # [texts, length, vocab]
    seen = 0
    for text, position, logits in Engine(model).run_trace(texts, seed=2):
        torch.testing.assert_close(logits, expected[text, position], rtol=0, atol=1e-4)
        seen += 1
    assert seen > NUM_TEXTS * 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_logits_are_the_same_to_the_bit_however_texts_are_cut_and_batched(variant):
    family, options = VARIANTS[variant]
    engine, texts = Engine(tiny_model(family, torch.bfloat16, **options)), random_texts()
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(3):
        for text, position, logits in engine.run_trace(texts, seed):
            assert torch.equal(seen.setdefault((text, position), logits), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 40, 576, 3001])
def test_row_kernels_equal_the_torch_formulas_and_rows_do_not_depend_on_each_other(size, dtype):
    torch.manual_seed(size)
    x, residual, weight = (torch.randn(n, size).to(dtype) for n in (100, 100, 1))
    tolerance = {"rtol": 1.6e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}

    total = residual.clone()
    normed = native.rms_norm(x, weight[0], 1e-5, torch.empty_like(x), total)
    assert torch.equal(total, x + residual)
    wide = total.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(normed, expected, **tolerance)

    gate_up = torch.randn(100, 2 * size).to(dtype) * 3
    activated = native.silu_and_mul(gate_up, torch.empty_like(x))
    expected = torch.nn.functional.silu(gate_up[:, :size]) * gate_up[:, size:]
    torch.testing.assert_close(activated, expected, **tolerance)

    for row in (0, 1, 99):
        one = slice(row, row + 1)
        assert torch.equal(
            native.rms_norm(total[one], weight[0], 1e-5, torch.empty_like(x[one])), normed[one]
        )
        assert torch.equal(native.silu_and_mul(gate_up[one], torch.empty_like(x[one])), activated[one])


@pytest.mark.skipif(native.linear_kernel() != "amx", reason="bf16 layers are native on CPUs with AMX alone")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_layers_in_one_call_give_the_bits_of_kernel_by_kernel(variant, threads):
    family, options = VARIANTS[variant]
    engine, other = (Engine(tiny_model(family, torch.bfloat16, **options)) for _ in range(2))
    assert (engine.fused.native_forward is None) == ("odd sizes" in variant)
    other.fused.native_forward = None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = zip(engine.run_trace(random_texts(), 3), other.run_trace(random_texts(), 3), strict=True)
        for (_, _, logits), (_, _, expected) in both:
            assert torch.equal(logits, expected)
        for cache, expected in zip(
            (*engine.pool.keys, *engine.pool.values), (*other.pool.keys, *other.pool.values), strict=True
        ):
            assert torch.equal(cache[1:], expected[1:])
        batch = whole_text(random_texts()[0])
        taps = [each.fused.forward_with_taps(batch, each.pool, (1, 0, 2))[1] for each in (engine, other)]
        assert all(torch.equal(a[:LENGTH], b[:LENGTH]) for a, b in zip(*taps, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_bf16_rounds_like_the_eager_forward(family):
    tokens = random_texts()[0]
    exact, model = tiny_model(family), tiny_model(family, torch.bfloat16)
    with torch.inference_mode():
        wanted = exact(torch.from_numpy(tokens[None]), use_cache=False).logits[0]
        eager = model(torch.from_numpy(tokens[None]), use_cache=False).logits[0].float()
    engine = Engine(model)
    logits = engine.fused.forward(whole_text(tokens), engine.pool).float()
    assert (logits - wanted).norm() < 1.2 * (eager - wanted).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_are_the_outputs_of_the_decoder_layers(dtype):
    tokens = random_texts()[0]
    model = tiny_model("llama", dtype)
    expected: dict[int, torch.Tensor] = {}
    for tap, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda m, a, out, tap=tap: expected.setdefault(tap, out))
    with torch.inference_mode():
        model(torch.from_numpy(tokens[None]), use_cache=False)
    engine, batch = Engine(model), whole_text(tokens)
    logits, states = engine.fused.forward_with_taps(batch, engine.pool, (2, 0))
    assert torch.equal(logits, engine.fused.forward(batch, engine.pool))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for tap, state in zip((2, 0), states, strict=True):
        torch.testing.assert_close(state[: len(tokens)], expected[tap][0], rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="layers 0 to 2"):
        engine.fused.forward_with_taps(batch, engine.pool, (3,))


def test_a_batch_of_prompt_chunks_alone_has_no_logits():
    engine, batch = Engine(tiny_model("llama")), whole_text(random_texts()[0])
    batch = replace(batch, logits_index=batch.logits_index[:0])
    assert engine.fused.forward(batch, engine.pool).shape == (0, COMMON["vocab_size"])


def test_the_weights_move_out_of_the_model():
    model = tiny_model("llama")
    weights = [weakref.ref(layer.mlp.down_proj.weight) for layer in model.model.layers]
    embedding = model.model.embed_tokens.weight.data_ptr()
    fused = FusedLlama(of_model(model))
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert fused.embedding.data_ptr() == embedding


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"head_dim": 20}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
        ("gemma2", {}),
        ("granite", {}),
        ("olmo2", {}),
    ],
)
def test_other_formulas_are_left_to_the_hugging_face_forward(family, options):
    config = AutoConfig.for_model(family, **{**COMMON, **options})
    assert not supports(config)


def test_other_devices_and_dtypes_are_left_to_the_hugging_face_forward():
    config = AutoConfig.for_model("llama", **COMMON)
    assert supports(config, torch.bfloat16, "cpu")
    assert not supports(config, torch.float16, "cpu")
    assert not supports(config, torch.bfloat16, "cuda")


def test_the_default_target_equals_its_eager_forward(target_dir):
    def load():
        return AutoModelForCausalLM.from_pretrained(
            target_dir, dtype=torch.float32, attn_implementation="eager"
        )

    tokens = np.random.default_rng(3).integers(0, load().config.vocab_size, 60)
    with torch.inference_mode():
        expected = load()(torch.from_numpy(tokens[None]), use_cache=False).logits[0]
    engine = Engine(load())
    logits = engine.fused.forward(whole_text(tokens), engine.pool)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_default_target_gives_the_same_bits_as_one_block_in_pieces_and_among_others(
    target_dir, quantization
):
    if quantization == "int8" and native.linear_kernel() == "none":
        pytest.skip("no AVX512-BF16")
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    texts = np.random.default_rng(4).integers(0, model.config.vocab_size, (40, 230))
    fused = FusedLlama(of_model(model), quantization=quantization)
    tables = random_tables(np.random.default_rng(5), len(texts), texts.shape[1], 16, 1000)
    pool = KVPool.allocate(fused.layer_specs(), 1000, 16, torch.bfloat16)

    def run(*pieces: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        """Logits of tokens [start, end) of some texts, all in one step."""
        rows = [Piece(t, start, texts[t, start:end], drafts=end - start - 1) for t, start, end in pieces]
        return fused.forward(batch_of(rows, tables, 16), pool).split(
            [end - start for _, start, end in pieces]
        )

    (whole,) = run((0, 0, 230))
    cuts = [0, 1, 2, 11, 140, 141, 230]
    for start, end in itertools.pairwise(cuts):
        mates = [(text, 0, 1 + text % 9) for text in range(1, 40)] if (end - start) % 2 else []
        assert torch.equal(run(*mates, (0, start, end))[-1], whole[start:end])


@pytest.mark.skipif(native.linear_kernel() != "amx", reason="bf16 layers are native on CPUs with AMX alone")
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_chunks_for_which_threads_share_rows_give_the_same_bits_as_short_ones(threads, quantization):
    # 608 inputs of the last product are too many to be summed in one go.
    model = tiny_model("llama", torch.bfloat16, intermediate_size=608, max_position_embeddings=700)
    fused = FusedLlama(of_model(model), quantization=quantization)
    texts = np.random.default_rng(6).integers(3, COMMON["vocab_size"], (2, 620))
    tables = random_tables(np.random.default_rng(7), *texts.shape, 16, 100)
    pool = KVPool.allocate(fused.layer_specs(), 100, 16, torch.bfloat16)

    def run(pieces: list[tuple[int, int]]) -> torch.Tensor:
        parts = []
        for start, end in pieces:
            rows = [Piece(t, start, texts[t, start:end], drafts=end - start - 1) for t in (0, 1)]
            parts.append(fused.forward(batch_of(rows, tables, 16), pool).view(2, end - start, -1))
        return torch.cat(parts, 1)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run([(0, 620)])
        assert torch.equal(run([(0, 300), (300, 301), (301, 620)]), whole)
        assert torch.equal(run([(at, at + 31) for at in range(0, 620, 31)]), whole)
        fused.native_forward = None
        assert torch.equal(run([(0, 620)]), whole)
    finally:
        torch.set_num_threads(before)
