"""Any Hugging Face causal LM through the engine, against its own eager forward; the others are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from angelspec_backend.engine.loader import LoadError, load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from families import COMMON, FAMILIES, REFUSED, tiny_model
from traces import Piece, batch_of, random_steps, random_tables, wanted_logits

NUM_TEXTS, LENGTH, BLOCK_SIZE, NUM_BLOCKS = 5, 37, 4, 64


def run_trace(runner: ModelRunner, texts: np.ndarray, seed: int):
    """(text, position, logits) of every sampled position on a random way through the texts."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, len(texts), texts.shape[1], BLOCK_SIZE, NUM_BLOCKS)
    for step in random_steps(rng, texts, runner.vocab_size):
        yield from wanted_logits(step, texts, runner.forward(batch_of(step, tables, BLOCK_SIZE)))


def random_texts(vocab: int = COMMON["vocab_size"]) -> np.ndarray:
    return np.random.default_rng(1).integers(3, vocab, (NUM_TEXTS, LENGTH))


@pytest.mark.parametrize(
    ("family", "fused"), [*((family, True) for family in FAMILIES), ("llama", False), ("mistral", False)]
)
def test_ragged_steps_with_wrong_drafts_equal_the_eager_forward(family, fused):
    texts = random_texts()
    with torch.inference_mode():
        expected = tiny_model(family)(
            torch.from_numpy(texts), use_cache=False
        ).logits  # [texts, length, vocab]
    runner = ModelRunner(tiny_model(family), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, fused=fused)
    assert runner.batch_invariant
    compared, worst = 0, 0.0
    for text, position, logits in run_trace(runner, texts, seed=2):
        worst = max(worst, (logits - expected[text, position]).abs().max().item())
        compared += 1
    assert compared > NUM_TEXTS * 5
    assert worst < 2e-5 * expected.abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_do_not_depend_on_how_the_texts_are_cut_and_batched(family):
    texts = random_texts()
    runner = ModelRunner(tiny_model(family, torch.bfloat16), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    assert runner.batch_invariant
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(2):
        for text, position, logits in run_trace(runner, texts, seed):
            assert torch.equal(seen.setdefault((text, position), logits), logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_taps_are_the_outputs_of_the_decoder_layers(family):
    tokens = random_texts()[0]
    model = tiny_model(family)
    expected: dict[int, torch.Tensor] = {}
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    for tap in (0, 1):
        layers[tap].register_forward_hook(lambda m, a, out, tap=tap: expected.setdefault(tap, out))
    with torch.inference_mode():
        model(torch.from_numpy(tokens[None]), use_cache=False)

    runner = ModelRunner(tiny_model(family), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    tables = random_tables(np.random.default_rng(0), 1, LENGTH, BLOCK_SIZE, NUM_BLOCKS)
    batch = batch_of([Piece(0, 0, tokens)], tables, BLOCK_SIZE)
    logits, states = runner.forward_with_taps(batch, (1, 0))
    assert torch.equal(logits, runner.forward(batch))
    with pytest.raises(ValueError, match="tap 3: this model has layers 0 to 2"):
        runner.forward_with_taps(batch, (3,))
    for tap, state in zip((1, 0), states, strict=True):
        torch.testing.assert_close(state, expected[tap][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_of_prompt_chunks_alone_has_no_logits(fused):
    runner = ModelRunner(tiny_model("llama"), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, fused=fused)
    tables = random_tables(np.random.default_rng(0), 1, LENGTH, BLOCK_SIZE, NUM_BLOCKS)
    batch = batch_of([Piece(0, 0, random_texts()[0])], tables, BLOCK_SIZE)
    assert runner.forward(replace(batch, logits_index=batch.logits_index[:0])).shape == (0, runner.vocab_size)


@pytest.mark.parametrize("family", REFUSED)
def test_an_architecture_that_would_be_served_wrongly_is_refused(family):
    with pytest.raises(LoadError, match=f"{family}.*is not supported"):
        ModelRunner(tiny_model(family), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(("family", "rope", "limit"), [("phi3", LONGROPE, 64), ("llama", DYNAMIC, 256)])
def test_positions_that_depend_on_the_batch_are_refused_unless_the_context_is_short(family, rope, limit):
    options = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    extra = {"original_max_position_embeddings": 64} if family == "phi3" else {}
    for max_context in (0, limit + 1):
        with pytest.raises(LoadError, match=f"set max_context to at most {limit}"):
            ModelRunner(tiny_model(family, rope_parameters=rope, **extra), max_context=max_context, **options)
    runner = ModelRunner(tiny_model(family, rope_parameters=rope, **extra), max_context=limit, **options)
    assert runner.max_context == limit


def test_layers_with_a_state_are_caught_even_when_their_type_is_hidden():
    model = tiny_model("olmo2")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + torch.roll(x, 1, dims=1))  # mixes neighbours, as a convolution would
    with pytest.raises(LoadError, match="mixes tokens outside attention"):
        ModelRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def test_a_saved_model_is_loaded_and_describes_itself(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    runner = ModelRunner.from_pretrained(str(tmp_path), num_blocks=8, block_size=16)
    assert runner.dtype == torch.bfloat16
    assert runner.eos_token_ids == (2,)
    described = json.loads(json.dumps(runner.describe()))
    assert described["architecture"] == "Qwen2ForCausalLM"
    assert (described["vocab_size"], described["max_context"]) == (199, 256)
    assert described["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2


def test_what_is_missing_in_a_model_folder_is_named(tmp_path):
    def refused(match, path=str(tmp_path)):
        with pytest.raises(LoadError, match=match):
            ModelRunner.from_pretrained(path, num_blocks=8, block_size=16)

    refused("no such folder", str(tmp_path / "absent"))
    refused(r"config.json is missing; the folder holds nothing")
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"tokenizer.json or .* is missing; the folder holds config.json"):
        load_tokenizer(str(tmp_path))
    refused("is a file", str(tmp_path / "config.json"))
    with pytest.raises(LoadError, match="max_context is 300, but this model allows at most 256"):
        ModelRunner.from_pretrained(str(tmp_path), num_blocks=8, block_size=16, max_context=300)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    refused(r"\*.safetensors or .* is missing")
    weights.write_bytes(content[: len(content) // 2])
    refused("cannot be loaded")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    refused("cannot be loaded: .*no_such_model")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks 1 weights of LlamaForCausalLM .*k_proj"):
        ModelRunner.from_pretrained(str(tmp_path), num_blocks=8, block_size=16)
