"""Generation without a server: plain decoding against n-gram drafts, alone and in a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.core.request import TokenEvent
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine

NGRAM = 0


@dataclass
class Generated:
    """What some requests gave that ran together, or one after another."""

    texts: list[list[int]]
    seconds: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def describe(self) -> dict[str, Any]:
        """For the report."""
        tokens = sum(map(len, self.texts))
        return {
            "tokens_per_second": tokens / self.seconds,
            "num_tokens": tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


def generate(runner: ModelRunner, requests: Sequence[GenerationRequest]) -> Generated:
    """Run requests together to their ends."""
    drafter = NgramDrafter(1, 4, len(requests))
    config = LoopConfig(
        num_blocks=runner.pool.num_blocks,
        block_size=runner.pool.block_size,
        max_context=min(runner.max_context, (runner.pool.num_blocks - 1) * runner.pool.block_size),
        eos_token_ids=frozenset(),
        drafters=(drafter.info,),
        max_num_seqs=len(requests),
        prefix_caching=False,  # prompts are computed every time
    )
    result = Generated([[] for _ in requests])

    def on_tokens(event: TokenEvent) -> None:
        result.texts[event.request_id] += event.token_ids
        if event.finish_reason:
            result.num_draft_tokens += event.num_draft_tokens
            result.num_accepted_tokens += event.num_accepted_tokens
        if not loop.num_live:
            loop.stop()

    executor = LocalExecutor(TargetEngine(runner), DrafterHost((drafter,), len(requests)))
    loop = SpeculativeLoop(executor, config, on_tokens)
    for number, request in enumerate(requests):
        loop.submit(number, request)
    begin = time.perf_counter()
    loop.run()
    result.seconds = time.perf_counter() - begin
    return result


def generate_each(runner: ModelRunner, requests: Sequence[GenerationRequest]) -> Generated:
    """Run requests one after another."""
    parts = [generate(runner, [request]) for request in requests]
    return Generated(
        [part.texts[0] for part in parts],
        sum(part.seconds for part in parts),
        sum(part.num_draft_tokens for part in parts),
        sum(part.num_accepted_tokens for part in parts),
    )


def flips(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How often two greedy decodings of the same prompts part.  What follows a flip is another text."""
    compared = flipped = 0
    for a, b in zip(first, second, strict=True):
        same = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        compared += min(len(a), len(b)) if same is None else same + 1
        flipped += same is not None
    rate = flipped / compared if compared else 0.0
    return {"texts": len(first), "texts_that_differ": flipped, "flips_per_token": rate}


def compare_generation(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: int, num_draft_tokens: int
) -> dict[str, Any]:
    """Speed of plain and speculative decoding, and flips between them, alone and in one batch.

    prompts: token ids.
    """
    plain = [
        GenerationRequest(tuple(prompt), SamplingParams(), max_tokens, drafter=NO_DRAFTER, ignore_eos=True)
        for prompt in prompts
    ]
    drafted = [replace(request, drafter=NGRAM, num_draft_tokens=num_draft_tokens) for request in plain]
    generate(runner, drafted)  # compiles kernels
    alone, drafted_alone = generate_each(runner, plain), generate_each(runner, drafted)
    batch, drafted_batch = generate(runner, plain), generate(runner, drafted)
    return {
        "prompts": len(prompts),
        "alone": {"plain": alone.describe(), "ngram": drafted_alone.describe()},
        "batch": {"plain": batch.describe(), "ngram": drafted_batch.describe()},
        "flips": {
            "plain, alone against in a batch": flips(alone.texts, batch.texts),
            "alone, plain against ngram": flips(alone.texts, drafted_alone.texts),
            "in a batch, plain against ngram": flips(batch.texts, drafted_batch.texts),
        },
    }
