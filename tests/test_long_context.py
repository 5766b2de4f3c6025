"""8,000 tokens: prompt chunks through the paged pool, found prefixes and late decoding give the right logits.

The weights are those of the default target's first layers, so that the positions it was trained for count.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from traces import Piece, batch_of

LENGTH, BLOCK_SIZE, LAYERS = 8000, 16, 2
POOL = {"num_blocks": 1200, "block_size": BLOCK_SIZE}


def first_layers(target_dir, dtype: torch.dtype, layers: int = LAYERS):
    config = AutoConfig.from_pretrained(target_dir, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_pretrained(
        target_dir, config=config, dtype=dtype, attn_implementation="eager"
    )


@torch.inference_mode()
def eager_logits(model, texts: list[list[int]], shared: int, last: int) -> list[torch.Tensor]:
    """The logits of the last positions of texts that share their beginning, by transformers alone."""
    cache, found = DynamicCache(config=model.config), []

    def forward(token_ids: list[int]) -> torch.Tensor:  # [last, vocab]
        # By position, since the name of the cache differs between versions of transformers.
        return model(torch.tensor([token_ids]), None, None, cache, logits_to_keep=last).logits[0]

    for start in range(0, shared, 500):  # a whole text at once would need gigabytes for its scores
        forward(texts[0][start : min(start + 500, shared)])
    for text in texts:
        found.append(forward(text[shared:]))
        cache.crop(shared - len(text))
    return found


class Recorder:
    """Generates one request after another in one loop, and keeps the logits of all sampled positions."""

    def __init__(self, runner: ModelRunner, max_batch_tokens: int) -> None:
        self.logits: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.num_computed = 0
        forward = runner.forward_with_taps

        def record(batch, taps):
            logits, states = forward(batch, taps)
            self.logits.append(logits)
            return logits, states

        engine = TargetEngine(runner)
        engine.runner.forward_with_taps = record
        config = LoopConfig(
            **POOL,
            max_context=8192,
            eos_token_ids=frozenset(),
            max_batch_tokens=max_batch_tokens,
        )
        self.loop = SpeculativeLoop(
            LocalExecutor(engine), config, lambda event: self.tokens.extend(event.token_ids)
        )

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """Prompt and output without its last token, and the logits of the output.  [count, vocab]"""
        self.logits.clear()
        self.tokens.clear()
        self.loop.submit(0, GenerationRequest(tuple(prompt), SamplingParams(), count, ignore_eos=True))
        while self.loop.num_live:
            self.loop._receive()
            self.loop.step()
        return [*prompt, *self.tokens[:-1]], torch.cat(self.logits)


def random_prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(100, 49000, count).tolist()


def test_late_logits_equal_those_of_transformers_with_and_without_a_cached_prefix(target_dir):
    runner = ModelRunner(first_layers(target_dir, torch.float32), **POOL)
    recorder = Recorder(runner, max_batch_tokens=512)
    prompt = random_prompt(LENGTH)
    shared = LENGTH - 100
    cold = recorder.generate(prompt, 6)
    warm = recorder.generate([*prompt[:shared], *random_prompt(90, seed=1)], 6)
    assert recorder.loop.scheduler.num_cached_tokens == shared // BLOCK_SIZE * BLOCK_SIZE
    texts = [cold[0], warm[0]]
    expected = eager_logits(first_layers(target_dir, torch.float32), texts, shared, last=6)
    for (_, logits), wanted in zip((cold, warm), expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def runner(target_dir) -> ModelRunner:
    return ModelRunner(first_layers(target_dir, torch.bfloat16), **POOL)


def test_bf16_logits_at_the_end_are_the_same_to_the_bit_for_every_chunking(runner):
    text, start = np.array(random_prompt(LENGTH)), LENGTH - 24
    half = POOL["num_blocks"] // 2
    tables = np.stack([np.arange(1, half), np.arange(half, 2 * half - 1)])
    seen = []
    for table, sizes in enumerate(((512,), (64, 333, 1000))):
        position, cycle = 0, itertools.cycle(sizes)
        while position < start:
            end = min(position + next(cycle), start)
            runner.forward(batch_of([Piece(table, position, text[position:end])], tables, BLOCK_SIZE))
            position = end
        seen.append(runner.forward(batch_of([Piece(table, start, text[start:], 23)], tables, BLOCK_SIZE)))
        singles = [
            runner.forward(batch_of([Piece(table, at, text[at : at + 1])], tables, BLOCK_SIZE))
            for at in range(start, LENGTH)
        ]
        seen.append(torch.cat(singles))
    for other in seen[1:]:
        assert torch.equal(seen[0], other)
