"""What MTP and EAGLE-3 have in common: one layer that drafts token after token.

Row j holds what the target knew at position j and the token at position j + 1, and predicts the token at
position j + 2.  A further draft is one more row: the token just drafted, and the layer's own output in place
of the target's.  Training unrolls the same step (see ``unroll``), serving runs it over the KV pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.layers import Attend, RMSNorm
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts


class ChainState(NamedTuple):
    """What one step computes for its rows."""

    hidden: Tensor  # [n, hidden] takes the place of the target's features in the next step
    output: Tensor  # [n, hidden] what the head reads


class FrozenHead(nn.Module):
    """A head whose rows are the target's: not trained, not in checkpoints."""

    weight: Tensor  # [rows, hidden]

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, rows]"""
        return F.linear(x, self.weight)


class FrozenNorm(RMSNorm):
    """The target's final norm: not trained, not in checkpoints."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(len(weight), eps)
        del self.weight
        self.register_buffer("weight", weight, persistent=False)


class ChainNetwork(nn.Module):
    """A drafter of one layer.  Subclasses say what they read of the target and what a step is."""

    embed_tokens: Tensor  # [vocab_size, hidden], the target's

    def __init__(self, spec: DrafterSpec, target: TargetParts, vocab: DraftVocab | None = None) -> None:
        """vocab: the tokens it can draft; None: all.

        Raises:
            ValueError: spec, target and vocab contradict each other.
        """
        super().__init__()
        for name, found, expected in (
            ("vocab_size", spec.vocab_size, target.vocab_size),
            ("draft_vocab_size", spec.draft_vocab_size, 0 if vocab is None else len(vocab)),
        ):
            if found != expected:
                raise ValueError(f"{name} is {found}, but must be {expected}")
        if target.embed_tokens.shape[1] != spec.shape.hidden:
            raise ValueError(
                f"hidden is {spec.shape.hidden}, but the embedding has {target.embed_tokens.shape[1]}"
            )
        self.spec = spec
        self.vocab = vocab
        self.register_buffer("embed_tokens", target.embed_tokens, persistent=False)

    def features(self, hidden_states: Tensor) -> Tensor:
        """What step 0 reads of the target.  hidden_states: [n, num_taps, target_hidden] -> [n, hidden]"""
        raise NotImplementedError

    def step(self, attend: Attend, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> ChainState:
        """One row per token.

        embeddings: [n, hidden] of the tokens behind the rows; hidden: [n, hidden] features, or the ``hidden``
        of the step before; positions: [n] of the rows, one less than their tokens'.
        """
        raise NotImplementedError

    def logits(self, output: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocabulary]"""
        raise NotImplementedError

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids: [n] of the target's vocabulary; positions: [n] of the rows -> [n, hidden]"""
        return F.embedding(token_ids, self.embed_tokens)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft tokens as the target calls them.  [n] -> [n]"""
        return draft_ids if self.vocab is None else self.vocab.target_ids[draft_ids]

    def draft_rows(self, weight: Tensor) -> Tensor:
        """Rows of a head that belong to the draft vocabulary.  [vocab_size, n] -> [draft vocabulary, n]"""
        return weight if self.vocab is None else weight[self.vocab.target_ids.to(weight.device)]

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint of this drafter holds, under the names of training."""
        tensors = {name.removeprefix("vocab."): t.detach() for name, t in self.state_dict().items()}
        if self.vocab is not None:
            tensors["t2d"] = self.vocab.t2d()
        return tensors
