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

from angelspec_backend.core.draft_records import Record, Way, new_records, yields
from angelspec_backend.core.step_times import StepTimes, TokenCost

PROBE_INTERVAL = 128
"""Steps after which one is done the other way, with a draft for every row or with none: the texts may have
become easy, or what is known of the other way may be wrong."""

OVERALL_WEIGHT = 4.0
"""Drafts that the record of all sequences counts beside a sequence's own."""


@dataclass(frozen=True)
class Option:
    """What one way of drafting promises to the rows of a step."""

    way: Way
    drafted: NDArray[np.float64]  # [num_rows] tokens that a draft has, over ``yields``
    accepted: NDArray[np.float64]  # [num_rows] and those of them that are right, likewise
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
        self.times = StepTimes()  # of all steps
        # A drafter's own time comes on top of what its drafts cost the target, so such steps count apart.
        self._plain, self._drafting = StepTimes(), tuple(StepTimes() for _ in Way)
        self._cost = TokenCost()
        self._overall = [new_records(fading=0.999) for _ in range(num_drafters)]
        self._num_steps = 0

    def expected(self, drafter: int, way: Way, own: Sequence[Record]) -> tuple[float, float]:
        """Tokens that a sequence's draft has, and how many of them are right, both over ``yields``.

        Its own record counts, led by that of all others at first.  own: by way
        """
        overall, record = self._overall[drafter][way], own[way]
        return (
            record.drafted.estimate(overall.drafted.estimate(prior=1.0), OVERALL_WEIGHT),
            record.accepted.estimate(overall.accepted.estimate(prior=1.0), OVERALL_WEIGHT),
        )

    def choose(self, options: Sequence[Option]) -> Choice:
        """The way and the rows to draft that minimise the expected mean time per token."""
        choices = [self._best(option) for option in options]
        chosen = min(choices, key=lambda choice: choice.seconds)
        self._num_steps += 1
        if self._num_steps % PROBE_INTERVAL:
            return chosen
        return self._probe(chosen, choices, options)

    def _best(self, option: Option) -> Choice:
        """The rows whose drafts make a way take least time per token; every row decodes one token anyway."""
        num_rows, limits = len(option.limits), option.limits
        drafted, accepted = self._expected(option)
        savings = 1 - 1 / (1 + accepted)  # steps per token
        order = np.argsort(-savings / (drafted + 1e-9), kind="stable")
        order = order[limits[order] > 0]
        mean_steps = 1 - np.concatenate([[0.0], np.cumsum(savings[order])]) / num_rows
        num_tokens = num_rows + np.concatenate([[0.0], np.cumsum(drafted[order])])
        times = mean_steps * self._seconds(option.way, num_tokens)
        best = int(np.argmin(times))
        # What is wanted is set aside in the step, so it must not be far more than what is likely to come.
        longest = np.minimum(limits, np.ceil(2 * drafted).astype(np.int64) + 2)
        lengths = np.zeros_like(limits)
        lengths[order[:best]] = longest[order[:best]]
        num_new = num_rows + float(accepted[order[:best]].sum())
        min_chance = self._min_chance(num_new / self._seconds(option.way, num_tokens)[best])
        return Choice(option.way, lengths, min_chance, float(times[best]))

    def _expected(self, option: Option) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens that are drafted and accepted in each row, the least chance being what pays without any."""
        num_rows = np.array([len(option.limits)], np.float64)
        plain = float((num_rows / self._seconds(option.way, num_rows))[0])
        drafted, accepted = yields(self._min_chance(plain))
        return (
            np.minimum(option.drafted * drafted, option.limits),
            np.minimum(option.accepted * accepted, option.limits),
        )

    def _min_chance(self, tokens_per_second: float) -> float:
        """From which a draft token pays: the tokens that are generated in the time it takes."""
        return min(self._cost.seconds * tokens_per_second, 1.0)

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
        self,
        drafter: int,
        way: Way,
        own: Sequence[Record],
        min_chance: float,
        num_drafted: int,
        num_accepted: int,
    ) -> None:
        """Take in how the draft fared that one row was asked for."""
        for record in (own[way], self._overall[drafter][way]):
            record.observe(min_chance, num_drafted, num_accepted)

    def observe_step(self, num_rows: int, num_drafts: int, seconds: float, way: Way | None) -> None:
        """Take in how long a step took that decoded in so many rows and verified so many drafts.

        way: in which drafts were asked for, whether any were found or not; None: none were.
        """
        seconds = self.times.observe(num_rows + num_drafts, seconds)
        (self._plain if way is None else self._drafting[way]).observe(num_rows + num_drafts, seconds)
        if way is not None:
            self._cost.observe(way, num_rows, num_drafts, seconds)

    def _seconds(self, way: Way, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a step without drafts, and of steps with more and more of them.

        num_tokens: [n] verified in them -> [n]
        """
        either = self._plain, self._drafting[way]
        plain, drafting = (times if times.known else self.times for times in either)
        seconds = plain.predict(num_tokens)  # with drafts it takes no less
        seconds[1:] = np.maximum(seconds[1:], drafting.predict(num_tokens[1:]))
        return seconds
