"""Counter-based noise: every number is a pure function of (seed, position, counter), with no state.

Splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) three times over:
the seed starts a sequence, the position picks an element of it that starts the next one, and the
counter (a token id) picks an element of that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TAIL_GUMBEL = 1 << 32
"""Counter of the noise shared by all tokens that have none of their own; token ids are smaller."""
TAIL_TOKEN = TAIL_GUMBEL + 1
"""Counter of the uniform that picks one of those tokens."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def stream_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key per (seed, position).  [n], [n] -> [n]"""
    zero = np.zeros(1, np.uint64)
    return _element(_element(seeds, zero), positions.astype(np.uint64))


def uniform(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in the open interval (0, 1).  Shapes broadcast."""
    bits = _element(keys, counters.astype(np.uint64))
    # 52 bits and a half: neither 0 nor, after rounding, 1 can come out.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise.  Shapes broadcast."""
    return -np.log(-np.log(uniform(keys, counters)))


def _element(starts: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Element ``index`` of the splitmix64 sequence that begins at ``start``."""
    x = starts + (indices + np.uint64(1)) * _STEP
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])
