"""Which token a drafter proposes: the one that the target would sample from the drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.engine import native
from angelspec_backend.engine.sampler import SamplingRows, sample


@dataclass(frozen=True)
class Drafts:
    """What was drafted for some rows, and how sure the drafter is."""

    token_ids: NDArray[np.int32]  # [num_rows, width]
    confidence: NDArray[np.float32]  # [num_rows, width] probability the drafter itself gives each draft
    lens: NDArray[np.int32]  # [num_rows] drafts of each row, the rest is zero

    @staticmethod
    def empty(lens: NDArray[np.integer]) -> Drafts:
        """Zeros to be filled in.  lens: [num_rows]"""
        shape = (len(lens), int(lens.max(initial=0)))
        return Drafts(np.zeros(shape, np.int32), np.zeros(shape, np.float32), lens.astype(np.int32))

    def output(self) -> DraftOutput:
        """The drafts as the loop gets them."""
        inside = np.arange(self.token_ids.shape[1]) < self.lens[:, None]
        return DraftOutput(self.token_ids[inside], self.lens)


class Likeliest(NamedTuple):
    """Rows of logits and what is likeliest in them."""

    logits: Tensor  # [n, draft vocabulary]
    draft_ids: Tensor  # [n] int32 or int64
    probability: Tensor  # [n] fp32

    @staticmethod
    def of(logits: Tensor, confident: bool = True) -> Likeliest:
        """Find it.  logits: [n, draft vocabulary]; confident: see ``choose_tokens``"""
        probability = logits.new_zeros(len(logits), dtype=torch.float32)
        if native.supports(logits.dtype, logits.device):
            return Likeliest(logits, native.argmax(logits, probability), probability)
        chosen = logits.argmax(-1)
        if confident:
            top = logits.gather(1, chosen[:, None]).float()
            probability = 1 / (logits.float() - top).exp_().sum(-1)
        return Likeliest(logits, chosen, probability)


def choose_tokens(
    logits: Tensor, rows: SamplingRows, vocab: DraftVocab | None, confident: bool = True
) -> tuple[Tensor, Tensor]:
    """The next draft of some rows, with the target's noise, so that the two agree more often.

    logits: [n, draft vocabulary]; rows: [n] how the target samples there; vocab: None for the target's;
    confident: whether probabilities are wanted, which take long on a GPU.
    Returns token ids of the target [n] and the probabilities that the drafter itself gives them, in fp32 [n].
    """
    return choose(Likeliest.of(logits, confident), rows, vocab)


def choose(
    likeliest: Likeliest, rows: SamplingRows | None, vocab: DraftVocab | None
) -> tuple[Tensor, Tensor]:
    """``choose_tokens`` where the likeliest tokens are known.  rows: None if all are greedy."""
    logits, draft_ids, probability = likeliest
    sampling = np.zeros(0, np.int64) if rows is None else np.flatnonzero(rows.temperature > 0)
    if rows is not None and len(sampling):
        index = torch.from_numpy(sampling).to(logits.device)
        part = logits[index]
        tokens = sample(part if vocab is None else vocab.spread(part), rows[sampling])
        sampled = torch.from_numpy(tokens).long().to(logits.device)
        sampled = sampled if vocab is None else vocab.draft_ids[sampled]
        pair = part.gather(1, torch.stack([sampled, draft_ids[index].long()], 1)).float()
        draft_ids, probability = draft_ids.long(), probability.clone()
        draft_ids[index] = sampled
        probability[index] *= (pair[:, 0] - pair[:, 1]).exp()
    return draft_ids.long() if vocab is None else vocab.target_ids[draft_ids], probability


class BlockChoice:
    """Chooses the tokens of blocks with the parameters and the noise of their rows."""

    def __init__(
        self,
        vocab: DraftVocab | None,
        rows: NDArray[np.void],
        anchors: NDArray[np.int64],
        confident: bool,
    ) -> None:
        """rows: [num_blocks] of ROW; anchors: [num_blocks] their positions; vocab, confident: see
        ``choose_tokens``"""
        self._vocab, self._confident = vocab, confident
        self._rows: SamplingRows | None = None
        if (rows["temperature"] > 0).any():
            self._rows = SamplingRows.from_rows(rows, np.ones(len(rows), np.int64), anchors + 1)

    def __call__(self, logits: Tensor, block: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """See ``blocks.Choose``."""
        where = index if isinstance(index, int) else index.cpu().numpy()
        return self.among(Likeliest.of(logits, self._confident), block.cpu().numpy(), where)

    def among(
        self, likeliest: Likeliest, block: NDArray[np.int64], index: NDArray[np.int64] | int
    ) -> tuple[Tensor, Tensor]:
        """The same where the likeliest tokens are known."""
        rows = None
        if self._rows is not None:
            rows = self._rows[block]
            rows.position[:] += index
        return choose(likeliest, rows, self._vocab)
