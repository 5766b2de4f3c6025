"""Which tokens a drafter can draft, and which one fills its empty slots, from what the data holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import from_numpy

from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.training.corpus import Corpus


def count_tokens(corpus: Corpus, vocab_size: int, supervised: bool = True) -> NDArray[np.int64]:
    """How often each token is to be predicted, or occurs at all.  -> [vocab_size]"""
    counts = np.zeros(vocab_size, np.int64)
    for document in corpus.documents:
        taken = document.token_ids[document.supervised] if supervised else document.token_ids
        counts += np.bincount(taken, minlength=vocab_size)
    return counts


def frequent_tokens(counts: NDArray[np.int64], size: int) -> DraftVocab | None:
    """The ``size`` most frequent tokens, equal counts by id; None for 0 or all of them.

    counts: [vocab_size]
    """
    if not 0 < size < len(counts):
        return None
    return DraftVocab.of(from_numpy(np.argsort(-counts, kind="stable")[:size].copy()), len(counts))


def coverage(counts: NDArray[np.int64], vocab: DraftVocab | None) -> float:
    """Share of the counted tokens that the vocabulary holds."""
    return 1.0 if vocab is None else float(counts[vocab.target_ids.numpy()].sum() / max(counts.sum(), 1))


def mask_token(counts: NDArray[np.int64], reserved: frozenset[int]) -> int:
    """The least used token, which no text will miss; of equals the lowest id.  reserved: not to be taken."""
    order = np.argsort(counts, kind="stable").tolist()
    return next(token for token in order if token not in reserved)
