"""How many draft tokens to verify in a step: as many as make requests faster, and no more.

Verifying a draft costs time and gives a token only if the draft is right.  Where the machine waits for
memory drafts are nearly free, where it is busy computing they are not, so the number must follow the batch.
Each step maximises the mean speed of its requests (the geometric mean: a row that gains nothing must not pay
for one that gains much): drafts are taken in falling order of what they are likely to give their row, up to
the best ratio of gain to time (compare D-Cut, arXiv 2607.14647, and the scheduler of DSpark, arXiv
2607.05147).  Times are those of earlier steps.  No choice made here can change a text, since the target
samples every token itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 4
MAX_AGE = 1024
"""Steps after which a measured time counts no more, so that one bad measurement is not believed for ever."""
PROBE_INTERVAL = 128
"""Steps after which every row tries a draft all the same: its text may have become easy."""
SMOOTHING = 0.25
"""Weight of a new measurement."""
MIN_GAIN = 0.02
"""Relative gain below which drafts are left out: what they cost beside the step's time is not measured."""


@dataclass
class Acceptance:
    """How often a draft token was right when all before it were: counts that fade."""

    fading: float  # factor per observation
    accepted: float = 0.0
    tried: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in a verified draft; tokens behind the first wrong one were not put to the test."""
        self.accepted = self.accepted * self.fading + num_accepted
        self.tried = self.tried * self.fading + min(num_accepted + 1, num_drafted)

    def rate(self, prior: float, weight: float = 1.0) -> float:
        """The estimated chance, starting from a prior that counts as ``weight`` observations."""
        return (self.accepted + prior * weight) / (self.tried + weight)


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
        seconds = min(seconds, 3 * mean)  # a pause of the machine says nothing of the step
        mean += SMOOTHING * (seconds - mean)
        tokens += SMOOTHING * (num_tokens - tokens)
        self._buckets[bucket] = (tokens, mean, self._step)

    def predict(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for steps of so many tokens, [n] -> [n], never falling.

        Hopeful where nothing is known, so that it is tried and then known: tokens beyond the largest step
        seem free, and a step smaller than the smallest proportionally faster.
        """
        known = [(t, s) for t, s, seen in self._buckets.values() if self._step - seen <= MAX_AGE]
        if not known:
            return np.ones(len(num_tokens))
        tokens, seconds = np.array([(0.0, 0.0), *sorted(known)]).T
        return np.interp(num_tokens, tokens, np.maximum.accumulate(seconds))


class DraftPolicy:
    """Chooses draft lengths for all rows of a step, and learns from how the step went."""

    def __init__(self, num_drafters: int) -> None:
        self._times = StepTimes()
        self._overall = [Acceptance(fading=0.999) for _ in range(num_drafters)]
        self._num_steps = 0

    def rate(self, drafter: int, own: Acceptance) -> float:
        """A sequence's chance per draft token: its own record, led by that of all others at first."""
        return own.rate(prior=self._overall[drafter].rate(prior=0.5))

    def choose(self, rates: NDArray[np.float64], limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draft lengths that maximise the expected mean speed of the rows.

        rates: [num_rows] chance per draft token; limits: [num_rows] longest draft allowed, 0 for a row that
        is not to draft; every row decodes one token anyway.  Returns [num_rows].
        """
        num_rows, longest = len(limits), int(limits.max(initial=0))
        if longest == 0:
            return np.zeros_like(limits)
        expected = np.cumsum(rates[:, None] ** np.arange(longest + 1), axis=1)  # tokens for each draft length
        gains = np.diff(np.log(expected), axis=1)  # [num_rows, longest], falling along a row
        gains[np.arange(longest) >= limits[:, None]] = -1.0
        order = np.argsort(-gains, axis=None, kind="stable")[: int(limits.sum())]
        total = np.concatenate([[0.0], np.cumsum(gains.flat[order])]) / num_rows
        speed = total - np.log(self._times.predict(num_rows + np.arange(len(total))))
        best = int(np.argmax(speed))
        if speed[best] < speed[0] + MIN_GAIN:
            best = 0
        lengths = np.bincount(order[:best] // longest, minlength=num_rows)
        # All at once, since on some machines the first draft makes the whole step dearer.
        self._num_steps += 1
        probing = self._num_steps % PROBE_INTERVAL == 0
        return np.maximum(lengths, np.minimum(limits, int(probing)))

    def observe_draft(self, drafter: int, own: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """Take in how one row's draft fared."""
        own.observe(num_drafted, num_accepted)
        self._overall[drafter].observe(num_drafted, num_accepted)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took that decoded so many tokens, drafts included, and no prompt."""
        self._times.observe(num_tokens, seconds)
