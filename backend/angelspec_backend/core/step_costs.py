"""What steps cost, learnt from the steps themselves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.draft_records import Way
from angelspec_backend.core.step_times import FIRST_SHARE, ExtraTimes, StepTimes, TokenCost

SHORTEST = 1e-6
"""Seconds that a target takes at least."""


@dataclass(frozen=True)
class Verified:
    """A step that decoded in some rows, perhaps beside prompts, and how long it took."""

    num_rows: int
    num_drafts: int  # draft tokens that were verified
    seconds: float
    target_seconds: float  # of them
    way: Way | None  # in which drafts were asked for, whether any were found or not; None: none were
    drafter: int  # index of the one of most rows
    num_drafting: int  # rows for which they were
    num_asked: int  # those whose network was
    prompts: bool = False  # whether it computed some too


class StepCosts:
    """Seconds that steps take, in two parts: the target's, which are the same whoever drafts, and all that is
    spent beside it.  A network's time counts on top of what looking up takes."""

    def __init__(self) -> None:
        self.times = StepTimes()  # of both parts
        self._verifying = StepTimes()
        self._plain = ExtraTimes()  # beside the target, without drafts
        # Each drafter takes its own time, and requests may name different ones.
        self._beside: defaultdict[tuple[int, Way], ExtraTimes] = defaultdict(ExtraTimes)
        self._token = TokenCost()
        self._last: tuple[int, Way | None] = (0, None)  # drafter and way of the step before

    def observe(self, step: Verified) -> None:
        """Take in a step."""
        beside = step.seconds - step.target_seconds
        if not step.prompts:
            num_tokens = step.num_rows + step.num_drafts
            self.times.observe(num_tokens, step.seconds)
            target = self._verifying.observe(num_tokens, max(step.target_seconds, SHORTEST))
            if step.way is not None:
                # Without the worst of disturbances, of which each would be remembered for long.
                seconds = target + min(beside, FIRST_SHARE * target)
                self._token.observe((step.drafter, step.way), step.num_rows, step.num_drafts, seconds)
        if step.way is None:
            self._plain.observe(step.num_rows, beside, step.target_seconds)
        elif step.way is Way.LOOKUP:
            self._beside[step.drafter, Way.LOOKUP].observe(step.num_drafting, beside, step.target_seconds)
        # Behind a step of another kind the drafter catches up with what it was not fed, which says nothing.
        elif step.num_asked and self._last == (step.drafter, step.way):
            looking_up = float(self._beside[step.drafter, Way.LOOKUP].predict(step.num_drafting))
            network = self._beside[step.drafter, Way.NETWORK]
            network.observe(step.num_asked, beside - looking_up, step.target_seconds)
        self._last = step.drafter, step.way

    @property
    def token_seconds(self) -> float:
        """That one more draft token takes."""
        return self._token.seconds

    def plain_seconds(self, num_rows: int) -> float:
        """Of a step without drafts."""
        return float(self._verifying.predict(num_rows) + self._plain.predict(num_rows))

    def seconds(
        self, drafter: int, way: Way, num_tokens: NDArray[np.float64], num_asked: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Of steps in which more and more rows draft, from one on.

        drafter: of most of them; num_tokens: [n] verified in them; num_asked: [n] rows for which a network is
        asked -> [n]
        """
        num_drafting = np.arange(1.0, len(num_tokens) + 1)
        looking_up = self._beside[drafter, Way.LOOKUP].predict(num_drafting)
        seconds = self._verifying.predict(num_tokens) + looking_up
        if way is Way.NETWORK:
            seconds += self._beside[drafter, way].predict(num_asked)
        return seconds
