"""Which tokens a drafter can draft, and which one fills its empty slots, from what the data holds."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from torch import from_numpy

from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.training.corpus import ANSWERS, Corpus

TEXT_SHARE = 0.25
"""Weight of plain text beside the target's own answers, when the draft vocabulary is chosen."""


def count_tokens(corpus: Corpus, vocab_size: int, groups: Collection[str] = ()) -> NDArray[np.int64]:
    """How often each token is to be predicted, in documents of some groups or all.  -> [vocab_size]"""
    taken = [
        document.token_ids[document.supervised]
        for document in corpus.documents
        if not groups or document.group in groups
    ]
    return np.bincount(np.concatenate([*taken, np.zeros(0, np.int32)]), minlength=vocab_size)


def frequent_tokens(corpus: Corpus, vocab_size: int, size: int) -> DraftVocab | None:
    """The ``size`` most frequent tokens, equals by id; None for 0 or all of them."""
    if not 0 < size < vocab_size:
        return None
    text, answers = (count_tokens(corpus, vocab_size, groups) for groups in (("text",), ANSWERS))
    frequency = answers / max(answers.sum(), 1) + TEXT_SHARE * text / max(text.sum(), 1)
    return DraftVocab.of(from_numpy(np.argsort(-frequency, kind="stable")[:size].copy()), vocab_size)


def coverage(counts: NDArray[np.int64], vocab: DraftVocab | None) -> float:
    """Share of the counted tokens that the vocabulary holds."""
    return 1.0 if vocab is None else float(counts[vocab.target_ids.numpy()].sum() / max(counts.sum(), 1))


def mask_token(counts: NDArray[np.int64], reserved: frozenset[int]) -> int:
    """The least used token, which no text will miss; of equals the lowest id.  reserved: not to be taken."""
    order = np.argsort(counts, kind="stable").tolist()
    return next(token for token in order if token not in reserved)
