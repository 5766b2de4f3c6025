"""How drafts fared so far, and what that says of the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

OVERALL_WEIGHT = 4.0
"""Drafts that the record of all sequences counts beside a sequence's own."""


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

    def observe(self, hits: float, tries: float) -> None:
        """Take in some tries."""
        self.hits = self.hits * self.fading + hits
        self.tries = self.tries * self.fading + tries

    def estimate(self, prior: float, weight: float = 1.0) -> float:
        """The chance, starting from a prior that counts as ``weight`` tries."""
        return (self.hits + prior * weight) / (self.tries + weight)


class Fared(NamedTuple):
    """A draft that was asked for, be it empty."""

    min_chance: float
    num_drafted: int
    num_accepted: int


@dataclass
class Record:
    """How the drafts of one sequence, or of all sequences with one drafter, fared.

    How much is drafted depends on the chance that a token must have.  Where each draft token is as likely to
    be right as the one before, log(1 / min_chance) of them are wanted, up to a factor, and 1 - min_chance are
    accepted.  That is taken to hold, so that what is learnt at one chance says what to expect at another.
    """

    fading: float
    drafted: Share = field(init=False)
    accepted: Share = field(init=False)

    def __post_init__(self) -> None:
        self.drafted, self.accepted = Share(self.fading), Share(self.fading)

    def observe(self, fared: Fared) -> None:
        """Take in a draft."""
        drafted, accepted = yields(fared.min_chance)
        self.drafted.observe(fared.num_drafted, drafted)
        self.accepted.observe(fared.num_accepted, accepted)

    def led_by(self, overall: Record) -> tuple[float, float]:
        """Tokens that a draft has, and that are right, over ``yields``."""
        return (
            self.drafted.estimate(overall.drafted.estimate(prior=1.0), OVERALL_WEIGHT),
            self.accepted.estimate(overall.accepted.estimate(prior=1.0), OVERALL_WEIGHT),
        )


def yields(min_chance: float) -> tuple[float, float]:
    """How many tokens are drafted and accepted, up to a factor for each, see ``Record``."""
    chance = min(max(min_chance, 0.02), 0.98)
    return float(-np.log(chance)), 1 - chance


class Promise(NamedTuple):
    """What is expected of a draft.  Tokens are over ``yields``."""

    drafted: float
    accepted: float
    asked: float  # chance that the drafter's network is asked for it


class Records:
    """How the drafts of one sequence, or of all sequences with one drafter, fared, by who made them."""

    def __init__(self, fading: float) -> None:
        self._network = Record(fading)  # drafts that it was asked for
        self._lookup = Record(fading)  # drafts of all steps, empty where nothing was found
        self._found = Share(fading)  # how often something was

    def observe(self, way: Way, looks_up_first: bool, looked_up: bool, fared: Fared) -> None:
        """Take in a draft.  looks_up_first: see ``expected``; looked_up: whether it was"""
        if looks_up_first:
            self._found.observe(looked_up, 1)
            self._lookup.observe(fared if looked_up else Fared(fared.min_chance, 0, 0))
        if not looked_up and (way is Way.NETWORK or not looks_up_first):
            self._network.observe(fared)

    def expected(self, overall: Records, way: Way, looks_up_first: bool) -> Promise:
        """Of the next draft, led by the records of all sequences while there are few here.

        looks_up_first: whether the drafter asks its network only where it finds nothing.
        """
        drafted, accepted = self._network.led_by(overall._network)
        if not looks_up_first:
            return Promise(drafted, accepted, 1.0)
        found = self._lookup.led_by(overall._lookup)
        if way is Way.LOOKUP:
            return Promise(*found, 0.0)
        missing = 1 - self._found.estimate(overall._found.estimate(prior=0.5), OVERALL_WEIGHT)
        return Promise(found[0] + missing * drafted, found[1] + missing * accepted, missing)
