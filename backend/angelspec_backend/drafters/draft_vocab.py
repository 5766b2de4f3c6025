"""The draft vocabulary: the part of the target's vocabulary that a drafter can propose.

A head of a few thousand rows costs a fraction of the target's, and the rows it lacks are rarely right.
Checkpoints store it as ``d2t``, offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from angelspec_backend.engine.sampler import Columns


class DraftVocab(nn.Module):
    """Which target token each row of a drafter's head stands for."""

    d2t: Tensor  # [draft_vocab_size] int64 offsets
    target_ids: Tensor  # [draft_vocab_size] int64
    draft_ids: Tensor  # [vocab_size] int64, -1 for tokens that cannot be drafted

    def __init__(self, d2t: Tensor, vocab_size: int) -> None:
        """vocab_size: of the target.

        Raises:
            ValueError: an offset leads out of the target's vocabulary, or two lead to the same token.
        """
        super().__init__()
        target_ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
        for index in torch.nonzero((target_ids < 0) | (target_ids >= vocab_size)).flatten().tolist()[:1]:
            raise ValueError(
                f"d2t: draft token {index} is target token {int(target_ids[index])}, "
                f"allowed: 0 to {vocab_size - 1}"
            )
        distinct = len(target_ids.unique())
        if distinct < len(target_ids):
            raise ValueError(
                f"d2t: {len(target_ids)} draft tokens are only {distinct} target tokens; "
                f"it must hold offsets (target id - draft id), not target ids"
            )
        self.vocab_size = vocab_size
        self.columns: Columns | None = None  # of the logits, where these are in the order of the target's ids
        if bool((target_ids.diff() > 0).all()):
            self.columns = Columns.of(target_ids.cpu().numpy(), vocab_size)
        self.register_buffer("d2t", d2t.long())
        self.register_buffer("target_ids", target_ids, persistent=False)
        draft_ids = torch.full((vocab_size,), -1, device=d2t.device)
        draft_ids[target_ids] = torch.arange(len(d2t), device=d2t.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @staticmethod
    def of(token_ids: Tensor, vocab_size: int) -> DraftVocab:
        """The vocabulary of these target tokens, in ascending order.  token_ids: [n] distinct."""
        ordered = token_ids.sort().values
        return DraftVocab(ordered - torch.arange(len(ordered)), vocab_size)

    def __len__(self) -> int:
        return self.d2t.shape[0]

    def t2d(self) -> Tensor:
        """Which target tokens can be proposed.  -> [vocab_size] bool"""
        return self.draft_ids >= 0

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf where the drafter has none.

        logits: [n, draft_vocab_size] -> [n, vocab_size]
        """
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.target_ids, logits)
