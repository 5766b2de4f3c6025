"""Fast sampling of many rows: the tokens of ``sampling_rule``, without a pass over the vocabulary per row.

Most rows are decided by their head and bounds on the mass of their tail, which take a pass of maxima and
one of float32 exponentials.  The native kernel decides the others with double precision; torch leaves them
to the rule as it is written down.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.sampling_heads import (
    COARSE,
    FINE,
    HEAD_SIZE,
    PADDING,
    Columns,
    Head,
    HeadedRows,
    decide,
    head_of_keys,
    sort_keys,
    tail_mass,
)
from angelspec_backend.engine.sampling_rule import SamplingRows, sample_row
from angelspec_backend.engine.upload import upload

__all__ = ["UNDECIDED", "Columns", "SamplingRows", "sample", "sample_natively"]

UNDECIDED = -1
"""What native_sampling.h says of a row that is too close for it to decide."""
ROWS_AT_ONCE = 64
"""Rows whose logits torch widens together."""


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
    """``sample`` for at least one row.  On a GPU it waits often."""
    if not native.supports(logits.dtype, logits.device):
        return sample_with_torch(logits, rows)
    if not rows.temperature.any():
        return native.argmax(logits).numpy()
    tokens = sample_natively(logits, rows)
    left = np.flatnonzero(tokens == UNDECIDED)
    if len(left):
        tokens[left] = sample_with_torch(logits[torch.from_numpy(left)], rows[left])
    return tokens


def sample_natively(logits: Tensor, rows: SamplingRows, columns: Columns | None = None) -> NDArray[np.int32]:
    """One token per row by the kernel of native_sampling.h, or UNDECIDED: a near tie, or no finite maximum.

    logits: [n, num_columns] bf16 or fp32 on the CPU; rows: [n]; columns: None for the whole vocabulary.
    Returns [n].
    """
    logits = logits.contiguous()
    tokens = np.empty(len(rows), np.int32)
    values = (rows.seed, rows.position, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    dtypes = (np.uint64, np.int64, np.float32, np.int32, np.float32, np.float32)
    arrays = [np.ascontiguousarray(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
    of_columns = (columns.token_ids.ctypes.data, columns.classes.ctypes.data) if columns else (None, None)
    pointers = (array.ctypes.data for array in [*arrays, tokens])
    args = native.SampleArgs(logits.data_ptr(), *of_columns, *pointers)
    args.rows, args.columns = logits.shape
    args.vocab = columns.vocab_size if columns else args.columns
    args.num_threads = torch.get_num_threads()
    native.sample(args, logits.dtype)
    return tokens


def sample_with_torch(logits: Tensor, rows: SamplingRows) -> NDArray[np.int32]:
    """The same for any float dtype and device, and decided for every row.  [n, vocab], [n] -> [n]"""
    headed = torch_heads(logits, rows.temperature)
    if headed is None:
        lowest = torch.finfo(torch.float32).min
        return sample_with_torch(torch.nan_to_num(logits.float(), nan=lowest), rows)
    head = headed.head
    tokens = head.ids[:, 0].astype(np.int32)  # greedy: the largest logit, the lowest id on ties
    drawn = np.flatnonzero(rows.temperature > 0)
    if not len(drawn):
        return tokens
    low, high = tail_mass(headed.sums[:, drawn], head.count[drawn])
    decided, chosen = decide(head[drawn], rows[drawn], low, high)
    tokens[drawn[decided]] = chosen[decided]
    for row in drawn[~decided]:
        values = logits[row].float().cpu().numpy()
        tokens[row] = sample_row(values, float(headed.bound[row]), rows[row : row + 1])
    return tokens


def torch_heads(logits: Tensor, temperature: NDArray[np.float32]) -> HeadedRows | None:
    """The heads.  None if the largest logit of a row is not finite.  [n, vocab], [n]"""
    greedy = temperature == 0
    fine = class_maxima(logits, FINE)
    bound, largest = bounds(fine, greedy)  # [n, 1]
    if not bool(torch.isfinite(largest).all()):
        return None
    head = _select(logits, fine, bound)
    parts = [slice(at, at + ROWS_AT_ONCE) for at in range(0, len(logits), ROWS_AT_ONCE)]
    divisor = np.where(greedy, np.float32(1), temperature)
    wide = (logits[part].to(torch.float32, copy=True) for part in parts)
    sums = [
        clamped_sums(w, bound[p], largest[p].float(), divisor[p]) for w, p in zip(wide, parts, strict=True)
    ]
    return HeadedRows(head, bound[:, 0].float().cpu().numpy(), torch.cat(sums, 1).cpu().numpy())


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
