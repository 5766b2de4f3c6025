"""Rows of comparisons with stored vectors: (name, largest error, tolerance)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Row = tuple[str, float, float]


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The vectors of a folder and their description."""
    return load_file(folder / "vectors.safetensors"), json.loads((folder / "vectors.json").read_text())


def exact(name: str, got: Tensor, want: Tensor) -> Row:
    """Largest difference of what must be equal; infinite for another shape."""
    if got.shape != want.shape:
        return name, float("inf"), 0.0
    return name, float((got.double() - want.double()).abs().max()) if want.numel() else 0.0, 0.0


def close(name: str, got: Tensor, want: Tensor, atol: float = 1e-6, rtol: float = 1e-5) -> Row:
    """Largest difference beyond the relative tolerance."""
    excess = (got.detach().double() - want.double()).abs() - rtol * want.double().abs()
    return name, max(float(excess.max()), 0.0), atol


def gradient(name: str, got: Tensor | None, want: Tensor) -> Row:
    """`close` with the tolerances of gradients."""
    return close(name, torch.zeros_like(want) if got is None else got, want, 2e-5)
