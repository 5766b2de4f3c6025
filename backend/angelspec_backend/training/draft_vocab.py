"""Labels and teachers of a drafter that knows only some of the target's tokens.

draft_ids: [draft_vocab] int64, the target's id of each draft token: `arange + d2t` in EAGLE-3's files.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size]: the draft id of each target id, and -1 for tokens outside."""
    index = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def covered_by(teacher: Tensor, index: Tensor) -> Tensor:
    """[n] bool: rows whose likeliest token is in the draft vocabulary; EAGLE-3 trains on these only.

    teacher: [n, vocab] logits over the whole vocabulary; index: [vocab] of `draft_index`
    """
    return index[teacher.argmax(-1)] >= 0
