"""Which documents a training step sees: packed rows in an order that the seed, and nothing else, decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from angelspec_backend.training.corpus import Corpus
from angelspec_backend.training.packing import pack

MIN_FILL = 0.95
"""Share of a row that documents fill before the next row begins."""


@dataclass(frozen=True)
class Batch:
    """Some rows, each several documents one after the other, without padding."""

    documents: tuple[int, ...]  # indexes in the corpus
    token_ids: Tensor  # [n] int64, all rows one after the other
    supervised: Tensor  # [n] bool
    document_ids: Tensor  # [n] index in ``documents``
    positions: Tensor  # [n] within the document
    places: Tensor  # [rows, longest row] index into the above, -1: padding

    def rows(self, values: Tensor, filler: int = 0) -> Tensor:
        """Values of tokens as padded rows.  values: [n, ...] -> [rows, longest row, ...]"""
        taken = values[self.places.clamp(min=0)]
        padding = (self.places < 0).view(*self.places.shape, *[1] * (values.dim() - 1))
        return taken.masked_fill(padding, filler)

    def lens(self) -> list[int]:
        """Tokens of each document."""
        return torch.bincount(self.document_ids, minlength=len(self.documents)).tolist()


class BatchSource:
    """The batch of any step, computed from the step alone, so that training can go on at any of them."""

    def __init__(
        self,
        corpus: Corpus,
        row_length: int,
        rows_per_step: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """rows_per_step: of all processes together; this one, of number ``rank``, gets its share.

        Raises:
            ValueError: rows cannot be shared equally, or the corpus does not fill one step.
        """
        if rows_per_step % world_size:
            raise ValueError(f"rows_per_step is {rows_per_step}, which {world_size} processes cannot share")
        self.corpus, self.row_length, self.rows_per_step = corpus, row_length, rows_per_step
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._epochs: list[list[list[int]]] = []
        self._first_steps = [0]
        self._add_epoch()

    @property
    def steps_per_epoch(self) -> int:
        """Of the first epoch; the others differ by how well the rows fill."""
        return self._first_steps[1]

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        while step >= self._first_steps[-1]:
            self._add_epoch()
        return int(np.searchsorted(self._first_steps, step, side="right")) - 1

    def rows_of(self, step: int) -> list[list[int]]:
        """The documents of each row of this process."""
        epoch = self.epoch_of(step)
        start = (step - self._first_steps[epoch]) * self.rows_per_step
        return self._epochs[epoch][start : start + self.rows_per_step][self._rank :: self._world_size]

    def batch(self, step: int) -> Batch:
        """The rows of a step, counted from 0 over all epochs."""
        return make_batch(self.corpus, self.rows_of(step))

    def row_seeds(self, step: int) -> list[int]:
        """A seed for each row of this process, the same whichever process has the row."""
        first = step * self.rows_per_step
        numbers = range(first, first + self.rows_per_step)[self._rank :: self._world_size]
        return [int(np.random.SeedSequence([self._seed, n]).generate_state(1)[0]) for n in numbers]

    def _add_epoch(self) -> None:
        order = np.random.default_rng([self._seed, len(self._epochs)]).permutation(len(self.corpus.documents))
        lengths = self.corpus.lengths
        rows = list(pack(order.tolist(), lambda index: int(lengths[index]), self.row_length, MIN_FILL))
        steps = len(rows) // self.rows_per_step
        if not steps:
            raise ValueError(
                f"the corpus fills {len(rows)} rows of {self.row_length} tokens, "
                f"but a step takes {self.rows_per_step}"
            )
        self._epochs.append(rows)
        self._first_steps.append(self._first_steps[-1] + steps)


def make_batch(corpus: Corpus, rows: list[list[int]]) -> Batch:
    """Rows of documents as one batch."""
    indexes = [index for row in rows for index in row]
    documents = [corpus.documents[index] for index in indexes]
    lens = np.array([len(document) for document in documents])
    row_lens = [sum(len(corpus.documents[index]) for index in row) for row in rows]
    places = np.full((len(rows), max(row_lens)), -1)
    places[np.arange(places.shape[1]) < np.array(row_lens)[:, None]] = np.arange(lens.sum())
    return Batch(
        tuple(indexes),
        torch.from_numpy(np.concatenate([document.token_ids for document in documents]).astype(np.int64)),
        torch.from_numpy(np.concatenate([document.supervised for document in documents])),
        torch.from_numpy(np.repeat(np.arange(len(documents)), lens)),
        torch.from_numpy(np.concatenate([np.arange(length) for length in lens])),
        torch.from_numpy(places),
    )
