"""Drives a model runner through random steps of every kind, for tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine.batch import PackedBatch, pack


class Piece:
    """What one row computes: tokens of a text from ``start`` on, the last ``drafts`` of them as drafts."""

    def __init__(self, text: int, start: int, tokens: np.ndarray, drafts: int = 0) -> None:
        self.text, self.start, self.tokens, self.drafts = text, start, tokens.astype(np.int32), drafts

    @property
    def logit_positions(self) -> range:
        """Positions whose logits the step returns."""
        end = self.start + len(self.tokens)
        return range(end - self.drafts - 1, end)


def batch_of(pieces: list[Piece], tables: np.ndarray, block_size: int) -> PackedBatch:
    """Pack pieces as sampling rows.  tables: [num_texts, blocks_per_text] block ids."""
    rows = np.zeros(len(pieces), ROW)
    lens = np.array([piece.drafts for piece in pieces], np.int32)
    rows["num_computed"] = [piece.start for piece in pieces]
    rows["num_tokens"] = [len(piece.tokens) - piece.drafts for piece in pieces]
    rows["sample"], rows["num_draft_tokens"], rows["num_blocks"] = 1, lens, tables.shape[1]
    known = np.concatenate([piece.tokens[: len(piece.tokens) - piece.drafts] for piece in pieces])
    drafts = np.concatenate([piece.tokens[len(piece.tokens) - piece.drafts :] for piece in pieces])
    table = np.concatenate([tables[piece.text] for piece in pieces])
    return pack(rows, known, DraftOutput.of(drafts, lens), table, block_size)


def random_tables(
    rng: np.random.Generator, num_texts: int, length: int, block_size: int, num_blocks: int
) -> np.ndarray:
    """Shuffled, disjoint blocks for every text.  [num_texts, blocks_per_text]"""
    per_text = -(-length // block_size)
    return 1 + rng.permutation(num_blocks - 1)[: num_texts * per_text].reshape(num_texts, per_text)


def random_steps(rng: np.random.Generator, texts: np.ndarray, vocab: int) -> Iterator[list[Piece]]:
    """Steps that compute all texts: chunks, single tokens, and drafts of which some are wrong.

    A wrong draft is rolled back: the next piece of its text starts right behind the accepted ones.
    """
    computed = np.zeros(len(texts), int)
    while (computed < texts.shape[1]).any():
        step = []
        for text in rng.permutation(np.flatnonzero(computed < texts.shape[1]))[
            : rng.integers(1, len(texts) + 1)
        ]:
            start = int(computed[text])
            count = int(min(rng.choice([1, 1, 2, 3, 5, 9]), texts.shape[1] - start))
            tokens = texts[text, start : start + count].copy()
            drafts = count - 1 if rng.random() < 0.5 else 0
            accepted = count
            if drafts and rng.random() < 0.7:
                accepted = int(rng.integers(1, count))
                tokens[accepted:] = (tokens[accepted:] + 1 + rng.integers(0, vocab - 1)) % vocab
            computed[text] += accepted
            step.append(Piece(int(text), start, tokens, drafts))
        yield step


def wanted_logits(
    step: list[Piece], texts: np.ndarray, logits: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(text, position, logits) wherever everything up to the position is the text's own."""
    index = 0
    for piece in step:
        for position in piece.logit_positions:
            own = piece.tokens[: position + 1 - piece.start]
            if (own == texts[piece.text, piece.start : position + 1]).all():
                yield piece.text, position, logits[index]
            index += 1
