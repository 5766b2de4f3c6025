"""Training-time test: a chain drafter's training forward, run over its own outputs as in serving.

EAGLE-3 (arXiv 2503.01840, section 3.2).  At step i row j sees the step-0 keys of its document up to row j,
and one key of each later step up to i: its own chain's.  All rows of a step are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec_backend.drafters.chain import ChainNetwork


@dataclass(frozen=True)
class UnrolledStep:
    """One step for all rows."""

    hidden: Tensor  # [n, hidden] what the next step is fed
    output: Tensor  # [n, hidden] what the head read
    logits: Tensor | None  # [n, draft vocabulary]; row j of step i predicts the token at j + 2 + i


class UnrolledAttention:
    """``Attend`` for training: call after call, one step of one layer over a packed sequence."""

    def __init__(self, document_ids: Tensor) -> None:
        """document_ids: [n], equal within a document; documents lie one after the other."""
        self._lens = document_ids.unique_consecutive(return_counts=True)[1].tolist()
        self._steps: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # keys and values by document

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``Attend``.  layer: the only one."""
        self._steps.append((key.split(self._lens), value.split(self._lens)))
        documents = enumerate(query.split(self._lens))
        return torch.cat([self._document(index, part) for index, part in documents])

    def _document(self, index: int, query: Tensor) -> Tensor:
        """query: [len, num_heads, head_dim] -> the same shape"""
        keys, values = ([step[kind][index].transpose(0, 1) for step in self._steps] for kind in (0, 1))
        length, num_heads, head_dim = query.shape
        grouped = query.transpose(0, 1).reshape(len(keys[0]), -1, length, head_dim)  # [kv, group, len, dim]
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = (grouped @ keys[0][:, None].mT).masked_fill(~causal, -torch.inf)  # [kv, group, len, len]
        own = [(grouped * key[:, None]).sum(-1, keepdim=True) for key in keys[1:]]  # [kv, group, len, 1] each
        weights = (torch.cat([scores, *own], -1).float() * head_dim**-0.5).softmax(-1).to(query.dtype)
        out = weights[..., :length] @ values[0][:, None]  # [kv, group, len, dim]
        for later, value in enumerate(values[1:]):
            out = out + weights[..., length + later, None] * value[:, None]
        return out.reshape(num_heads, length, head_dim).transpose(0, 1)


def unroll(
    network: ChainNetwork,
    hidden_states: Tensor,
    token_ids: Tensor,
    num_steps: int,
    *,
    document_ids: Tensor | None = None,
    on_policy: bool = False,
    with_logits: bool = True,
    blank_first_row: bool = False,
) -> list[UnrolledStep]:
    """All steps of training for a packed sequence.  Differentiable, and pure.

    hidden_states: [n, num_taps, target_hidden] of the target; token_ids: [n]; document_ids: [n], equal within
    a document, documents one after the other; None: one document.  on_policy: step i > 0 embeds what step
    i - 1 would draft, not the text.  with_logits: without, the caller applies the head, say to some rows.
    blank_first_row: the embedding of a document's first row is zero at every step, as AngelSpec trains MTP,
    and not only at position 0.

    Rows whose next token lies beyond their document embed token 0; they have no label.
    """
    documents = torch.zeros_like(token_ids) if document_ids is None else document_ids
    first = document_positions(documents)  # [n]
    attend = UnrolledAttention(documents)
    hidden, steps = network.features(hidden_states), []
    tokens = shifted(token_ids, 1, documents)
    for step in range(num_steps):
        positions = first + step
        embeddings = network.embed(tokens, first if blank_first_row else positions)
        hidden, output = network.step(attend, embeddings, hidden, positions)
        drafting = on_policy and step + 1 < num_steps
        logits = network.logits(output) if with_logits or drafting else None
        steps.append(UnrolledStep(hidden, output, logits if with_logits else None))
        if drafting and logits is not None:
            tokens = network.to_target(logits.detach().argmax(-1))
        else:
            tokens = shifted(token_ids, step + 2, documents)
    return steps


def shifted(values: Tensor, count: int, document_ids: Tensor) -> Tensor:
    """What lies ``count`` rows further in the same document, else zero.  values: [n, ...] -> [n, ...]"""
    n = len(values)
    ahead = torch.arange(n, device=values.device) + count
    source = ahead.clamp(max=n - 1)
    inside = (ahead < n) & (document_ids[source] == document_ids)  # [n]
    return torch.where(inside.view(-1, *[1] * (values.dim() - 1)), values[source], 0)


def document_positions(document_ids: Tensor) -> Tensor:
    """Each row's position within its document.  [n] -> [n]"""
    lens = document_ids.unique_consecutive(return_counts=True)[1]
    starts = (lens.cumsum(0) - lens).repeat_interleave(lens)
    return torch.arange(len(document_ids), device=document_ids.device) - starts
