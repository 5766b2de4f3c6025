"""What a training step computes: the terms of every draft of every block, whatever the kind of drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.training.batches import Batch
from angelspec_backend.training.losses import Terms
from angelspec_backend.training.metrics import Survival, survival


@dataclass(frozen=True)
class DraftTerms:
    """Of all blocks of a batch; the rows of a chain drafter are blocks of ``num_steps`` drafts."""

    terms: Terms  # [blocks, drafts]
    valid: Tensor  # [blocks, drafts] bool: drafts that are supervised
    documents: Tensor  # [blocks] index in the batch's documents
    confidence: Tensor | None = None  # [blocks, drafts] of a confidence head, before the sigmoid

    def survival(self, blocks: Tensor | None = None) -> Survival:
        """How far greedy drafts get; of some blocks if given ([blocks] bool)."""
        accept = self.terms.hit & self.terms.reachable
        if blocks is None:
            return survival(accept, self.valid)
        return survival(accept[blocks], self.valid[blocks])


@dataclass(frozen=True)
class Loss:
    """A scalar to minimise, and what it is made of."""

    total: Tensor
    parts: dict[str, Tensor]


def each(function: Callable[..., Tensor], *terms: Terms) -> Terms:
    """A function of tensors applied to all terms that there are, of one object or several alike."""
    columns = {field.name: [getattr(one, field.name) for one in terms] for field in fields(Terms)}
    made: dict[str, Any] = {
        name: None if values[0] is None else function(*values) for name, values in columns.items()
    }
    return Terms(**made)


def spread(terms: Terms, index: Tensor, size: int) -> Terms:
    """Terms of some positions among zeros.  terms: [n]; index: [n] their places in [size]."""
    return each(lambda value: value.new_zeros(size).index_put((index,), value), terms)


def stack(steps: Sequence[Terms], rows: Tensor) -> Terms:
    """Terms of several steps as columns, of some rows.  steps: [n] each; rows: [m] -> [m, steps]"""
    return each(lambda *values: torch.stack(values, 1)[rows], *steps)


def column(terms: Terms, step: int) -> Terms:
    """Terms of one draft of every block.  [blocks, drafts] -> [blocks]"""
    return each(lambda value: value[:, step], terms)


def row_generators(seeds: list[int]) -> list[torch.Generator]:
    """A generator of random numbers for each row."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def num_anchors(batch: Batch, density: float) -> list[int]:
    """Blocks that each document gets: ``density`` per token to be predicted, at least one."""
    counts = torch.bincount(batch.document_ids[batch.supervised], minlength=len(batch.documents))
    return [max(round(density * count), 1) for count in counts.tolist()]
