"""Trained kinds of drafters in the real loop: they change no token, and see what they should see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from angelspec_backend.core.config import NETWORK_DRAFTERS
from angelspec_backend.core.hidden_states import IN_NUMPY
from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER, ROW, DraftOutput, StepInput, split_rows
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.block_drafter import BlockDrafter
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.chain_drafter import ChainDrafter
from angelspec_backend.drafters.checkpoint import DrafterNetwork
from angelspec_backend.drafters.lookup import LookupDrafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from angelspec_backend.triton.device_states import IN_TORCH
from families import tiny_model
from random_drafters import random_drafter

VOCAB = 11  # so few that random drafters are right now and then
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 64, 4, 128
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.4, top_p=0.9, seed=2**63 + 13),
)


def serve(network: DrafterNetwork) -> BlockDrafter | ChainDrafter:
    serving = BlockDrafter if isinstance(network, BlockNetwork) else ChainDrafter
    return serving(network, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_context=CONTEXT)


class Recorder:
    """A drafter that remembers what was drafted behind which anchor."""

    def __init__(self, drafter: BlockDrafter | ChainDrafter) -> None:
        self.drafter, self.info = drafter, drafter.info
        self.drafts: dict[tuple[int, int], list[int]] = {}  # by seed and position of the anchor

    def propose(self, rows, feed_token_ids, block_table, hidden_states) -> DraftOutput:
        output = self.drafter.propose(rows, feed_token_ids, block_table, hidden_states)
        for row, draft in zip(rows, split_rows(output.token_ids, output.lens), strict=True):
            if len(draft):
                self.drafts[int(row["seed"]), int(row["num_fed"] + row["num_feed"])] = draft.tolist()
        return output


class Engine:
    """A random target with a drafter of every trained kind, and a fresh loop for each set of requests.

    lookup: longest match that is looked up in front of the networks.
    """

    def __init__(self, dtype: torch.dtype, lookup: int) -> None:
        model = tiny_model("llama", dtype, vocab_size=VOCAB)
        self.parts = TargetParts.from_model(model)
        self.networks = [Recorder(serve(random_drafter(kind, self.parts))) for kind in NETWORK_DRAFTERS]
        self.drafters = [
            LookupDrafter(network, lookup, NUM_BLOCKS, BLOCK_SIZE) if lookup else network
            for network in self.networks
        ]
        self.target = TargetEngine(ModelRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))

    def generate(
        self, requests: list[GenerationRequest], in_tensors: bool = False, **limits
    ) -> list[list[int]]:
        """in_tensors: hidden states stay on the device"""
        arrays = IN_TORCH if in_tensors else IN_NUMPY
        target = TargetEngine(self.target.runner, in_tensors)
        host = DrafterHost(self.drafters, 8, arrays)
        values = {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_context": CONTEXT,
            "eos_token_ids": frozenset(),
            "drafters": tuple(each.info for each in self.drafters),
            "max_num_seqs": 8,
            "max_batch_tokens": 16,
            "adaptive_drafts": False,
            "state_arrays": arrays,
        }
        tokens: list[list[int]] = [[] for _ in requests]
        self.num_accepted = [0] * len(requests)

        def on_tokens(event) -> None:
            tokens[event.request_id] += event.token_ids
            self.num_accepted[event.request_id] = event.num_accepted_tokens

        loop = SpeculativeLoop(LocalExecutor(target, host), LoopConfig(**(values | limits)), on_tokens)
        self.scheduler = loop.scheduler
        for i, request in enumerate(requests):
            loop.submit(i, request)
        while loop.num_live:
            loop._receive()
            loop.step()
            loop.scheduler.check_integrity()
        assert host.num_failures == [0] * len(self.drafters)
        return tokens

    def drafts_from_scratch(self, kind: int, text: list[int], row: np.ndarray) -> list[int]:
        """What a drafter drafts behind a text that it is fed in one piece; the last token is the anchor."""
        length, blocks = len(text) - 1, np.arange(1, NUM_BLOCKS // 2, dtype=np.int32)
        target_row = np.zeros(1, ROW)
        target_row["num_tokens"], target_row["num_blocks"] = length, len(blocks)
        taps = np.array(self.drafters[kind].info.tap_ids, np.int32)
        target_row["num_taps"] = len(taps)
        known = np.array(text[:-1], np.int32)
        step = StepInput(target_row, known, np.zeros(0, np.int32), blocks, taps)
        states = self.target.step(step, DraftOutput.empty(1)).hidden_states
        row = row.copy()
        row["num_fed"], row["num_feed"], row["num_blocks"] = 0, length, len(blocks)
        feed = np.array(text[1:], np.int32)
        return self.networks[kind].drafter.propose(row, feed, blocks, states).token_ids.tolist()


@pytest.fixture(
    scope="module",
    params=[(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 3)],
    ids=["float32", "bfloat16", "bfloat16, lookup"],
)
def engine(request) -> Engine:
    return Engine(*request.param)


def make_request(prompt, sampling, kind: int = NO_DRAFTER, k: int = 0, n: int = 30) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), sampling, n, drafter=kind, num_draft_tokens=k, ignore_eos=True)


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled", "hot, top-p"])
def test_every_kind_and_draft_length_gives_the_text_of_plain_decoding(engine, sampling):
    prompt = [5, 9, 1, 3, 5, 9, 1, 3, 5, 9]
    [plain] = engine.generate([make_request(prompt, sampling)])
    accepted = np.zeros(len(NETWORK_DRAFTERS), int)
    for k in (1, 3, 8):
        requests = [make_request(prompt, sampling, kind, k) for kind in range(len(NETWORK_DRAFTERS))]
        assert engine.generate(requests) == [plain] * len(requests), k
        accepted += engine.num_accepted
    assert accepted.all()


def mixed_requests(count: int) -> list[GenerationRequest]:
    """Of all kinds and draft lengths, with prompts of several lengths, some with a common beginning."""
    rng = np.random.default_rng(3)
    common = rng.integers(0, VOCAB, 40).tolist()
    return [
        make_request(
            [*common[: rng.integers(0, 41)], *rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()],
            replace(SAMPLING[i % 3], seed=i),
            i % (len(NETWORK_DRAFTERS) + 1) - 1,
            1 + i % 8,
        )
        for i in range(count)
    ]


def test_requests_of_all_kinds_together_give_the_texts_they_give_alone(engine):
    requests = mixed_requests(14)
    alone = [engine.generate([replace(r, drafter=NO_DRAFTER, num_draft_tokens=0)])[0] for r in requests]
    assert engine.generate(requests) == alone
    assert engine.scheduler.num_cached_tokens > 0
    assert engine.generate(requests, num_blocks=36) == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.generate(requests, adaptive_drafts=True, max_waiting_states=5) == alone
    assert engine.generate(requests, in_tensors=True, num_blocks=36) == alone
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", range(len(NETWORK_DRAFTERS)), ids=NETWORK_DRAFTERS)
def test_what_is_drafted_in_the_loop_is_what_is_drafted_from_scratch(engine, kind):
    """However prompts were cut, prefixes shared and drafts rejected, the drafter saw all and nothing else."""
    recorder = engine.networks[kind]
    requests = [
        replace(request, drafter=kind, num_draft_tokens=4, sampling=replace(request.sampling, seed=i))
        for i, request in enumerate(mixed_requests(9))
    ]
    recorder.drafts.clear()
    texts = engine.generate(requests, num_blocks=40)
    assert engine.scheduler.num_cached_tokens > 0
    checked = 0
    for (seed, anchor), draft in list(recorder.drafts.items())[::2]:
        request = requests[seed]
        text = [*request.prompt_token_ids, *texts[seed]][: anchor + 1]
        row = np.zeros(1, ROW)
        row["num_draft_tokens"] = len(draft)
        for name in ("temperature", "top_p", "seed"):
            row[name] = getattr(request.sampling, name)
        assert engine.drafts_from_scratch(kind, text, row) == draft, (seed, anchor)
        checked += 1
    assert checked > 15
