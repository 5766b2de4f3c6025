"""Which token a drafter proposes: the one that the target would sample from the drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        return DraftOutput(self.token_ids[inside], self.lens)


def choose_tokens(
    logits: Tensor, rows: SamplingRows, vocab: DraftVocab | None, confident: bool = True
) -> tuple[Tensor, Tensor]:
    """The next draft of some rows, with the target's noise, so that the two agree more often.

    logits: [n, draft vocabulary]; rows: [n] how the target samples there; vocab: None for the target's;
    confident: whether probabilities are wanted, which take long on a GPU.
    Returns token ids of the target [n] and the probabilities that the drafter itself gives them, in fp32 [n].
    """
    chosen, probability = likeliest(logits, confident)
    sampling = np.flatnonzero(rows.temperature > 0)
    if len(sampling):
        index = torch.from_numpy(sampling).to(logits.device)
        part = logits[index]
        tokens = sample(part if vocab is None else vocab.spread(part), rows[sampling])
        sampled = torch.from_numpy(tokens).long().to(logits.device)
        sampled = sampled if vocab is None else vocab.draft_ids[sampled]
        pair = part.gather(1, torch.stack([sampled, chosen[index]], 1)).float()
        probability[index] *= (pair[:, 0] - pair[:, 1]).exp()
        chosen[index] = sampled
    return chosen if vocab is None else vocab.target_ids[chosen], probability


def likeliest(logits: Tensor, confident: bool = True) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its probability, zero unless ``confident``.

    logits: [n, draft vocabulary] -> [n], in fp32 [n]
    """
    probability = logits.new_zeros(len(logits), dtype=torch.float32)
    if native.supports(logits.dtype, logits.device):
        return native.argmax(logits, probability).long(), probability
    chosen = logits.argmax(-1)
    if confident:
        top = logits.gather(1, chosen[:, None]).float()
        probability = 1 / (logits.float() - top).exp_().sum(-1)
    return chosen, probability
