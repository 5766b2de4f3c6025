"""Documents of different lengths in rows of one length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Document = TypeVar("Document")


def pack(
    documents: Iterable[Document],
    length: Callable[[Document], int],
    capacity: int,
    min_fill: float = 0.0,
    max_waiting: int = 64,
) -> Iterator[list[Document]]:
    """Rows of documents, filled one after the other in the order of arrival (greedy next-fit).

    length: tokens of a document; capacity: tokens of a row
    min_fill: share of the row that must be filled before it is closed: documents that do not fit wait, and
      open the next rows, until a row is filled that far or max_waiting documents wait
    Once the documents have ended, the rest is given whatever its fill.
    Raises ValueError if a document is longer than a row.
    """
    waiting: deque[Document] = deque()
    row: list[Document] = []
    filled = 0
    for document in documents:
        if length(document) > capacity:
            raise ValueError(f"a document has {length(document)} tokens, a row only {capacity}")
        waiting.append(document)
        row, filled = _fill(row, filled, waiting, length, capacity)
        while waiting and (filled >= min_fill * capacity or len(waiting) > max_waiting):
            yield row
            row, filled = _fill([], 0, waiting, length, capacity)
    while row:
        yield row
        row, filled = _fill([], 0, waiting, length, capacity)


def _fill(
    row: list[Document],
    filled: int,
    waiting: deque[Document],
    length: Callable[[Document], int],
    capacity: int,
) -> tuple[list[Document], int]:
    """Move the waiting documents that fit into the row, first come, first served."""
    row = list(row)
    for _ in range(len(waiting)):
        document = waiting.popleft()
        if filled + length(document) <= capacity:
            row.append(document)
            filled += length(document)
        else:
            waiting.append(document)
    return row, filled


def row_layout(lengths: Sequence[int], size: int | None = None) -> tuple[Tensor, Tensor]:
    """Document ids and positions inside the document of a row's tokens, padded to `size` if given.

    Returns doc_ids [size], -1 for padding, and positions [size], int64; padding counts on from 0.
    Raises ValueError if the documents do not fit.
    """
    total = sum(lengths)
    padding = 0 if size is None else size - total
    if padding < 0:
        raise ValueError(f"the documents have {total} tokens, the row only {size}")
    doc_ids = [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)]
    return torch.cat(doc_ids), torch.cat([torch.arange(n) for n in (*lengths, padding)])
