"""Sampling of logits on a GPU: the tokens of ``sampling_rule`` with one copy to the host.

Waiting for a device costs more than arithmetic there.  So instead of narrowing down which rows need what,
as on the CPU, everything that may decide a row is computed for all rows and fetched at once.  Rows whose
token lies in the tail, a few in a hundred at temperature 1, need a second copy, of their logits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.engine.sampler import bounds, clamped_sums, class_maxima, sample_on_host
from angelspec_backend.engine.sampling_heads import (
    FINE,
    HEAD_SIZE,
    PADDING,
    Head,
    decide,
    head_of_keys,
    sort_keys,
    tail_mass,
)
from angelspec_backend.engine.sampling_rule import SamplingRows, sample_row

WIDTH = 2 * HEAD_SIZE
"""Likeliest tokens to fetch of each row; a head is rarely larger."""


def sample_on_device(logits: Tensor, rows: SamplingRows) -> NDArray[np.int32]:
    """``sampler.sample`` for at least one row.  logits: [n, vocab]; rows: [n].  Returns token ids [n]."""
    greedy = rows.temperature == 0
    likeliest = logits.max(-1)  # of equal logits the first
    if greedy.all():
        both = torch.stack([likeliest.indices, torch.isfinite(likeliest.values)]).cpu().numpy()
        return both[0].astype(np.int32) if both[1].all() else sample_on_host(logits, rows)

    bound, largest = bounds(class_maxima(logits, FINE), greedy)  # [n, 1]
    top = logits.topk(min(WIDTH, logits.shape[1]))  # [n, width]
    temperature = np.where(greedy, np.float32(1), rows.temperature)
    sums = clamped_sums(logits.to(torch.float32, copy=True), bound, largest.float(), temperature)  # [2, n]
    num_in_head = (logits >= bound).sum(-1)  # [n]
    columns = (likeliest.indices, num_in_head, _bits(bound[:, 0]), _bits(largest[:, 0]), *map(_bits, sums))
    fetched = (
        torch.cat([torch.stack(columns, 1).int(), top.indices.int(), _bits(top.values)], 1).cpu().numpy()
    )
    tokens, count = fetched[:, 0].copy(), fetched[:, 1].astype(np.int64)
    bound_of, highest, total, weight = np.ascontiguousarray(fetched[:, 2:6].T).view(np.float32)
    if not np.isfinite(highest).all():
        return sample_on_host(logits, rows)
    ids, value_bits = np.split(fetched[:, 6:], 2, axis=1)
    head = _head(ids.astype(np.int64), np.ascontiguousarray(value_bits).view(np.float32), count)

    low, high = tail_mass(np.stack([total, weight]), count)
    drawn = np.flatnonzero(~greedy & (count <= head.ids.shape[1]))
    is_open = ~greedy
    if len(drawn):
        decided, chosen = decide(head[drawn], rows[drawn], low[drawn], high[drawn])
        tokens[drawn[decided]] = chosen[decided]
        is_open[drawn[decided]] = False
    rest = np.flatnonzero(is_open)
    if len(rest):
        whole = logits.index_select(0, torch.from_numpy(rest).to(logits.device)).float().cpu().numpy()
        for row, row_logits in zip(rest, whole, strict=True):
            tokens[row] = sample_row(row_logits, float(bound_of[row]), rows[row : row + 1])
    return tokens


def _bits(values: Tensor) -> Tensor:
    """The bits of float32 values as integers, so that ids and values travel in one tensor."""
    return values.float().contiguous().view(torch.int32)


def _head(ids: NDArray[np.int64], values: NDArray[np.float32], count: NDArray[np.int64]) -> Head:
    """The heads from the likeliest tokens in falling order.  ids, values: [n, width]; count: [n]"""
    keys = sort_keys(values, ids)
    keys[np.arange(ids.shape[1]) >= count[:, None]] = PADDING
    return head_of_keys(keys, count)
