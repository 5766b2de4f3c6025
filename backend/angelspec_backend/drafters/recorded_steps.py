"""The steps of a draft as one recorded program: each drafts the token behind the one before.

Rows that want more drafts come first, so that those of a later step are the first ones of the step before.
Where all rows are greedy the whole draft is one native call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.drafters.choice import Choice, Likeliest
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.engine.program import Program, Rows


@dataclass(frozen=True)
class DraftStep:
    """One token of each row."""

    rows: Rows
    logits: Tensor  # [room, draft vocabulary]
    token_ids: NDArray[np.int64]  # [room] the tokens of the target, read by the next step
    probability: NDArray[np.float32]  # [room]
    end: int  # of its operations


class DraftSteps:
    """The steps recorded so far."""

    def __init__(self, program: Program, room: int, vocab: DraftVocab | None) -> None:
        self._program, self._names = program, None if vocab is None else vocab.target_ids
        self._least = np.zeros(room, np.float32)
        self._product: NDArray[np.float32] | None = None  # of the probabilities up to the last step but one
        self.steps: list[DraftStep] = []

    @property
    def last_token_ids(self) -> NDArray[np.int64]:
        """What the next step goes on from."""
        return self.steps[-1].token_ids

    def begin(self, rows: Rows) -> None:
        """Record the end of drafts that have become too unlikely, in front of a step other than the first."""
        last = self.steps[-1]
        self._product = self._program.cut(last.rows, last.probability, self._product, self._least, rows)

    def end(self, rows: Rows, logits: Tensor) -> None:
        """Record the choice of a step.  logits: [room, draft vocabulary]"""
        found = self._program.argmax(rows, logits, self._names)
        self.steps.append(DraftStep(rows, logits, *found, len(self._program)))

    def run(self, wanted: NDArray[np.int64], choice: Choice) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draft.  wanted: [n] drafts of each row, falling -> tokens and confidences [n, max(wanted)], zero
        behind the end of a draft."""
        steps = self.steps[: int(wanted[0])]
        for index, step in enumerate(steps):
            step.rows.count = np.count_nonzero(wanted > index)
        self._least[: len(wanted)] = choice.min_chance
        if choice.greedy:
            self._program.run(0, steps[-1].end)
        else:
            self._run_each(steps, choice)
        tokens, confidence = (
            np.zeros((len(wanted), len(steps)), np.int64),
            np.zeros((len(wanted), len(steps))),
        )
        for index, step in enumerate(steps):
            count = step.rows.count
            tokens[:count, index], confidence[:count, index] = (
                step.token_ids[:count],
                step.probability[:count],
            )
        return tokens, confidence.astype(np.float32)

    def _run_each(self, steps: list[DraftStep], choice: Choice) -> None:
        """Step by step, since the sampler chooses."""
        begin = 0
        for index, step in enumerate(steps):
            self._program.run(begin, step.end)
            begin, count = step.end, step.rows.count
            likeliest = Likeliest(
                step.logits[:count],
                torch.from_numpy(step.token_ids[:count]),
                torch.from_numpy(step.probability[:count]),
            )
            tokens, probability = choice.among(likeliest, np.arange(count), index)
            step.token_ids[:count], step.probability[:count] = tokens.numpy(), probability.numpy()
