"""How long engine steps take, learnt from the steps themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 4
MAX_AGE = 1024
"""Steps after which a measured time counts no more, so that one bad measurement is not believed for ever."""
FASTER, SLOWER = 0.3, 0.1
"""Weights of a new time below and above what was known: a disturbance only ever makes a step longer."""
RECENT = 0.02
"""Weight of a new step among those that say what a draft token costs."""
FIRST_SHARE = 0.2
"""A draft token's cost before any is known, as a share of a token's mean time in its step."""


class StepTimes:
    """Seconds a step takes for each number of verified tokens, learnt from the steps themselves."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}  # mean tokens, mean seconds, last step
        self._step = 0

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
        return seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    @property
    def largest(self) -> float:
        """Tokens of the largest step that still counts; 0: there is none."""
        return max((t for t, _, seen in self._buckets.values() if self._step - seen <= MAX_AGE), default=0.0)

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


class TokenCost:
    """Seconds that one more draft token takes: the slope of lines through recent steps, one line by way of
    drafting, all of the same slope."""

    def __init__(self) -> None:
        self._means: dict[int, NDArray[np.float64]] = {}  # by way: of draft tokens and seconds
        self._spread = np.zeros(2)  # variance of draft tokens, and their covariance with seconds

    def observe(self, way: int, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Take in a step with so many rows and draft tokens."""
        step, num_tokens = np.array([num_drafts, seconds]), num_rows + num_drafts
        if not self._means:
            self._spread = np.array([num_tokens, FIRST_SHARE * seconds])
        mean = self._means.setdefault(way, step)
        change = step - mean
        self._means[way] = mean + RECENT * change
        self._spread = (1 - RECENT) * (self._spread + RECENT * change[0] * change)

    @property
    def seconds(self) -> float:
        """Per draft token."""
        return max(float(self._spread[1] / self._spread[0]), 0.0) if self._means else 0.0
