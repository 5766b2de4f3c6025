"""Which rows of a step draft, and from which chance of being accepted on a draft token is worth its time.

Verifying a draft costs time and gives a token only if the draft is right.  Where the machine waits for
memory drafts are nearly free, where it is busy computing they are not, so how much is drafted must follow the
batch.  The drafter knows how likely each of its tokens is, the policy learns from earlier steps what one more
token costs: it pays where its chance exceeds the tokens that are generated in the time it takes (compare
D-Cut, arXiv 2607.14647, and the scheduler of DSpark, arXiv 2607.05147).  A step says so, and drafters stop
there.  Which rows draft at all, and how, minimises the expected time per token, averaged over the rows, so
that a row that gains nothing does not pay for one that gains much.  No choice made here can change a text,
since the target samples every token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.draft_records import Fared, Promise, Records, Way, yields
from angelspec_backend.core.step_costs import StepCosts

PROBE_INTERVAL, PROBE_LENGTH = 128, 2
"""Steps after which some are done the other way, with a draft for every row or with none: the texts may have
become easy, or what is known of the other way may be wrong.  In the first of them a drafter that was left out
catches up, so it says little."""


@dataclass(frozen=True)
class Option:
    """What one way of drafting promises to the rows of a step."""

    drafter: int  # index of the one of most rows
    way: Way
    drafted: NDArray[np.float64]  # [num_rows] tokens that a draft has, over ``yields``
    accepted: NDArray[np.float64]  # [num_rows] and those of them that are right, likewise
    asked: NDArray[np.float64]  # [num_rows] chance that the drafter's network is asked for it
    limits: NDArray[np.int64]  # [num_rows] longest draft allowed, 0 for a row that is not to draft


@dataclass(frozen=True)
class Choice:
    """The best a way can do."""

    way: Way
    lengths: NDArray[np.int64]  # [num_rows] of the longest drafts wanted
    min_chance: float  # of being accepted, that a draft token must have
    seconds: float  # expected mean time per token

    @property
    def drafts(self) -> bool:
        """Whether any row does."""
        return bool(self.lengths.any())


class DraftPolicy:
    """Chooses draft lengths for all rows of a step, and learns from how the step went."""

    def __init__(self, num_drafters: int) -> None:
        self.costs = StepCosts()
        self._overall = [Records(fading=0.999) for _ in range(num_drafters)]
        self._num_steps = 0

    def expected(self, drafter: int, way: Way, own: Records, looks_up_first: bool) -> Promise:
        """What a sequence's next draft promises, by its own record, led by that of all others at first.

        looks_up_first: whether the drafter asks its network only where it finds nothing.
        """
        return own.expected(self._overall[drafter], way, looks_up_first)

    def choose(self, options: Sequence[Option]) -> Choice:
        """The way and the rows to draft that minimise the expected mean time per token."""
        plain = self.costs.plain_seconds(len(options[0].limits))
        choices = [self._best(option, plain) for option in options]
        chosen = min(choices, key=lambda choice: choice.seconds)
        self._num_steps += 1
        if self._num_steps % PROBE_INTERVAL < PROBE_INTERVAL - PROBE_LENGTH:
            return chosen
        return self._probe(chosen, choices, options)

    def _best(self, option: Option, plain: float) -> Choice:
        """The rows whose drafts make a way take least time per token; every row decodes one token anyway.

        plain: seconds of a step without drafts.
        """
        num_rows, limits = len(option.limits), option.limits
        drafted, accepted = self._expected(option, num_rows / plain)
        savings = 1 - 1 / (1 + accepted)  # steps per token
        order = np.argsort(-savings / (drafted + 1e-9), kind="stable")
        order = order[limits[order] > 0]
        sums = np.cumsum(np.stack([savings, drafted, option.asked])[:, order], axis=1)
        seconds = self.costs.seconds(option.drafter, option.way, num_rows + sums[1], sums[2])
        times = np.concatenate([[plain], (1 - sums[0] / num_rows) * seconds])
        best = int(np.argmin(times))
        # What is wanted is set aside in the step, so it must not be far more than what is likely to come.
        longest = np.minimum(limits, np.ceil(2 * drafted).astype(np.int64) + 2)
        lengths = np.zeros_like(limits)
        lengths[order[:best]] = longest[order[:best]]
        num_new = num_rows + float(accepted[order[:best]].sum())
        min_chance = self._min_chance(num_new / (float(seconds[best - 1]) if best else plain))
        return Choice(option.way, lengths, min_chance, float(times[best]))

    def _expected(
        self, option: Option, tokens_per_second: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens that are drafted and accepted in each row, the least chance being what pays without any."""
        drafted, accepted = yields(self._min_chance(tokens_per_second))
        return (
            np.minimum(option.drafted * drafted, option.limits),
            np.minimum(option.accepted * accepted, option.limits),
        )

    def _min_chance(self, tokens_per_second: float) -> float:
        """From which a draft token pays: the tokens that are generated in the time it takes."""
        return min(self.costs.token_seconds * tokens_per_second, 1.0)

    def _probe(self, chosen: Choice, choices: Sequence[Choice], options: Sequence[Option]) -> Choice:
        """What else could be done, one after the other; with drafts in all rows, since on some machines the
        first draft makes the whole step dearer."""
        others = [
            # Where only what is nearly certain pays, one token each, whatever its chance, or none comes.
            Choice(option.way, option.limits, choice.min_chance, choice.seconds)
            if choice.min_chance < 0.5
            else Choice(option.way, np.minimum(option.limits, 1), 0.0, choice.seconds)
            for choice, option in zip(choices, options, strict=True)
            if choice is not chosen or not chosen.drafts
        ]
        if chosen.drafts:
            others.append(Choice(chosen.way, np.zeros_like(chosen.lengths), 0.0, chosen.seconds))
        return others[self._num_steps // PROBE_INTERVAL % len(others)]

    def observe_draft(
        self, drafter: int, way: Way, own: Records, looks_up_first: bool, looked_up: bool, fared: Fared
    ) -> None:
        """Take in how the draft fared that one row was asked for.  looked_up: whether it was"""
        for records in (own, self._overall[drafter]):
            records.observe(way, looks_up_first, looked_up, fared)
