"""Target and drafter of a loop in this process that note what every step brings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput, StepInput, StepOutput, split_rows
from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.drafters.base import DrafterHost
from angelspec_backend.engine.batch import PackedBatch, ragged
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine


@dataclass(frozen=True)
class Round:
    """One verify step of one request; the step that gives its first token is none."""

    wanted: int  # draft tokens asked for
    drafted: int  # draft tokens that the drafter came up with
    accepted: int  # of them, in the answer; the round gives one token more


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    log_prob: float = 0.0  # sum over its tokens, under the target at temperature 1
    first_s: float = 0.0  # when the first tokens came
    last_s: float = 0.0
    num_first: int = 0  # tokens that came first, of no known time each


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step in which every row decodes."""

    num_rows: int
    draft_s: float
    target_s: float


class ScoringRunner(ModelRunner):
    """Keeps the logits of its last step, so that tokens are scored by those they were sampled from."""

    last_logits: Tensor

    def forward_with_taps(self, batch: PackedBatch, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """See ModelRunner."""
        logits, states = super().forward_with_taps(batch, taps)
        self.last_logits = logits
        return logits, states


class MeasuredModels:
    """Target and drafter of a LocalExecutor; they note rounds, times and the probability of each token."""

    def __init__(
        self,
        runner: ScoringRunner,
        host: DrafterHost | None,
        requests: Sequence[GenerationRequest],
        scores: bool = True,
    ) -> None:
        """requests: their seeds must differ, since a row of a step is known by its seed.
        scores: compute Answer.log_prob.
        """
        self._runner, self._target, self._host = runner, TargetEngine(runner), host
        self._requests = {request.sampling.seed: request for request in requests}
        self._answers = {seed: Answer() for seed in self._requests}
        self._eos = np.array(runner.eos_token_ids, np.int64)
        self.times: list[StepTime] = []
        self._scores = scores
        self._draft_s = 0.0

    @property
    def answers(self) -> list[Answer]:
        """In the order of the requests."""
        return list(self._answers.values())

    def propose(self, step: StepInput) -> DraftOutput:
        """Drafts for a step, timed."""
        assert self._host is not None
        begin = time.perf_counter()
        drafts = self._host.propose(step)
        self._draft_s = time.perf_counter() - begin
        return drafts

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput:
        """A step of the target, timed and noted."""
        begin = time.perf_counter()
        output = self._target.step(step, drafts)
        target_s = time.perf_counter() - begin
        log_probs = self._score(step, output) if self._scores else np.zeros(len(output.token_ids))
        self._note(step, output, log_probs, StepTime(len(step.rows), self._draft_s, target_s))
        self._draft_s = 0.0
        return output

    def _score(self, step: StepInput, output: StepOutput) -> NDArray[np.float64]:
        """Log probabilities of the tokens of an output, by the logits that they were sampled from."""
        counts = np.where(step.rows["sample"] == 1, output.draft_lens + 1, 0)
        row_of, index = ragged(counts)  # [num_logits]
        emitted = np.flatnonzero(index < output.lens[row_of])
        logits = self._runner.last_logits
        chosen = logits[torch.from_numpy(emitted).to(logits.device)].double()  # [num_tokens, vocab]
        tokens = torch.from_numpy(output.token_ids.astype(np.int64)).to(logits.device)
        picked = chosen.gather(1, tokens[:, None])[:, 0]
        return (picked - chosen.logsumexp(-1)).cpu().numpy()

    def _note(
        self, step: StepInput, output: StepOutput, log_probs: NDArray[np.float64], times: StepTime
    ) -> None:
        decoding = 0
        for row, tokens, scores, drafted in zip(
            step.rows,
            split_rows(output.token_ids, output.lens),
            split_rows(log_probs, output.lens),
            output.draft_lens.tolist(),
            strict=True,
        ):
            seed, wanted = int(row["seed"]), int(row["num_draft_tokens"])
            request, answer = self._requests[seed], self._answers[seed]
            ends = np.isin(tokens, self._eos) & (not request.ignore_eos)
            length = int(ends.argmax()) + 1 if ends.any() else len(tokens)  # what lies behind is cut off
            answer.log_prob += float(scores[:length].sum())
            if row["num_computed"] < len(request.prompt_token_ids):
                continue
            answer.rounds.append(Round(wanted, drafted, length - 1))
            decoding += int(row["num_feed"]) <= request.num_draft_tokens + 1  # no catching up with a prompt
        if decoding == len(step.rows):
            self.times.append(times)
