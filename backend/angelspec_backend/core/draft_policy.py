"""How many draft tokens to verify in a step: as many as make requests faster, and no more.

Verifying a draft costs time and gives a token only if the draft is right.  Where the machine waits for
memory drafts are nearly free, where it is busy computing they are not, so the number must follow the batch.
Each step minimises the expected time per token, averaged over its rows, so that a row that gains nothing
does not pay for one that gains much: drafts are taken in falling order of what they are likely to save their
row, up to the least mean (compare D-Cut, arXiv 2607.14647, and the scheduler of DSpark, arXiv 2607.05147).
Times are those of earlier steps.  No choice made here can change a text, since the target samples every
token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.step_times import StepTimes

PROBE_INTERVAL = 128
"""Steps after which one is done the other way, with a draft for every row or with none: the texts may have
become easy, or what is known of the other way may be wrong."""


class Way(IntEnum):
    """How a step's drafts are made: looking up costs the drafter no time worth mentioning."""

    LOOKUP = 0
    NETWORK = 1  # by whatever the drafter has; looking up comes first


@dataclass
class Share:
    """How often something came true: counts that fade."""

    fading: float  # factor per observation
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, hits: int, tries: int) -> None:
        """Take in some tries."""
        self.hits = self.hits * self.fading + hits
        self.tries = self.tries * self.fading + tries

    def estimate(self, prior: float, weight: float = 1.0) -> float:
        """The chance, starting from a prior that counts as ``weight`` tries."""
        return (self.hits + prior * weight) / (self.tries + weight)


@dataclass
class Record:
    """How the drafts of one sequence, or of all sequences with one drafter, fared."""

    fading: float
    right: Share = field(init=False)  # draft tokens that were right when all before them were
    found: Share = field(init=False)  # wanted draft tokens that the drafter came up with

    def __post_init__(self) -> None:
        self.right, self.found = Share(self.fading), Share(self.fading)

    def observe(self, num_wanted: int, num_drafted: int, num_accepted: int) -> None:
        """Take in a draft; tokens behind the first wrong one were not put to the test."""
        self.found.observe(num_drafted, num_wanted)
        if num_drafted:
            self.right.observe(num_accepted, min(num_accepted + 1, num_drafted))


def new_records(fading: float) -> tuple[Record, ...]:
    """One by way."""
    return tuple(Record(fading) for _ in Way)


@dataclass(frozen=True)
class Option:
    """What one way of drafting promises to the rows of a step."""

    way: Way
    right: NDArray[np.float64]  # [num_rows] chances that a draft token is right
    found: NDArray[np.float64]  # [num_rows] chances that one is found at all
    limits: NDArray[np.int64]  # [num_rows] longest draft allowed, 0 for a row that is not to draft


@dataclass(frozen=True)
class Choice:
    """The best a way can do."""

    way: Way
    lengths: NDArray[np.int64]  # [num_rows] of the drafts
    seconds: float  # expected mean time per token

    @property
    def drafts(self) -> bool:
        """Whether any row does."""
        return bool(self.lengths.any())


class DraftPolicy:
    """Chooses draft lengths for all rows of a step, and learns from how the step went."""

    def __init__(self, num_drafters: int) -> None:
        self.times = StepTimes()  # of all steps
        # A drafter's own time comes on top of what its drafts cost the target, so such steps count apart.
        self._plain, self._drafting = StepTimes(), tuple(StepTimes() for _ in Way)
        self._overall = [new_records(fading=0.999) for _ in range(num_drafters)]
        self._num_steps = 0

    def chances(self, drafter: int, way: Way, own: Sequence[Record]) -> tuple[float, float]:
        """A sequence's chances that a draft token is right and that it is found at all.

        Its own record counts, led by that of all others at first.  own: by way
        """
        overall, record = self._overall[drafter][way], own[way]
        right = record.right.estimate(prior=overall.right.estimate(prior=0.5))
        return right, record.found.estimate(prior=overall.found.estimate(prior=0.5))

    def choose(self, options: Sequence[Option]) -> Choice:
        """The way and the draft lengths that minimise the expected mean time per token."""
        choices = [self._best(option) for option in options]
        chosen = min(choices, key=lambda choice: choice.seconds)
        self._num_steps += 1
        if self._num_steps % PROBE_INTERVAL:
            return chosen
        return self._probe(chosen, choices, options)

    def _best(self, option: Option) -> Choice:
        """The draft lengths by which a way takes least time per token; every row decodes one token anyway."""
        right, found, limits = option.right, option.found, option.limits
        num_rows, longest = len(limits), int(limits.max(initial=1))
        # Steps per token for each draft length, [num_rows, longest + 1], and what each draft token saves.
        gained = np.cumsum(right[:, None] ** np.arange(longest + 1), axis=1) - 1  # tokens, if found
        savings = -np.diff(1 / (1 + found[:, None] * gained), axis=1)
        savings[np.arange(longest) >= limits[:, None]] = -1.0
        order = np.argsort(-savings, axis=None, kind="stable")[: int(limits.sum())]
        mean_steps = 1 - np.concatenate([[0.0], np.cumsum(savings.flat[order])]) / num_rows
        num_tokens = num_rows + np.concatenate([[0.0], np.cumsum(found[order // longest])])
        times = mean_steps * self._seconds(option.way, num_tokens)
        best = int(np.argmin(times))
        lengths = np.bincount(order[:best] // longest, minlength=num_rows)
        return Choice(option.way, lengths, float(times[best]))

    def _probe(self, chosen: Choice, choices: Sequence[Choice], options: Sequence[Option]) -> Choice:
        """What else could be done, one after the other; with drafts in all rows, since on some machines the
        first draft makes the whole step dearer."""
        others = [
            Choice(choice.way, np.maximum(choice.lengths, np.minimum(option.limits, 1)), choice.seconds)
            for choice, option in zip(choices, options, strict=True)
            if choice is not chosen or not chosen.drafts
        ]
        if chosen.drafts:
            others.append(Choice(chosen.way, np.zeros_like(chosen.lengths), chosen.seconds))
        return others[self._num_steps // PROBE_INTERVAL % len(others)]

    def observe_draft(
        self,
        drafter: int,
        way: Way,
        own: Sequence[Record],
        num_wanted: int,
        num_drafted: int,
        num_accepted: int,
    ) -> None:
        """Take in how one row's draft fared."""
        for record in (own[way], self._overall[drafter][way]):
            record.observe(num_wanted, num_drafted, num_accepted)

    def observe_step(self, num_tokens: int, seconds: float, way: Way | None) -> None:
        """Take in how long a step took that decoded so many tokens, drafts included, and no prompt.

        way: in which drafts were asked for, whether any were found or not; None: none were.
        """
        self.times.observe(num_tokens, seconds)
        (self._plain if way is None else self._drafting[way]).observe(num_tokens, seconds)

    def _seconds(self, way: Way, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a step without drafts, and of steps with more and more of them.

        num_tokens: [n] verified in them -> [n]
        """
        plain, drafting = (each if each.known else self.times for each in (self._plain, self._drafting[way]))
        seconds = plain.predict(num_tokens)  # with drafts it takes no less
        seconds[1:] = np.maximum(seconds[1:], drafting.predict(num_tokens[1:]))
        return seconds
