"""Serve requests in this process by the server's own loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.core.request import FinishReason, TokenEvent
from angelspec_backend.drafters.base import Drafter, DrafterHost
from angelspec_backend.engine.runner import ModelRunner
from evaluation_measure import Answer, MeasuredModels, ScoringRunner, StepTime

MAX_BATCH_TOKENS = 512
"""As the server's default."""
PROMPTS_AT_ONCE = 100.0
"""Prompts need not spare decoding rows here: few steps shall mix both, since those are not timed."""


class EvaluationError(RuntimeError):
    """An evaluation cannot go on; the message says why."""


@dataclass
class Served:
    """What came of serving some requests with one drafter."""

    answers: list[Answer]
    times: list[StepTime]


def make_requests(
    prompts: Sequence[tuple[int, ...]], temperature: float, seed: int, max_tokens: int
) -> list[GenerationRequest]:
    """One request per prompt, decoded autoregressively, each with a seed of its own.  seed: below 2**32."""
    return [
        GenerationRequest(prompt, SamplingParams(temperature, seed=(seed << 32) + index), max_tokens)
        for index, prompt in enumerate(prompts)
    ]


def serve(
    runner: ScoringRunner,
    requests: Sequence[GenerationRequest],
    num_rows: int,
    drafter: Drafter | None = None,
    *,
    adaptive: bool = False,
    scores: bool = True,
    on_done: Callable[[int], None] = lambda done: None,
) -> Served:
    """Serve all requests, at most num_rows at a time.

    drafter: of the requests that have draft tokens.  adaptive: shorten drafts as the server does.
    scores: compute Answer.log_prob.  on_done is called with the number of finished requests.

    Raises:
        EvaluationError: the target or the drafter failed.
    """
    host = DrafterHost([drafter], num_rows) if drafter else None
    models = MeasuredModels(runner, host, requests, scores)
    answers, failures, num_done = models.answers, [""], 0

    def on_tokens(event: TokenEvent) -> None:
        nonlocal num_done
        answer, now = answers[event.request_id], time.perf_counter()
        if event.token_ids:
            answer.first_s, answer.last_s = answer.first_s or now, now
            answer.num_first = answer.num_first or len(event.token_ids)
            answer.token_ids += event.token_ids
        if event.finish_reason is None:
            return
        if event.finish_reason not in (FinishReason.EOS, FinishReason.LENGTH):
            failures.append(event.error or event.finish_reason.value)
        num_done += 1
        on_done(num_done)
        if num_done == len(requests):
            loop.stop()

    config = _loop_config(runner, requests, num_rows, drafter, adaptive)
    loop = SpeculativeLoop(LocalExecutor(models, models if host else None), config, on_tokens)
    for index, request in enumerate(requests):
        loop.submit(index, request)
    loop.run()
    if host and host.num_failures[0]:
        failures.append(f"drafter '{host.drafters[0].info.name}' failed, see above")
    if failures[-1]:
        raise EvaluationError(f"serving failed: {failures[-1]}")
    return Served(answers, models.times)


def _loop_config(
    runner: ModelRunner,
    requests: Sequence[GenerationRequest],
    num_rows: int,
    drafter: Drafter | None,
    adaptive: bool,
) -> LoopConfig:
    most_drafts = max((r.num_draft_tokens for r in requests if r.drafter != NO_DRAFTER), default=0)
    pool = (runner.pool.num_blocks - 1) * runner.pool.block_size
    return LoopConfig(
        num_blocks=runner.pool.num_blocks,
        block_size=runner.pool.block_size,
        max_context=min(runner.max_context, pool),
        eos_token_ids=frozenset(runner.eos_token_ids),
        drafters=(drafter.info,) if drafter else (),
        max_num_seqs=num_rows,
        max_batch_tokens=max(MAX_BATCH_TOKENS, num_rows * (1 + most_drafts)),
        max_queue_size=len(requests),
        adaptive_drafts=adaptive,
        max_slowdown=PROMPTS_AT_ONCE,
    )
