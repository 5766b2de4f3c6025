"""The promise: the same seed gives the same tokens, whatever the drafter, the draft length and the batch.

Every comparison is of all token ids, in bf16 and fp32, greedy and sampled.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.core.request import FinishReason, TokenEvent
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.block_drafter import BlockDrafter
from angelspec_backend.drafters.chain_drafter import ChainDrafter
from angelspec_backend.drafters.draft_model import DraftModelDrafter
from angelspec_backend.drafters.lookup import LookupDrafter
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from families import tiny_model
from random_drafters import random_drafter

NGRAM, DRAFT_MODEL, ITSELF, BLOCK, CHAIN = DRAFTERS = tuple(range(5))
BLOCKS = {"num_blocks": 256, "block_size": 16}
SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "warm, top-k, min-p": SamplingParams(temperature=0.7, top_k=20, min_p=0.02, seed=12),
    "hot, top-p": SamplingParams(temperature=1.4, top_p=0.9, seed=2**63 + 13),
}


class Engine:
    """A target with five drafters in this process, and a fresh loop for each set of requests."""

    def __init__(
        self, target: ModelRunner, draft: ModelRunner, itself: ModelRunner, parts: TargetParts
    ) -> None:
        """parts: of the target, for random networks that draft where nothing can be looked up"""
        self.target = TargetEngine(target)
        block = BlockDrafter(random_drafter("dfly", parts), **BLOCKS, max_context=512)
        chain = ChainDrafter(random_drafter("mtp", parts), **BLOCKS, max_context=512)
        self.drafters = (
            NgramDrafter(1, 4, 16),
            DraftModelDrafter(draft, "draft_model"),
            DraftModelDrafter(itself, "itself"),
            LookupDrafter(block, 4, **BLOCKS),
            LookupDrafter(chain, 4, **BLOCKS),
        )

    def loop(self, on_tokens, **limits) -> SpeculativeLoop:
        values = {
            **BLOCKS,
            "max_context": 512,
            "eos_token_ids": frozenset(),
            "drafters": tuple(each.info for each in self.drafters),
            "max_num_seqs": 16,
            "max_batch_tokens": 64,
            "adaptive_drafts": False,  # every draft length is to be tried
        }
        host = DrafterHost(self.drafters, 16)
        return SpeculativeLoop(LocalExecutor(self.target, host), LoopConfig(**(values | limits)), on_tokens)

    def generate(self, requests: Sequence[GenerationRequest], **limits) -> list[list[int]]:
        """Tokens of requests that run together, in a loop with other limits if given."""
        tokens: list[list[int]] = [[] for _ in requests]
        self.last: dict[int, TokenEvent] = {}

        def on_tokens(event: TokenEvent) -> None:
            tokens[event.request_id] += event.token_ids
            self.last[event.request_id] = event

        loop = self.loop(on_tokens, **limits)
        self.scheduler = loop.scheduler
        for i, request in enumerate(requests):
            loop.submit(i, request)
        while loop.num_live:
            loop._receive()
            loop.step()
            loop.scheduler.check_integrity()
        return tokens


def random_model(dtype: torch.dtype, layers: int) -> PreTrainedModel:
    return tiny_model("llama", dtype, num_hidden_layers=layers, max_position_embeddings=512)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(request) -> Engine:
    dtype = getattr(torch, request.param)
    runners = [ModelRunner(random_model(dtype, layers), **BLOCKS) for layers in (2, 1, 2)]
    return Engine(*runners, TargetParts.from_model(random_model(dtype, 2)))


def make_request(
    prompt: Sequence[int], sampling: SamplingParams, drafter: int = NO_DRAFTER, k: int = 0, n: int = 40
):
    return GenerationRequest(tuple(prompt), sampling, n, drafter=drafter, num_draft_tokens=k, ignore_eos=True)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_every_drafter_and_draft_length_gives_the_text_of_plain_decoding(engine, sampling):
    prompt = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9]
    [plain] = engine.generate([make_request(prompt, sampling)])
    assert len(plain) == 40
    for drafter in DRAFTERS:
        for k in range(1, 9):
            assert engine.generate([make_request(prompt, sampling, drafter, k)]) == [plain], (drafter, k)
            if drafter == ITSELF:
                last = engine.last[0]
                assert last.num_accepted_tokens == last.num_draft_tokens > 0


def test_sixteen_requests_of_all_kinds_together_give_the_texts_they_give_alone(engine):
    kinds = list(SAMPLING.values())
    requests = [
        make_request(
            [(7 * i + j * j) % 190 for j in range(1 + 9 * i)],
            replace(kinds[i % 4], seed=i),
            (NO_DRAFTER, *DRAFTERS)[i % 6],
            1 + i % 8,
        )
        for i in range(16)
    ]
    alone = [engine.generate([replace(r, drafter=NO_DRAFTER, num_draft_tokens=0)])[0] for r in requests]
    assert engine.generate(requests) == alone


def test_prefixes_found_in_the_cache_change_no_text(engine):
    prefix = [(3 * i) % 190 for i in range(70)]
    requests = [
        make_request([*prefix[: 70 - 9 * (i % 3)], i], replace(sampling, seed=i), drafter, 3)
        for i, (sampling, drafter) in enumerate(itertools.product(SAMPLING.values(), (NO_DRAFTER, *DRAFTERS)))
    ]
    alone = [engine.generate([replace(r, drafter=NO_DRAFTER, num_draft_tokens=0)])[0] for r in requests]
    assert engine.generate(requests, max_num_seqs=3) == alone
    assert engine.scheduler.num_cached_tokens > 500


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_cancellations_and_preemptions_at_random_change_no_text(engine, seed):
    rng = random.Random(seed)
    kinds = list(SAMPLING.values())
    requests = [
        make_request(
            [rng.randrange(190) for _ in range(rng.randrange(1, 70))],
            replace(rng.choice(kinds), seed=rng.getrandbits(64)),
            rng.choice((NO_DRAFTER, *DRAFTERS)),
            rng.randrange(9),
            rng.randrange(1, 50),
        )
        for _ in range(32)
    ]
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}

    def on_tokens(event: TokenEvent) -> None:
        tokens[event.request_id] += event.token_ids
        if event.finish_reason:
            reasons[event.request_id] = event.finish_reason

    # 40 blocks hold about five of these sequences at their full length.
    loop = engine.loop(on_tokens, num_blocks=40, max_context=160)
    waiting = list(enumerate(requests))
    while waiting or loop.num_live:
        while waiting and rng.random() < 0.5:
            i, request = waiting.pop(0)
            tokens[i] = []
            loop.submit(i, request)
        live = [i for i in tokens if i not in reasons]
        if live and rng.random() < 0.05:
            loop.cancel(rng.choice(live))
        if loop.num_live:
            loop._receive()
        loop.step()
        loop.scheduler.check_integrity()
    assert loop.scheduler.num_preemptions > 0
    assert set(reasons.values()) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    for i, request in enumerate(requests):
        [alone] = engine.generate([replace(request, drafter=NO_DRAFTER, num_draft_tokens=0)])
        assert tokens[i] == alone[: len(tokens[i])]
        if reasons[i] == FinishReason.LENGTH:
            assert tokens[i] == alone


@pytest.fixture(scope="module")
def real(target_dir) -> Engine:
    """The default target in bf16, drafted for by itself."""
    runners = [ModelRunner.from_pretrained(str(target_dir), **BLOCKS, max_context=512) for _ in range(2)]
    return Engine(runners[0], runners[1], runners[1], TargetParts.load(str(target_dir), torch.bfloat16))


@pytest.mark.parametrize("sampling", [SAMPLING["greedy"], SAMPLING["hot, top-p"]], ids=["greedy", "sampled"])
def test_the_default_target_in_bf16_keeps_the_promise_alone_and_in_a_batch(real, tokenizer, sampling):
    prompts = [
        tokenizer(text).input_ids
        for text in ("Count: one two three one two", "Once upon a time", "def f(x):")
    ]
    base = [make_request(prompt, replace(sampling, seed=i), n=32) for i, prompt in enumerate(prompts)]
    plain = [real.generate([request])[0] for request in base]
    for k in (1, 3, 8):
        for drafter in (NGRAM, ITSELF, BLOCK, CHAIN):
            drafted = [replace(request, drafter=drafter, num_draft_tokens=k) for request in base]
            assert real.generate([*drafted, *base]) == [*plain, *plain], (drafter, k)


def test_greedy_decoding_in_fp32_equals_transformers_generate(target_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    prompts = [
        tokenizer(text).input_ids for text in ("The three primary colours are", "import numpy as np\n")
    ]
    expected = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=-1)
        expected.append(output[0, len(prompt) :].tolist())
    parts = TargetParts.from_model(model)
    runner = ModelRunner(model, **BLOCKS, max_context=512)
    engine = Engine(runner, runner, runner, parts)
    assert engine.generate([make_request(p, SamplingParams(), n=48) for p in prompts]) == expected
    assert engine.generate([make_request(p, SamplingParams(), NGRAM, 6, n=48) for p in prompts]) == expected
