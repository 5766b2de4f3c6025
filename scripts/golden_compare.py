"""Comparing what this project computes with what golden vectors say it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Tolerance = tuple[float, float]
"""Absolute and relative."""
HIDDEN, LOSS, GRADIENT = (2e-5, 1e-5), (1e-6, 1e-5), (2e-5, 1e-5)
"""Tolerances of float32 quantities."""


class Compare(Protocol):
    """What a check of one folder reports to."""

    def __call__(
        self, name: str, found: Tensor | None, expected: Tensor, tolerance: Tolerance | None = None
    ) -> None:
        """Note whether two tensors agree; without a tolerance exactly."""
        ...


@dataclass(frozen=True)
class Comparison:
    """The outcome of one comparison."""

    folder: str
    name: str
    error: float  # largest absolute difference; inf if the two cannot be compared
    tolerance: Tolerance | None
    passed: bool
    remark: str = ""


class Comparisons:
    """Collects the comparisons of one folder; call it as ``Compare`` says."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.all: list[Comparison] = []

    def __call__(
        self, name: str, found: Tensor | None, expected: Tensor, tolerance: Tolerance | None = None
    ) -> None:
        """See ``Compare``."""
        if found is None or found.shape != expected.shape:
            shape = None if found is None else tuple(found.shape)
            self.fail(name, f"shape {shape}, expected {tuple(expected.shape)}", tolerance)
            return
        difference = (found.detach().double() - expected.double()).abs()
        allowed = torch.zeros_like(difference)
        if tolerance is not None:
            allowed = tolerance[0] + tolerance[1] * expected.double().abs()
        error = float(difference.max()) if difference.numel() else 0.0
        passed = bool((difference <= allowed).all())  # NaN is never within a tolerance
        self.all.append(Comparison(self.folder, name, error, tolerance, passed))

    def fail(self, name: str, remark: str, tolerance: Tolerance | None = None) -> None:
        """Note something that could not be compared."""
        self.all.append(Comparison(self.folder, name, float("inf"), tolerance, False, remark))
