"""A loop over simulated models, stepped by hand, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from angelspec_backend.core.loop import LocalExecutor, Recovered, SpeculativeLoop, StepError
from angelspec_backend.core.loop_config import DrafterInfo, LoopConfig
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.core.request import FinishReason, TokenEvent
from simulated import HIDDEN_BYTES, SimulatedDrafters, SimulatedTarget

STATES = DrafterInfo("states", False, True, tap_ids=(0, 2, 5), hidden_bytes=HIDDEN_BYTES, lookahead=5)
"""A hidden-state drafter."""


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    events: list[TokenEvent] = field(default_factory=list)


class Harness:
    """A loop over the simulated models, stepped by hand, checked after each step."""

    def __init__(
        self, config: LoopConfig, error_rate: float = 0.3, executor_type: type = LocalExecutor
    ) -> None:
        self.executor = executor_type(
            SimulatedTarget(config.num_blocks, config.block_size),
            SimulatedDrafters(config.drafters, config.block_size, error_rate, seed=1),
        )
        self.outcomes: dict[int, Outcome] = {}
        self.loop = SpeculativeLoop(self.executor, config, self._on_event)

    def _on_event(self, event: TokenEvent) -> None:
        outcome = self.outcomes[event.request_id]
        assert outcome.reason is None, "an event after the last one"
        outcome.tokens += event.token_ids
        outcome.reason = event.finish_reason
        outcome.events.append(event)

    def submit(self, request_id: int, request: GenerationRequest) -> bool:
        self.outcomes[request_id] = Outcome()
        return self.loop.submit(request_id, request)

    def step(self) -> None:
        if self.loop.num_live:
            self.loop._receive()
        self.loop.step()
        self.loop.scheduler.check_integrity()

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.loop.num_live:
                return
            self.step()
        raise AssertionError("the loop makes no progress")


def request(
    prompt: list[int], max_tokens: int = 10, seed: int = 0, drafts: int = 0, drafter: int = 0, **more
) -> GenerationRequest:
    return GenerationRequest(
        tuple(prompt),
        SamplingParams(seed=seed),
        max_tokens,
        drafter=drafter if drafts else NO_DRAFTER,
        num_draft_tokens=drafts,
        **more,
    )


def config(**more) -> LoopConfig:
    values = {
        "num_blocks": 64,
        "block_size": 4,
        "max_context": 60,
        "eos_token_ids": frozenset(),
        "drafters": (DrafterInfo("simulated", True, True),),
        "max_num_seqs": 8,
        "max_batch_tokens": 32,
        "adaptive_drafts": False,
    }
    return LoopConfig(**(values | more))


class FailingExecutor(LocalExecutor):
    """Fails some steps after the models have run, and loses the state that is said to be lost."""

    def __init__(self, target: SimulatedTarget, drafter: SimulatedDrafters) -> None:
        super().__init__(target, drafter)
        self.failures: list[Recovered | None] = []
        self.countdown = 3

    def step(self, step):
        output = super().step(step)
        self.countdown -= 1
        if self.countdown == 0 and self.failures:
            raise StepError("model target died")
        return output

    def recover(self) -> Recovered:
        recovered = self.failures.pop(0)
        self.countdown = 3
        if recovered is None:
            raise StepError("model target cannot be loaded")
        if recovered.target:
            self._target.pool[:] = -1
        if recovered.drafter:
            self._drafter.forget()
        return recovered
