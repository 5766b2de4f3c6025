"""An engine that has served any number of requests holds no more memory than after the first ones."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path

import pytest
import torch

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from families import COMMON, tiny_model

MAX_NUM_SEQS, LONGEST = 8, 120
POOL = {"num_blocks": 64, "block_size": 4}


class Load:
    """Random requests, some cancelled, some preempted, on a loop that goes on for ever."""

    def __init__(self) -> None:
        runner = ModelRunner(tiny_model("llama", torch.bfloat16, num_hidden_layers=1), **POOL)
        drafters = (NgramDrafter(1, 3, MAX_NUM_SEQS),)
        config = LoopConfig(
            **POOL,
            max_context=200,
            eos_token_ids=frozenset(),
            drafters=tuple(each.info for each in drafters),
            max_num_seqs=MAX_NUM_SEQS,
            max_batch_tokens=32,
        )
        executor = LocalExecutor(TargetEngine(runner), DrafterHost(drafters, MAX_NUM_SEQS))
        self.loop = SpeculativeLoop(executor, config, lambda event: None)
        self.random = random.Random(0)
        self.num_requests = 0

    def request(self) -> GenerationRequest:
        prompt = [self.random.randrange(COMMON["vocab_size"]) for _ in range(self.random.randint(1, LONGEST))]
        return GenerationRequest(
            tuple(prompt),
            SamplingParams(temperature=self.random.choice([0.0, 1.0]), seed=self.num_requests),
            self.random.randint(1, 40),
            drafter=self.random.choice([0, NO_DRAFTER]),
            num_draft_tokens=3,
        )

    def run(self, num_requests: int) -> None:
        """Serve so many more requests."""
        last = self.num_requests + num_requests
        while self.num_requests < last or self.loop.num_live:
            if self.num_requests < last and self.loop.num_live < 2 * MAX_NUM_SEQS:
                self.loop.submit(self.num_requests, self.request())
                self.num_requests += 1
            if self.random.random() < 0.1:
                self.loop.cancel(self.random.randrange(max(last - 20, 0), last))
            if self.loop.num_live:
                self.loop._receive()
            self.loop.step()


def resident_bytes() -> int:
    return 1024 * int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0])


@pytest.fixture(scope="module")
def load() -> Load:
    load = Load()
    load.run(150)
    return load


def test_python_objects_do_not_pile_up(load):
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            load.run(60)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert load.loop.scheduler.num_preemptions > 0
    # What the first round brought stays within the n-gram indices and the prefix cache, which are full.
    assert sizes[2] - sizes[1] < 100_000


def test_resident_memory_does_not_grow(load):
    load.run(100)
    before = resident_bytes()
    load.run(300)
    assert resident_bytes() - before < 4 << 20


def test_nothing_is_left_of_ended_requests(load):
    assert load.loop._sequences == {}
    assert (list(load.loop.scheduler), load.loop.num_live) == ([], 0)
    blocks = load.loop.scheduler._blocks
    assert len(blocks._by_key) == len(blocks._by_block) <= POOL["num_blocks"] - 1
    assert blocks.num_free == POOL["num_blocks"] - 1
