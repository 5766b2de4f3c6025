"""The speculative loop: one thread that owns every request and drives one engine step after another."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.messages import DraftOutput, StepInput, StepOutput
from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.core.request import FinishReason, Sequence, TokenEvent
from angelspec_backend.core.scheduler import Scheduler
from angelspec_backend.core.step import build_step

MAX_RECOVERIES = 3
"""Recoveries without one good step between them before the live requests are given up."""

logger = logging.getLogger(__name__)


class StepError(RuntimeError):
    """A model did not answer a step; the message may be shown to a client."""

    reason = FinishReason.ERROR  # why the live requests end if this cannot be recovered from


class ServerStopping(StepError):
    """The server was told to exit and refuses all calls between models; nothing can be recovered."""

    reason = FinishReason.SHUTDOWN


@dataclass(frozen=True)
class Recovered:
    """What had to be restarted, and lost its context, to make steps possible again."""

    target: bool
    drafter: bool
    drafters: frozenset[int]  # indices of those that can draft now


class Target(Protocol):
    """Verifies drafts and samples; a local engine in tests, a Triton model in the server."""

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput: ...


class Drafter(Protocol):
    """Proposes drafts for every row of a step."""

    def propose(self, step: StepInput) -> DraftOutput: ...


class Executor(Protocol):
    """Runs one step through drafter and target."""

    def step(self, step: StepInput) -> StepOutput:
        """Raises StepError when a model did not answer."""
        ...

    def recover(self) -> Recovered:
        """Bring dead models back.  Raises StepError when the target cannot be."""
        ...


class LocalExecutor:
    """Drafter and target in this process."""

    def __init__(self, target: Target, drafter: Drafter | None = None) -> None:
        self._target, self._drafter = target, drafter

    def step(self, step: StepInput) -> StepOutput:
        """One engine step."""
        if self._drafter is None or not step.speculative:
            drafts = DraftOutput.empty(len(step.rows))
        else:
            drafts = self._drafter.propose(step)
        return self._target.step(step, drafts)

    def recover(self) -> Recovered:
        """Nothing can be restarted here."""
        raise StepError("the model failed")


@dataclass(frozen=True)
class _Submit:
    request_id: int
    request: GenerationRequest


@dataclass(frozen=True)
class _Cancel:
    request_id: int
    reason: FinishReason


class SpeculativeLoop:
    """Continuous batching of all live requests; ``run`` is the loop thread's body.

    ``on_tokens`` is called on the loop thread for every event and must be quick; each request's last
    event carries its finish reason.
    """

    def __init__(
        self, executor: Executor, config: LoopConfig, on_tokens: Callable[[TokenEvent], None]
    ) -> None:
        self.scheduler = Scheduler(config)
        self._executor = executor
        self._on_tokens = on_tokens
        self._capacity = config.max_num_seqs + config.max_queue_size
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._sequences: dict[int, Sequence] = {}
        self._lock = threading.Lock()
        self._num_live = 0  # submitted and not ended; guarded by the lock
        self._recoveries = 0

    # ------------------------------------------------------------------ any thread

    def submit(self, request_id: int, request: GenerationRequest) -> bool:
        """Queue a request; False when the queue is full."""
        with self._lock:
            if self._num_live >= self._capacity:
                return False
            self._num_live += 1
        self._inbox.put(_Submit(request_id, request))
        return True

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        self._inbox.put(_Cancel(request_id, reason))

    def stop(self) -> None:
        """Make ``run`` end every request with SHUTDOWN and return."""
        self._inbox.put(None)

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return self._num_live

    # ------------------------------------------------------------------ the loop thread

    def run(self) -> None:
        """Step until ``stop``; sleeps while there is nothing to do."""
        while self._receive():
            try:
                self.step()
            except Exception:  # a defect here must not leave clients waiting for ever
                logger.exception("the loop failed")
                self._end_all(FinishReason.ERROR, "internal error")

    def step(self) -> None:
        """The speculative step: schedule, draft and verify, take over what the target sampled."""
        self._report(self.scheduler.expire())
        rows = self.scheduler.schedule()
        if not rows:
            return
        step = build_step(rows, self.scheduler.config.state_arrays)
        begin = time.perf_counter()
        try:
            output = self._executor.step(step)
        except StepError as error:
            self._recover(error)
            return
        self._recoveries = 0
        self._report(self.scheduler.apply(rows, output, time.perf_counter() - begin))

    def _receive(self) -> bool:
        """Take in all that arrived, waiting while idle; False after ``stop``."""
        idle = not self._sequences
        while True:
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if message is None:
                self._end_all(FinishReason.SHUTDOWN, "the server is shutting down")
                return False
            if isinstance(message, _Submit):
                seq = Sequence(message.request_id, message.request, self.scheduler.new_table())
                self._sequences[seq.request_id] = seq
                self.scheduler.add(seq)
            elif seq_ := self._sequences.get(message.request_id):
                self.scheduler.remove(seq_)
                self._report([seq_.event([], message.reason)])

    def _recover(self, error: StepError) -> None:
        """Restart what died; the tokens are here, so every stream goes on where it was."""
        self._recoveries += 1
        logger.warning("step failed: %s", error)
        try:
            if self._recoveries > MAX_RECOVERIES or isinstance(error, ServerStopping):
                raise error
            recovered = self._executor.recover()
        except StepError as final:
            self._end_all(final.reason, str(final))
            return
        if recovered.target:
            self.scheduler.forget_target()
        if recovered.drafter or recovered.drafters != self.scheduler.drafters:
            self.scheduler.forget_drafters(recovered.drafters)

    def _end_all(self, reason: FinishReason, error: str) -> None:
        for seq in list(self.scheduler):
            self.scheduler.remove(seq)
            self._report([seq.event([], reason, error)])

    def _report(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason:
                del self._sequences[event.request_id]
                with self._lock:
                    self._num_live -= 1
            self._on_tokens(event)
