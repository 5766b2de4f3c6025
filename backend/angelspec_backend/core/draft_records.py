"""How drafts fared so far, and what that says of the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


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

    def observe(self, min_chance: float, num_drafted: int, num_accepted: int) -> None:
        """Take in a draft that was asked for, be it empty."""
        drafted, accepted = yields(min_chance)
        self.drafted.observe(num_drafted, drafted)
        self.accepted.observe(num_accepted, accepted)


def yields(min_chance: float) -> tuple[float, float]:
    """How many tokens are drafted and accepted, up to a factor for each, see ``Record``."""
    chance = min(max(min_chance, 0.02), 0.98)
    return float(-np.log(chance)), 1 - chance


class Records:
    """How the drafts of one sequence, or of all sequences with one drafter, fared, by who made them."""

    def __init__(self, fading: float) -> None:
        self.network = Record(fading)  # drafts that it was asked for
        self.lookup = Record(fading)  # drafts of all steps, empty where nothing was found
        self.found = Share(fading)  # how often something was
