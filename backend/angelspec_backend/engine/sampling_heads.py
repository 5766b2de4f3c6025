"""Heads of rows of logits, and which tokens they decide.

The head of a row are its likeliest tokens, all at or above a bound; the tail is the rest.  Most rows are
decided by their head and bounds on the mass of their tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.engine.noise import TAIL_GUMBEL, gumbel, stream_keys
from angelspec_backend.engine.sampling_rule import SamplingRows

HEAD_SIZE = 128
"""Tokens in a head, roughly: the bound is the HEAD_SIZE-th largest of the coarse classes' maxima."""
FINE, COARSE = 16, 4
"""Tokens in a fine class, fine classes in a coarse one.  These three are mirrored in native_heads.h."""
SLACK = 1e-4
"""Relative error allowed to a sum of float32 exponentials; the real one is below 2e-5.  Mirrored too."""
PADDING = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Head:
    """The tokens at or above each row's bound, likeliest first, the lower id first on ties."""

    ids: NDArray[np.int64]  # [n, width]
    logits: NDArray[np.float64]  # [n, width] relative to the largest, not divided by the temperature
    count: NDArray[np.int64]  # [n] tokens in the head, the rest of the width is padding with -inf

    def __getitem__(self, index: Any) -> Head:
        return Head(self.ids[index], self.logits[index], self.count[index])


@dataclass(frozen=True)
class HeadedRows:
    """What decides most rows of logits."""

    head: Head
    bound: NDArray[np.float32]  # [n] where each head ends
    sums: NDArray[np.float32]  # [2, n] see ``sampler.clamped_sums``; of greedy rows they mean nothing


@dataclass(frozen=True)
class Columns:
    """Some tokens of a vocabulary, in ascending order: those that a matrix of logits has columns for."""

    token_ids: NDArray[np.int64]  # [num_columns]
    classes: NDArray[np.int32]  # [num_columns] the coarse class of each
    vocab_size: int

    @staticmethod
    def of(token_ids: NDArray[np.int64], vocab_size: int) -> Columns:
        """token_ids: [num_columns] distinct, ascending"""
        num_fine = -(-vocab_size // FINE)
        classes = token_ids % num_fine % -(-num_fine // COARSE)
        return Columns(np.ascontiguousarray(token_ids), classes.astype(np.int32), vocab_size)


def head_of_keys(table: NDArray[np.uint64], count: NDArray[np.int64]) -> Head:
    """Order the heads.

    table: [n, width] sort keys, overwritten, PADDING where there is no token; count: [n].
    """
    table.sort(axis=1)
    head_ids, head_values = _decode_keys(table)
    relative = np.where(table == PADDING, -np.inf, head_values - head_values[:, :1])
    return Head(head_ids, relative, count)


def sort_keys(values: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys that sort by falling value, then by rising id.  [n], [n] -> [n]"""
    bits = (values + np.float32(0)).view(np.uint32)  # + 0 makes -0 equal to 0
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (~rising).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)


def _decode_keys(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids and values of sort keys."""
    rising = ~(keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(rising >> 31, rising ^ np.uint32(1 << 31), ~rising)
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64), bits.view(np.float32).astype(np.float64)


def tail_mass(
    sums: NDArray[np.float32], head_count: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """An interval that holds the mass of each row's tail, relative to its largest logit.

    sums: [2, n] ``sampler.clamped_sums``; head_count: [n].  Returns [n], [n].
    """
    total, weight = sums.astype(np.float64)
    # Every head token counts as if it were at the bound, and that is subtracted again.
    mass, error = total - head_count * weight, SLACK * total
    return np.maximum(mass - error, 0), np.maximum(mass, 0) + error + 1e-30


def decide(
    head: Head, rows: SamplingRows, low: NDArray[np.float64], high: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which rows the head decides, and their tokens, when the tail's mass lies in [low, high].

    A row is decided if its best token is kept and beats the tail for every mass in the interval.
    head, rows, low, high: [n]; the token of an undecided row means nothing.
    """
    n, width = head.ids.shape
    logits = head.logits / rows.temperature.astype(np.float64)[:, None]
    weights = np.exp(logits)
    top_k = rows.top_k
    k_in_head = (top_k > 0) & (top_k <= head.count)
    kth = head.logits[np.arange(n), np.clip(top_k, 1, width) - 1]
    kept = ~k_in_head[:, None] | (head.logits >= kth[:, None])
    candidates = weights * kept
    cumulative = np.cumsum(candidates, axis=1)
    preceding, mass = cumulative - candidates, cumulative[:, -1]

    top_p = np.where(rows.top_p < 1, rows.top_p.astype(np.float64), np.inf)
    low, high = np.where(top_k > 0, 0, low), np.where(k_in_head, 0, high)
    kept &= weights >= rows.min_p[:, None]
    possible = kept & (preceding < (top_p * (mass + high))[:, None])
    certain = kept & (preceding < (top_p * (mass + low))[:, None])
    possible[:, 0] = certain[:, 0] = True

    keys = stream_keys(rows.seed, rows.position)[:, None]
    scores = np.where(possible, logits + gumbel(keys, head.ids), -np.inf)
    best = scores.argmax(1)
    smallest = weights[np.arange(n), head.count - 1]
    no_tail = k_in_head | (mass >= top_p * (mass + high)) | (smallest < rows.min_p)
    tail_score = np.log(np.maximum(high, 1e-300)) + gumbel(keys, np.array([TAIL_GUMBEL]))[:, 0]
    wins = no_tail | (scores[np.arange(n), best] > tail_score)
    return certain[np.arange(n), best] & wins, head.ids[np.arange(n), best]
