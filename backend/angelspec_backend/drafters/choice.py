"""Which token a drafter proposes: the one that the target would sample from the drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.engine import native
from angelspec_backend.engine.sampler import UNDECIDED, SamplingRows, sample, sample_natively


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

    def add(
        self,
        step: int,
        active: NDArray[np.bool_],
        token_ids: Tensor,
        confidence: Tensor,
        min_chance: NDArray[np.float32],
    ) -> NDArray[np.bool_]:
        """Fill in one more draft of some rows, and say which of them are to go on.

        active: [num_rows], n of them; token_ids, confidence: [n]; min_chance: see ``cut``.
        """
        self.token_ids[active, step] = token_ids.cpu().numpy()
        self.confidence[active, step] = confidence.cpu().numpy()
        more = active & (self.lens > step + 1) & (self.confidence[:, : step + 1].prod(1) >= min_chance)
        self.lens[active & ~more] = step + 1
        return more

    def cut(self, min_chance: NDArray[np.float32]) -> Drafts:
        """Without the tokens that are accepted with less than a chance, by the drafter's own confidence.

        min_chance: [num_rows]; a token is only accepted if all before it are.
        """
        likely = np.cumprod(self.confidence, axis=1) >= min_chance[:, None]  # once false, it stays so
        return replace(self, lens=np.minimum(self.lens, likely.sum(1, dtype=np.int32)))

    def output(self) -> DraftOutput:
        """The drafts as the loop gets them."""
        inside = np.arange(self.token_ids.shape[1]) < self.lens[:, None]
        return DraftOutput.of(self.token_ids[inside], self.lens)


class Likeliest(NamedTuple):
    """Rows of logits and what is likeliest in them."""

    logits: Tensor  # [n, draft vocabulary]
    token_ids: Tensor  # [n] int64, of the target's vocabulary
    probability: Tensor  # [n] fp32

    @staticmethod
    def of(logits: Tensor, vocab: DraftVocab | None, confident: bool = True) -> Likeliest:
        """Find it.  logits: [n, draft vocabulary]; vocab, confident: see ``choose_tokens``"""
        probability = logits.new_zeros(len(logits), dtype=torch.float32)
        if native.supports(logits.dtype, logits.device):
            chosen = native.argmax(logits, probability).long()
        else:
            chosen = logits.argmax(-1)
            if confident:
                top = logits.gather(1, chosen[:, None]).float()
                probability = 1 / (logits.float() - top).exp_().sum(-1)
        return Likeliest(logits, chosen if vocab is None else vocab.target_ids[chosen], probability)


def choose_tokens(
    logits: Tensor, rows: SamplingRows, vocab: DraftVocab | None, confident: bool = True
) -> tuple[Tensor, Tensor]:
    """The next draft of some rows, with the target's noise, so that the two agree more often.

    logits: [n, draft vocabulary]; rows: [n] how the target samples there; vocab: None for the target's;
    confident: whether probabilities are wanted, which take long on a GPU.
    Returns token ids of the target [n] and the probabilities that the drafter itself gives them, in fp32 [n].
    """
    return choose(Likeliest.of(logits, vocab, confident), rows, vocab)


def choose(likeliest: Likeliest, rows: SamplingRows, vocab: DraftVocab | None) -> tuple[Tensor, Tensor]:
    """``choose_tokens`` where the likeliest tokens are known."""
    logits, token_ids, probability = likeliest
    sampling = np.flatnonzero(rows.temperature > 0)
    if not len(sampling):
        return token_ids, probability
    index = torch.from_numpy(sampling).to(logits.device)
    part, token_ids, probability = logits[index], token_ids.clone(), probability.clone()
    sampled = torch.from_numpy(_sample(part, rows[sampling], vocab)).long().to(logits.device)
    both = torch.stack([sampled, token_ids[index]], 1)
    pair = part.gather(1, both if vocab is None else vocab.draft_ids[both]).float()
    probability[index] *= (pair[:, 0] - pair[:, 1]).exp()
    token_ids[index] = sampled
    return token_ids, probability


def _sample(logits: Tensor, rows: SamplingRows, vocab: DraftVocab | None) -> NDArray[np.int32]:
    """Ids of the target, as if the tokens that cannot be drafted had logits of -inf.

    logits: [n, draft vocabulary]; rows: [n].  Returns [n].
    """
    if vocab is None:
        return sample(logits, rows)
    if vocab.columns is None or not native.supports(logits.dtype, logits.device):
        return sample(vocab.spread(logits), rows)
    tokens = sample_natively(logits, rows, vocab.columns)
    left = np.flatnonzero(tokens == UNDECIDED)
    if len(left):
        tokens[left] = sample(vocab.spread(logits[torch.from_numpy(left)]), rows[left])
    return tokens


class Choice:
    """Chooses the draft tokens of some rows, with the parameters and the noise of their positions."""

    def __init__(
        self,
        vocab: DraftVocab | None,
        rows: NDArray[np.void],
        anchors: NDArray[np.int64],
        confident: bool,
    ) -> None:
        """rows: [n] of ROW; anchors: [n] their positions; vocab, confident: see ``choose_tokens``"""
        self.vocab, self._confident = vocab, confident
        self.greedy = not (rows["temperature"] > 0).any()  # in all rows
        self.min_chance: NDArray[np.float32] = rows["min_chance"]  # a draft ends where it is less likely
        self._rows: SamplingRows | None = None
        if not self.greedy:
            self._rows = SamplingRows.from_rows(rows, np.ones(len(rows), np.int64), anchors + 1)

    def __call__(self, logits: Tensor, row: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """See ``blocks.Choose``."""
        where = index if isinstance(index, int) else index.cpu().numpy()
        return self.among(Likeliest.of(logits, self.vocab, self._confident), row.cpu().numpy(), where)

    def among(
        self, likeliest: Likeliest, row: NDArray[np.int64], index: NDArray[np.int64] | int
    ) -> tuple[Tensor, Tensor]:
        """The same where the likeliest tokens are known."""
        if self._rows is None:
            return likeliest.token_ids, likeliest.probability
        rows = self._rows[row]
        rows.position[:] += index
        return choose(likeliest, rows, self.vocab)
