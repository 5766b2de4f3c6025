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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 4
MAX_AGE = 1024
"""Steps after which a measured time counts no more, so that one bad measurement is not believed for ever."""
PROBE_INTERVAL = 128
"""Steps after which one is done the other way, with a draft for every row or with none: the texts may have
become easy, or what is known of the other way may be wrong."""
FASTER, SLOWER = 0.3, 0.1
"""Weights of a new time below and above what was known: a disturbance only ever makes a step longer."""


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


class StepTimes:
    """Seconds a step takes for each number of verified tokens, learnt from the steps themselves."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}  # mean tokens, mean seconds, last step
        self._step = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a measurement."""
        self._step += 1
        bucket = round(np.log2(num_tokens) * BUCKETS_PER_OCTAVE)
        tokens, mean, seen = self._buckets.get(bucket, (float(num_tokens), seconds, self._step))
        if self._step - seen > MAX_AGE:
            tokens, mean = float(num_tokens), seconds
        mean += (FASTER if seconds < mean else SLOWER) * (min(seconds, 2 * mean) - mean)
        tokens += FASTER * (num_tokens - tokens)
        self._buckets[bucket] = (tokens, mean, self._step)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None while nothing is known."""
        return float(self.predict(np.array([num_tokens]))[0]) if self.known else None

    def predict(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for steps of so many tokens, [n] -> [n], never falling.

        Hopeful where nothing is known, so that it is tried and then known: tokens beyond the largest step
        seem free, and a step smaller than the smallest proportionally faster.
        """
        known = [(t, s) for t, s, seen in self._buckets.values() if self._step - seen <= MAX_AGE]
        if not known:
            return np.ones(len(num_tokens))
        tokens, seconds = np.array([(0.0, 0.0), *sorted(known)]).T
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # slower than a larger step: disturbed
        return np.interp(num_tokens, tokens, seconds)


class DraftPolicy:
    """Chooses draft lengths for all rows of a step, and learns from how the step went."""

    def __init__(self, num_drafters: int) -> None:
        self.times = StepTimes()  # of all steps
        # A drafter's own time comes on top of what its drafts cost the target, so such steps count apart.
        self._plain, self._drafting = StepTimes(), StepTimes()
        self._overall = [Record(fading=0.999) for _ in range(num_drafters)]
        self._num_steps = 0

    def chances(self, drafter: int, own: Record) -> tuple[float, float]:
        """A sequence's chances that a draft token is right and that it is found at all.

        Its own record counts, led by that of all others at first.
        """
        overall = self._overall[drafter]
        right = own.right.estimate(prior=overall.right.estimate(prior=0.5))
        return right, own.found.estimate(prior=overall.found.estimate(prior=0.5))

    def choose(
        self, right: NDArray[np.float64], found: NDArray[np.float64], limits: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Draft lengths that minimise the expected mean time per token.

        right, found: [num_rows] chances of a draft token; limits: [num_rows] longest draft allowed, 0 for a
        row that is not to draft.  Every row decodes one token anyway.  Returns [num_rows].
        """
        num_rows, longest = len(limits), int(limits.max(initial=0))
        if longest == 0:
            return np.zeros_like(limits)
        # Steps per token for each draft length, [num_rows, longest + 1], and what each draft token saves.
        gained = np.cumsum(right[:, None] ** np.arange(longest + 1), axis=1) - 1  # tokens, if found
        savings = -np.diff(1 / (1 + found[:, None] * gained), axis=1)
        savings[np.arange(longest) >= limits[:, None]] = -1.0
        order = np.argsort(-savings, axis=None, kind="stable")[: int(limits.sum())]
        mean_steps = 1 - np.concatenate([[0.0], np.cumsum(savings.flat[order])]) / num_rows
        num_tokens = num_rows + np.concatenate([[0.0], np.cumsum(found[order // longest])])
        best = int(np.argmin(mean_steps * self._seconds(num_tokens)))
        lengths = np.bincount(order[:best] // longest, minlength=num_rows)
        self._num_steps += 1
        if self._num_steps % PROBE_INTERVAL:
            return lengths
        # All at once, since on some machines the first draft makes the whole step dearer.
        return np.zeros_like(limits) if best else np.minimum(limits, 1)

    def observe_draft(
        self, drafter: int, own: Record, num_wanted: int, num_drafted: int, num_accepted: int
    ) -> None:
        """Take in how one row's draft fared."""
        for record in (own, self._overall[drafter]):
            record.observe(num_wanted, num_drafted, num_accepted)

    def observe_step(self, num_tokens: int, seconds: float, drafting: bool) -> None:
        """Take in how long a step took that decoded so many tokens, drafts included, and no prompt.

        drafting: a drafter was asked for drafts, whether it found some or not.
        """
        self.times.observe(num_tokens, seconds)
        (self._drafting if drafting else self._plain).observe(num_tokens, seconds)

    def _seconds(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a step without drafts, and of steps with more and more of them.

        num_tokens: [n] verified in them -> [n]
        """
        plain, drafting = (each if each.known else self.times for each in (self._plain, self._drafting))
        seconds = plain.predict(num_tokens)  # with drafts it takes no less
        seconds[1:] = np.maximum(seconds[1:], drafting.predict(num_tokens[1:]))
        return seconds
