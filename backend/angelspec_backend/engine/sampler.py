"""Fast sampling of many rows: the tokens of ``sampling_rule``, without a pass over the vocabulary per row.

Most rows are decided by their head and bounds on the mass of their tail.  Vocabulary-wide work is two
passes of maxima; exponentials of the vocabulary are taken only for the few rows that stay open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.noise import TAIL_GUMBEL, gumbel, stream_keys
from angelspec_backend.engine.sampling_rule import SamplingRows, sample_row
from angelspec_backend.engine.upload import upload

__all__ = ["SamplingRows", "sample"]

HEAD_SIZE = 128
"""Tokens in a head, roughly: the bound is the HEAD_SIZE-th largest of the coarse classes' maxima."""
FINE, COARSE = 16, 4
"""Tokens in a fine class, fine classes in a coarse one."""
SLACK = 1e-4
"""Relative error allowed to a sum of float32 exponentials; the real one is below 2e-5."""
PADDING = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Head:
    """The tokens at or above each row's bound, likeliest first, the lower id first on ties."""

    ids: NDArray[np.int64]  # [n, width]
    logits: NDArray[np.float64]  # [n, width] relative to the largest, not divided by the temperature
    count: NDArray[np.int64]  # [n] tokens in the head, the rest of the width is padding with -inf

    def __getitem__(self, index: Any) -> Head:
        return Head(self.ids[index], self.logits[index], self.count[index])


def sample(logits: Tensor, rows: SamplingRows) -> NDArray[np.int32]:
    """Sample one token per row.

    logits: [n, vocab] of any float dtype on any device, NaN counting as impossible; rows: [n].
    Returns token ids [n].
    """
    if not len(rows):
        return np.zeros(0, np.int32)
    if logits.dtype == torch.float64:
        logits = logits.float()
    if logits.device.type == "cuda":
        from angelspec_backend.engine.device_sampler import sample_on_device  # it builds on this module

        return sample_on_device(logits, rows)
    return sample_on_host(logits, rows)


def sample_on_host(logits: Tensor, rows: SamplingRows) -> NDArray[np.int32]:
    """``sample`` for at least one row, with as little arithmetic as can be.  On a GPU it waits often."""
    greedy = rows.temperature == 0
    if greedy.all() and native.supports(logits.dtype, logits.device):
        return native.argmax(logits).numpy()
    fine = class_maxima(logits, FINE)
    bound, largest = bounds(fine, greedy)  # [n, 1]
    if not bool(torch.isfinite(largest).all()):
        lowest = torch.finfo(torch.float32).min
        return sample_on_host(torch.nan_to_num(logits.float(), nan=lowest), rows)
    head = _select(logits, fine, bound)
    tokens = head.ids[:, 0].astype(np.int32)  # greedy: the largest logit, the lowest id on ties

    open_rows = np.flatnonzero(~greedy)
    for exact in (False, True):
        if not len(open_rows):
            return tokens
        index = torch.from_numpy(open_rows).to(logits.device)
        values = (logits if exact else fine).index_select(0, index).float()
        part, part_head = rows[open_rows], head[open_rows]
        sums = clamped_sums(values, bound[index], largest[index], part.temperature).cpu().numpy()
        low, high = tail_mass(sums, part_head.count, exact)
        decided, chosen = decide(part_head, part, low, high)
        tokens[open_rows[decided]] = chosen[decided]
        open_rows = open_rows[~decided]
    for row in open_rows:
        tokens[row] = sample_row(logits[row].float().cpu().numpy(), float(bound[row]), rows[row : row + 1])
    return tokens


def class_maxima(values: Tensor, size: int) -> Tensor:
    """The maximum of each class; class c holds the columns c, c + num_classes, c + 2 * num_classes, ...

    Strided classes make this an elementwise maximum of long vectors.  [n, columns] -> [n, num_classes]
    """
    num_classes = -(-values.shape[1] // size)
    whole = (size - 1) * num_classes
    if whole > values.shape[1]:  # a small vocabulary: each column is a class
        return values
    maxima = values[:, :whole].unflatten(1, (size - 1, num_classes)).amax(1)
    rest = values[:, whole:]
    part = maxima[:, : rest.shape[1]]
    torch.maximum(part, rest, out=part)
    return maxima


def bounds(fine: Tensor, greedy: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Where each head ends, and each row's largest logit.  [n, num_classes] -> [n, 1], [n, 1]

    A greedy row's head is its largest logit alone.
    """
    coarse = class_maxima(fine, COARSE)
    lowest = torch.finfo(fine.dtype).min
    if greedy.all() or coarse.shape[1] < HEAD_SIZE:
        largest = coarse.amax(-1, keepdim=True)
        bound = torch.full_like(largest, lowest)
    else:
        top = coarse.topk(HEAD_SIZE, sorted=False).values
        largest = top.amax(-1, keepdim=True)
        bound = top.amin(-1, keepdim=True).clamp(min=lowest)  # -inf never is in a head
    is_greedy = upload([greedy], fine.device)[0][:, None]
    return torch.where(is_greedy, largest, bound), largest


def _select(logits: Tensor, fine: Tensor, bound: Tensor) -> Head:
    """Find and order the head of every row.  [n, vocab], [n, num_classes], [n, 1]"""
    n, vocab = logits.shape
    num_classes = fine.shape[1]
    row, of_class = (fine >= bound).nonzero(as_tuple=True)  # [hits]
    members = torch.arange(0, vocab, num_classes, device=fine.device)  # [FINE or 1]
    index = (row * vocab + of_class)[:, None] + members  # [hits, FINE or 1] into the flat logits
    values = logits.reshape(-1)[index.clamp_(max=logits.numel() - 1)]
    values[:, -1].masked_fill_(of_class + members[-1] >= vocab, -torch.inf)  # some classes lack a last member
    hit = (values >= bound[row]).view(-1).nonzero()[:, 0]
    row_of, ids = np.divmod(index.view(-1)[hit].cpu().numpy(), vocab)
    keys = sort_keys(values.view(-1)[hit].float().cpu().numpy(), ids)

    count = np.bincount(row_of, minlength=n)
    table = np.full((n, int(count.max())), PADDING)
    table[ragged(count)] = keys  # the hits are in row order
    return head_of_keys(table, count)


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


def clamped_sums(values: Tensor, bound: Tensor, largest: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    """Per row the sum of exp((value - largest) / temperature), values above the bound counting as the bound.

    values: float32, overwritten, [n, columns]; bound, largest: [n, 1]; temperature: [n].
    Returns on the same device [2, n]: these sums, and the weight of a value at the bound.
    """
    scale = (1 / upload([temperature], values.device)[0])[:, None]
    at_bound = (bound.float() - largest) * scale
    weights = values.sub_(largest).mul_(scale)
    sums = torch.minimum(weights, at_bound, out=weights).exp_().sum(-1)
    return torch.stack([sums, at_bound[:, 0].exp()])


def tail_mass(
    sums: NDArray[np.float32], head_count: NDArray[np.int64], exact: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """An interval that holds the mass of each row's tail, relative to its largest logit.

    sums: [2, n] ``clamped_sums`` of the logits if exact, else of the maxima of the fine classes, which limit
    the tail from above; head_count: [n].  Returns [n], [n].
    """
    total, weight = sums.astype(np.float64) * np.array([[1 if exact else FINE], [1]])
    # Every head token counts as if it were at the bound, and that is subtracted again.
    mass, error = total - head_count * weight, SLACK * total
    low = np.maximum(mass - error, 0) if exact else np.zeros_like(mass)
    return low, np.maximum(mass, 0) + error + 1e-30


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
