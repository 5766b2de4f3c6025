"""The block drafters DFlash, DFlare, DFly and DSpark: one network for training and serving.

Behind the backbone a head drafts slot after slot.  DFlash and DFlare take each slot's own likeliest token;
DFly corrects a slot's hidden state, DSpark its logits, by the token drafted before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec_backend.drafters.backbone import BlockBackbone
from angelspec_backend.drafters.chain import FrozenHead
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.heads import ConfidenceHead, HiddenCorrection, MarkovHead
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts

Choose = Callable[[Tensor, Tensor, Tensor | int], tuple[Tensor, Tensor]]
"""From logits [n, draft_vocab], the blocks [n] they belong to and the index of the draft token in its block
([n], or one for all), to token ids of the target [n] and their probabilities [n] in fp32."""


@dataclass(frozen=True)
class Slot:
    """What a head makes of one slot (or of many, the leading dimensions are free)."""

    logits: Tensor  # [..., draft_vocab]
    confidence: Tensor | None  # [...] before the sigmoid; None without a confidence head
    state: Tensor | None  # [..., rank] of a recurrent head


class BlockNetwork(BlockBackbone):
    """A block drafter.  ``lm_head`` is the target's, or the rows of it that a draft vocabulary keeps."""

    def __init__(self, spec: DrafterSpec, target: TargetParts, vocab: DraftVocab | None = None) -> None:
        """Random weights.  vocab: the tokens it can draft; None: all.

        Raises:
            ValueError: spec, target and vocab contradict each other.
        """
        super().__init__(spec, target)
        found, expected = spec.draft_vocab_size, 0 if vocab is None else len(vocab)
        if found != expected:
            raise ValueError(f"draft_vocab_size is {found}, but must be {expected}")
        hidden, self.vocab = spec.shape.hidden, vocab
        rows = target.lm_head if vocab is None else target.lm_head[vocab.target_ids.to(target.lm_head.device)]
        self.lm_head = FrozenHead(rows)
        self.hidden_correction = self.markov_head = self.confidence_head = None
        if spec.correction_size:
            self.hidden_correction = HiddenCorrection(hidden, spec.correction_size, spec.shape.eps)
        if spec.markov_rank:
            self.markov_head = MarkovHead(
                spec.markov_kind, spec.vocab_size, len(rows), spec.markov_rank, hidden
            )
        if spec.confidence_head:
            rank = spec.markov_rank if spec.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden, rank)

    def base_logits(self, hidden: Tensor) -> Tensor | None:
        """Logits that the previous token changes only by a bias; None if it changes the hidden state."""
        correction = self.hidden_correction
        return self.lm_head(hidden) if correction is None or correction.folded else None

    def correct(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Hidden states as the LM head gets them: [..., hidden], [...] -> [..., hidden]"""
        if self.hidden_correction is None:
            return hidden
        return self.hidden_correction.correct(hidden, F.embedding(previous_ids, self.embed_tokens))

    def slot(
        self, hidden: Tensor, base: Tensor | None, previous_ids: Tensor, state: Tensor | None = None
    ) -> Slot:
        """The head at one slot.

        hidden: [..., hidden] of the backbone; base: its ``base_logits``; previous_ids: [...] tokens before
        the one that the slot predicts; state: of the slot before.
        """
        if base is None:
            logits = self.lm_head(self.correct(hidden, previous_ids))
        elif self.hidden_correction is None:
            logits = base
        else:
            previous = F.embedding(previous_ids, self.embed_tokens)
            logits = base + self.hidden_correction.logit_bias(hidden, previous)
        embedded = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous_ids)
            bias, state = self.markov_head(hidden, embedded, state)
            logits = logits + bias
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return Slot(logits, confidence, state)

    def drafting(self, hidden: Tensor) -> Tensor:
        """The slots that draft: all but the anchor's where it predicts itself.

        [..., block_size, hidden] -> [..., num_drafts, hidden]
        """
        return hidden[..., 1 - self.spec.label_shift :, :]

    def teacher_forced(self, hidden: Tensor, previous_ids: Tensor) -> Slot:
        """The head at all drafting slots, the tokens before them given.

        hidden: [..., num_drafts, hidden]; previous_ids: [..., num_drafts] -> logits [..., num_drafts,
        draft_vocab].
        """
        base = self.base_logits(hidden)
        if self.markov_head is None or not self.markov_head.recurrent:
            return self.slot(hidden, base, previous_ids)
        assert base is not None
        slots: list[Slot] = []
        for k in range(hidden.shape[-2]):
            state = slots[-1].state if slots else None
            slots.append(self.slot(hidden[..., k, :], base[..., k, :], previous_ids[..., k], state))
        confidences = [slot.confidence for slot in slots if slot.confidence is not None]
        return Slot(
            torch.stack([slot.logits for slot in slots], -2),
            torch.stack(confidences, -1) if confidences else None,
            slots[-1].state,
        )

    def draft(
        self, hidden: Tensor, anchor_ids: Tensor, choose: Choose | None = None, lens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens from the backbone's output.

        hidden: [num_blocks, block_size, hidden]; anchor_ids: [num_blocks]; choose: greedy if not given;
        lens: [num_blocks] draft tokens wanted, num_drafts if not given.
        Returns token ids of the target and confidences in fp32 (the confidence head's, else the token's
        probability), both [num_blocks, max(lens)], with zeros behind a block's own length.
        """
        choose = choose or self.greedy
        hidden = self.drafting(hidden)
        if lens is None:
            lens = torch.full((len(hidden),), hidden.shape[1], device=hidden.device)
        width = int(lens.max()) if len(lens) else 0
        hidden = hidden[:, :width]
        wanted = torch.arange(width, device=hidden.device) < lens[:, None]  # [num_blocks, width]
        tokens = torch.zeros(wanted.shape, dtype=torch.long, device=hidden.device)
        confidence = torch.zeros(wanted.shape, device=hidden.device)
        sequential = self.hidden_correction is not None or self.markov_head is not None
        if not sequential:
            block, index = wanted.nonzero(as_tuple=True)
            chosen = hidden[block, index]
            slot = self.slot(chosen, self.lm_head(chosen), anchor_ids[block])
            tokens[block, index], confidence[block, index] = _choose(choose, slot, block, index)
            return tokens, confidence
        base, state, previous = self.base_logits(hidden), None, anchor_ids
        block = torch.arange(len(hidden), device=hidden.device)  # those that want a token at this step
        for step in range(width):
            if not bool(wanted[block, step].all()):  # blocks only ever drop out
                going_on = wanted[block, step]
                block, previous = block[going_on], previous[going_on]
                state = None if state is None else state[going_on]
            everywhere = len(block) == len(hidden)
            here, its_base = (
                None if each is None else each[:, step] if everywhere else each[block, step]
                for each in (hidden, base)
            )
            assert here is not None
            slot = self.slot(here, its_base, previous, state)
            state = slot.state
            previous, probability = _choose(choose, slot, block, step)
            tokens[block, step], confidence[block, step] = previous, probability
        return tokens, confidence

    def greedy(self, logits: Tensor, block: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, see ``Choose``."""
        top, ids = logits.float().max(-1)
        return self.to_target(ids), 1 / (logits.float() - top[:, None]).exp().sum(-1)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary as ids of the target's."""
        return draft_ids if self.vocab is None else self.vocab.target_ids[draft_ids]

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint of this drafter holds, under the names of training."""
        tensors = {name.removeprefix("vocab."): t.detach() for name, t in self.state_dict().items()}
        if self.vocab is not None:
            tensors["t2d"] = self.vocab.t2d()
        return tensors


def _choose(choose: Choose, slot: Slot, block: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
    tokens, probability = choose(slot.logits, block, index)
    return tokens, probability if slot.confidence is None else slot.confidence.sigmoid()
