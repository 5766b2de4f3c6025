"""The sampling rule, written down for one row: which token is sampled from given logits.

The token is a pure function of the row's logits, its parameters, its seed and its position: of nothing
else in the batch, and not of how often or in which process it is computed.  Logits are processed as
in transformers and in its order: temperature, top_k (ties with the k-th token stay), top_p, min_p.

A row of the vocabulary splits at its bound into a head of the likeliest tokens and a tail.  Each head
token has Gumbel noise of its own (Gumbel-max).  The tail is one candidate: the largest of its perturbed
logits is distributed as logsumexp(tail) + Gumbel, and the token that attains it as softmax(tail),
independently of that (Maddison, Tarlow, Minka: A* sampling, 2014, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.noise import TAIL_GUMBEL, TAIL_TOKEN, gumbel, stream_keys, uniform


@dataclass(frozen=True)
class SamplingRows:
    """How to sample each row of a logits matrix.  All arrays are [n]."""

    seed: NDArray[np.uint64]
    position: NDArray[np.int64]  # of the token that is sampled
    temperature: NDArray[np.float32]  # 0: greedy
    top_k: NDArray[np.int32]  # 0: off
    top_p: NDArray[np.float32]  # 1: off
    min_p: NDArray[np.float32]  # 0: off

    @staticmethod
    def from_rows(rows: NDArray[np.void], counts: NDArray[Any], first_position: NDArray[Any]) -> SamplingRows:
        """Spread the parameters of sequences over their logits rows.

        rows: [num_rows] of ROW; counts: [num_rows] logits rows of each, at consecutive positions;
        first_position: [num_rows] position of the token that the first of them samples.
        """
        row_of, offset = ragged(counts)
        names = ("seed", "temperature", "top_k", "top_p", "min_p")
        return SamplingRows(
            position=np.asarray(first_position, np.int64)[row_of] + offset,
            **{name: rows[name][row_of] for name in names},
        )

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, index: Any) -> SamplingRows:
        """Some of the rows, as NumPy indexes."""
        return SamplingRows(**{name: array[index] for name, array in vars(self).items()})

    @property
    def restricted(self) -> NDArray[np.bool_]:
        """[n] rows whose parameters may exclude tokens."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def sample_row(values: NDArray[np.float32], bound: float, row: SamplingRows) -> int:
    """Sample one token at temperature > 0.

    values: [vocab] finite logits or -inf; bound: at most the largest, tokens at or above it are the head;
    row: of length 1.
    """
    logits = values.astype(np.float64)
    logits -= logits.max()
    logits /= row.temperature.astype(np.float64)
    in_head = values >= bound
    excluded = ~kept_tokens(values, row) if row.restricted[0] else np.zeros(len(values), bool)
    key = stream_keys(row.seed, row.position)

    head = np.flatnonzero(in_head & ~excluded)
    scores = logits[head] + gumbel(key, head)
    best = int(scores.argmax())
    tail = np.flatnonzero(~(in_head | excluded))
    cumulative = np.cumsum(np.exp(logits[tail]))
    mass = cumulative[-1] if len(tail) else 0
    if mass == 0 or np.log(mass) + gumbel(key, np.array([TAIL_GUMBEL]))[0] <= scores[best]:
        return int(head[best])
    target = uniform(key, np.array([TAIL_TOKEN]))[0] * mass
    return int(tail[np.searchsorted(cumulative, target, side="right")])


def kept_tokens(values: NDArray[np.float32], row: SamplingRows) -> NDArray[np.bool_]:
    """The tokens that top_k, top_p and min_p leave: the likeliest ones, with ties the lower ids.

    values: [vocab]; row: of length 1.  Returns [vocab], at least one of them True.
    """
    ordered = -np.sort(-values)
    logits = ordered.astype(np.float64)
    weights = np.exp((logits - logits[0]) / row.temperature.astype(np.float64))
    top_k = int(row.top_k[0])
    kept = ordered >= ordered[min(top_k, len(ordered)) - 1] if top_k > 0 else np.ones(len(values), bool)
    candidates = weights * kept
    cumulative = np.cumsum(candidates)
    if row.top_p[0] < 1:
        kept &= cumulative - candidates < row.top_p.astype(np.float64) * cumulative[-1]
    kept &= weights >= row.min_p
    kept[0] = True

    # What is kept is a prefix of the order; of the tokens equal to its last one only the first may be in it.
    count = int(kept.sum())
    last = ordered[count - 1]
    above = values > last
    equal = np.flatnonzero(values == last)
    above[equal[: count - int(above.sum())]] = True
    return above
