"""How long engine steps take, learnt from the steps themselves."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 4
WITHIN = 1.1
"""How far about a bucket's mean its steps lie."""
MAX_AGE = 1024
"""Steps after which a measured time counts no more, so that one bad measurement is not believed for ever."""
FASTER, SLOWER = 0.3, 0.1
"""Weights of a new time below and above what was known: a disturbance only ever makes a step longer."""
RECENT = 0.02
"""Weight of a new step among those that say what a draft token costs."""
FIRST_SHARE = 0.2
"""A draft token's cost before any is known, as a share of a token's mean time in its step; and what is
believed at first of the time beside the target, as a share of the target's."""


class StepTimes:
    """Seconds a step takes for each number of verified tokens, learnt from the steps themselves."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}  # mean tokens, mean seconds, last step
        self._step = 0
        self._curve = np.zeros((2, 0))  # tokens and seconds, see ``predict``

    def observe(self, num_tokens: int, seconds: float) -> float:
        """Take in a measurement, and return it without the worst of a disturbance."""
        self._step += 1
        bucket = round(np.log2(num_tokens) * BUCKETS_PER_OCTAVE)
        tokens, mean, seen = self._buckets.get(bucket, (float(num_tokens), seconds, self._step))
        if self._step - seen > MAX_AGE:
            tokens, mean = float(num_tokens), seconds
        seconds = min(seconds, 2 * mean)
        mean += (FASTER if seconds < mean else SLOWER) * (seconds - mean)
        tokens += FASTER * (num_tokens - tokens)
        self._buckets[bucket] = (tokens, mean, self._step)
        known = sorted((t, s) for t, s, seen in self._buckets.values() if self._step - seen <= MAX_AGE)
        least = known[0][0] / WITHIN, known[0][1]  # a bucket's smallest steps take about as long as its mean
        self._curve = np.array([(0.0, 0.0), least, *known]).T
        # What is slower than a larger step was disturbed.
        self._curve[1] = np.minimum.accumulate(self._curve[1, ::-1])[::-1]
        return seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    @property
    def largest(self) -> float:
        """Tokens of the largest step that still counts; 0: there is none."""
        return float(self._curve[0, -1]) if self.known else 0.0

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None while nothing is known."""
        return float(self.predict(num_tokens)) if self.known else None

    def predict(self, num_tokens: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Seconds for steps of so many tokens, [n] -> [n], never falling.

        Hopeful where nothing is known, so that it is tried and then known: tokens beyond the largest step
        seem free, and a step smaller than the smallest proportionally faster.
        """
        if not self.known:
            return np.ones_like(num_tokens, np.float64)
        return np.interp(num_tokens, *self._curve)


class ExtraTimes:
    """Seconds that are spent beside something, learnt for numbers of rows."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float]] = {}  # mean rows, mean seconds
        self._curve = np.zeros((2, 1))

    def observe(self, num_rows: int, seconds: float, target_seconds: float) -> None:
        """Take in a measurement, which is not believed at once: the first of its kind often is no example.

        target_seconds: beside which they were spent.
        """
        bucket = round(np.log2(num_rows))
        rows, mean = self._buckets.get(bucket, (float(num_rows), float(self.predict(num_rows))))
        seconds = min(seconds, 2 * mean + FIRST_SHARE * target_seconds)
        mean += (FASTER if seconds < mean else SLOWER) * (seconds - mean)
        self._buckets[bucket] = rows + SLOWER * (num_rows - rows), mean
        self._curve = np.array([(0.0, 0.0), *sorted(self._buckets.values())]).T

    def predict(self, num_rows: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """[n] -> [n] seconds; 0 while nothing is known, and beyond the largest number no more than there."""
        return np.interp(num_rows, *self._curve)


class TokenCost:
    """Seconds that one more draft token takes: the slope of lines through recent steps, one line by drafter
    and way, all of the same slope."""

    def __init__(self) -> None:
        self._means: dict[Hashable, NDArray[np.float64]] = {}  # by line: of draft tokens and seconds
        self._spread = np.zeros(2)  # variance of draft tokens, and their covariance with seconds

    def observe(self, line: Hashable, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Take in a step with so many rows and draft tokens."""
        step, num_tokens = np.array([num_drafts, seconds]), num_rows + num_drafts
        if not self._means:
            self._spread = np.array([num_tokens, FIRST_SHARE * seconds])
        mean = self._means.setdefault(line, step)
        change = step - mean
        self._means[line] = mean + RECENT * change
        self._spread = (1 - RECENT) * (self._spread + RECENT * change[0] * change)

    @property
    def seconds(self) -> float:
        """Per draft token."""
        return max(float(self._spread[1] / self._spread[0]), 0.0) if self._means else 0.0
