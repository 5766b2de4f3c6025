"""Learning rates as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then by kind down to `floor` at `total_steps`, where it stays.

    constant: stays at the peak.  linear, cosine: fall to the floor.
    inverse_sqrt: peak * sqrt(warmup / step), never below the floor.
    wsd (warm-up, stable, decay; MiniCPM, arXiv 2404.06395): stays at the peak, then falls linearly over the
      last `decay_steps`.
    """

    kind: Kind
    peak: float
    total_steps: int
    warmup_steps: int = 0
    floor: float = 0.0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not 0 <= self.floor <= self.peak:
            raise ValueError(f"floor must be between 0 and the peak {self.peak}, got {self.floor}")
        used = self.warmup_steps + (self.decay_steps if self.kind == "wsd" else 0)
        if not 0 <= used <= self.total_steps or self.warmup_steps < 0 or self.decay_steps < 0:
            raise ValueError(
                f"warmup_steps and decay_steps must fit in total_steps {self.total_steps}, got "
                f"{self.warmup_steps} and {self.decay_steps}"
            )

    def at(self, step: int) -> float:
        """The learning rate of a step, 0 being the first."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        if self.kind == "inverse_sqrt":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup_steps, 1) / (step + 1)))
        return self.floor + (self.peak - self.floor) * self._remaining(step)

    def _remaining(self, step: int) -> float:
        """Share of the way from the floor to the peak, 1 at the start of the decay."""
        start = self.total_steps - self.decay_steps if self.kind == "wsd" else self.warmup_steps
        done = min(max(step - start, 0) / max(self.total_steps - start, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
