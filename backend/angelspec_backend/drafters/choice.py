"""Which token a drafter proposes: the one that the target would sample from the drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass

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

    def output(self) -> DraftOutput:
        """The drafts as the loop gets them."""
        inside = np.arange(self.token_ids.shape[1]) < self.lens[:, None]
        return DraftOutput(self.token_ids[inside], self.lens)


def choose_tokens(
    logits: Tensor, rows: SamplingRows, vocab: DraftVocab | None, confident: bool = True
) -> tuple[Tensor, Tensor]:
    """The next draft of some rows, with the target's noise, so that the two agree more often.

    logits: [n, draft vocabulary]; rows: [n] how the target samples there; vocab: None for the target's;
    confident: whether probabilities are wanted, which take longer than the rest.
    Returns token ids of the target [n] and the probabilities that the drafter itself gives them, in fp32 [n].
    """
    fast = native.supports(logits.dtype, logits.device)
    chosen = native.argmax(logits).long() if fast else logits.argmax(-1)
    sampling = np.flatnonzero(rows.temperature > 0)
    if len(sampling):
        index = torch.from_numpy(sampling).to(logits.device)
        tokens = _sample(logits[index], rows[sampling], vocab)
        sampled = torch.from_numpy(tokens).long().to(logits.device)
        chosen[index] = sampled if vocab is None else vocab.draft_ids[sampled]
    token_ids = chosen if vocab is None else vocab.target_ids[chosen]
    if not confident:
        return token_ids, torch.zeros(len(logits), device=logits.device)
    # By hand: on a CPU logsumexp takes ten times as long.
    wide, top = logits.float(), logits.amax(-1, keepdim=True).float()
    picked = wide.gather(1, chosen[:, None])
    return token_ids, ((picked - top).exp() / (wide - top).exp_().sum(-1, keepdim=True))[:, 0]


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
