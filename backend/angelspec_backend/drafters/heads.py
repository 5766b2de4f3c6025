"""Heads of block drafters: what lets a slot know the token drafted in the slot before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from angelspec_backend.drafters.layers import RMSNorm, SwiGLU


class HiddenCorrection(SwiGLU):
    """DFly's correction of a slot's hidden state by the previous token (TreeFlash, equation 1).

    hidden + SwiGLU([norm(hidden) ; norm(embedding of the previous token)])
    """

    folded = False  # whether ``logit_bias`` takes the place of ``correct`` in front of the LM head

    def __init__(self, hidden: int, intermediate: int, eps: float) -> None:
        super().__init__(hidden, intermediate, 2 * hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.embed_norm = RMSNorm(hidden, eps)
        nn.init.zeros_(self.down_proj.weight)  # begins as no correction at all

    def correct(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden, previous (embeddings): [..., hidden] -> [..., hidden]"""
        return hidden + self(torch.cat([self.hidden_norm(hidden), self.embed_norm(previous)], -1))

    def logit_bias(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What the correction adds to the logits; only where ``folded``.  -> [..., draft vocabulary]"""
        raise NotImplementedError


class MarkovHead(nn.Module):
    """DSpark's low-rank bias on a slot's logits by the previous token (arXiv 2607.05147).

    vanilla: W2 W1[previous].  gated: W2 (gate * W1[previous]), the gate a sigmoid of the hidden state and
    W1[previous].  rnn: W2 of the output of a gated recurrent unit that runs over the slots.
    """

    def __init__(self, kind: str, vocab_size: int, draft_vocab_size: int, rank: int, hidden: int) -> None:
        """draft_vocab_size: of the logits; vocab_size: of the previous tokens."""
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def recurrent(self) -> bool:
        """Whether a slot depends on more than the previous token."""
        return self.kind == "rnn"

    def forward(self, hidden: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The bias of a slot, and the state for the next one.

        hidden: [..., hidden]; embedded: [..., rank] W1[previous]; state: [..., rank] of the slot before,
        None in the first one.  Returns [..., draft_vocab_size], [..., rank] or None.
        """
        if self.kind == "vanilla":
            return self.markov_w2(embedded), None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
            return self.markov_w2(gate * embedded), None
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(out)), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of a draft token's acceptance, from the hidden state and maybe W1[previous]."""

    def __init__(self, hidden: int, markov_rank: int) -> None:
        """markov_rank: 0 where the Markov embedding is no input."""
        super().__init__()
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden + markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden: [..., hidden]; embedded: [..., rank] -> [...] before the sigmoid, in fp32"""
        if self.with_markov:
            assert embedded is not None  # the specification has a Markov head
            hidden = torch.cat([hidden, embedded], -1)
        return self.proj(hidden)[..., 0].float()
