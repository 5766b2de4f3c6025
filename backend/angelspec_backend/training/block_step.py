"""A training step of the block drafters: blocks at random anchors, teacher-forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.masked import previous_ids
from angelspec_backend.training import fused_terms
from angelspec_backend.training.anchors import block_labels, choose_anchors, eligible_anchors, pad_anchors
from angelspec_backend.training.batches import Batch
from angelspec_backend.training.block_attention import BlockAttend
from angelspec_backend.training.chunks import chunked_terms
from angelspec_backend.training.draft_step import DraftTerms, Loss, num_anchors, row_generators, spread
from angelspec_backend.training.draft_vocab import draft_index
from angelspec_backend.training.features import Features
from angelspec_backend.training.losses import Terms, position_terms
from angelspec_backend.training.masks import block_mask
from angelspec_backend.training.objectives import BlockObjective, block_loss

Rule = Literal["whole", "tails"]


@dataclass(frozen=True)
class Blocks:
    """The blocks of padded rows."""

    anchors: Tensor  # [rows, blocks]
    sees: Tensor  # [rows, blocks, length] bool: its context
    labels: Tensor  # [rows, blocks, drafts] token ids
    teacher: Tensor  # [rows, blocks, drafts] positions in the row whose target logits are the teacher
    valid: Tensor  # [rows, blocks, drafts]


class BlockStep(nn.Module):
    """The network and its objective."""

    index: Tensor  # [vocab_size] ids of the draft vocabulary, -1: not in it

    def __init__(
        self,
        network: BlockNetwork,
        objective: BlockObjective,
        density: float,
        chunk: int = 4096,
        recompute: bool = False,
    ) -> None:
        """density: blocks per token to be predicted; chunk, recompute: see ``chunked_terms``."""
        super().__init__()
        self.network, self.objective = network, objective
        self._density, self._chunk, self._recompute = density, chunk, recompute
        if network.vocab is not None:
            index = draft_index(network.vocab.target_ids, network.spec.vocab_size)
            self.register_buffer("index", index, persistent=False)

    def forward(self, batch: Batch, features: Features, seeds: list[int], rule: Rule = "tails") -> DraftTerms:
        """The terms of all blocks of a batch.  seeds: of the rows; rule: see ``eligible_anchors``."""
        network, spec = self.network, self.network.spec
        blocks = self._plan(batch, seeds, rule)
        token_ids = batch.rows(batch.token_ids)  # [rows, length]
        hidden = self._hidden(batch, features, token_ids, blocks)
        previous = previous_ids(token_ids, blocks.anchors, spec.num_drafts)
        where = blocks.valid.flatten().nonzero()[:, 0]  # [n] drafts that count
        places = batch.places.to(where.device)
        at = places.gather(1, blocks.teacher.flatten(1)).flatten()[where]  # [n] tokens of the batch
        labels = blocks.labels.flatten()[where]
        labels = self.index[labels] if network.vocab is not None else labels
        terms, confidence = self._terms(hidden, previous, where, labels, features.last, at)
        shape = blocks.valid.shape[0] * blocks.valid.shape[1], spec.num_drafts
        documents = batch.document_ids.to(where.device)[places.gather(1, blocks.anchors).clamp(min=0)]
        return DraftTerms(
            spread(terms, where, blocks.valid.numel()).view(*shape),
            blocks.valid.view(*shape),
            documents.flatten(),
            None if confidence is None else confidence.view(*shape),
        )

    def _hidden(self, batch: Batch, features: Features, token_ids: Tensor, blocks: Blocks) -> Tensor:
        """What the head gets of all blocks: [rows, blocks, drafts, hidden]"""
        network, positions = self.network, batch.rows(batch.positions)
        context = network.context_key_values(batch.rows(features.taps).flatten(0, 1), positions.flatten())
        ids = network.block_ids(token_ids.gather(1, blocks.anchors))  # [rows, blocks, block_size]
        slots = torch.arange(ids.shape[-1], device=ids.device)
        at = positions.gather(1, blocks.anchors)[..., None] + slots
        hidden = network.block_hidden(ids.flatten(), at.flatten(), BlockAttend(context, blocks.sees))
        return network.drafting(hidden.view(*ids.shape, -1))

    def loss(self, drafts: DraftTerms) -> Loss:
        """The objective of all blocks."""
        found = block_loss(drafts.terms, drafts.valid, self.objective, drafts.confidence)
        return Loss(found.total, found.parts)

    def _terms(
        self,
        hidden: Tensor,
        previous: Tensor,
        where: Tensor,
        labels: Tensor,
        last: Tensor,
        at: Tensor,
    ) -> tuple[Terms, Tensor | None]:
        """Terms of the drafts at ``where`` [n], and the confidences of all.

        hidden: [rows, blocks, drafts, hidden]; last: [tokens, hidden]; at: [n] the teacher's tokens.
        """
        network, options = self.network, self.objective.terms
        head, recurrent = network.lm_head.weight, network.spec.markov_kind == "rnn" and network.markov_head

        def teacher(positions: Tensor) -> Tensor | None:
            if not options.need_teacher:
                return None
            unique, inverse = positions.unique(return_inverse=True)  # neighbouring blocks overlap
            with torch.no_grad():
                return F.linear(last[unique], head)[inverse]

        if recurrent or network.confidence_head is not None:
            slot = network.teacher_forced(hidden, previous)
            logits = slot.logits.flatten(0, 2)[where]
            return position_terms(logits, labels, teacher(at), options), slot.confidence

        flat = hidden.flatten(0, 2)[where], previous.flatten()[where], labels, at
        if network.markov_head is None and fused_terms.supports(options):
            corrected = network.correct(*flat[:2])
            return fused_terms.fused_terms(corrected, labels, head, last[at]), None

        def of_chunk(hidden: Tensor, previous: Tensor, labels: Tensor, at: Tensor) -> Terms:
            slot = network.slot(hidden, network.base_logits(hidden), previous)
            return position_terms(slot.logits, labels, teacher(at), options)

        return chunked_terms(of_chunk, flat, self._chunk, self._recompute), None

    @torch.no_grad()
    def _plan(self, batch: Batch, seeds: list[int], rule: Rule) -> Blocks:
        spec = self.network.spec
        ids, supervised = batch.rows(batch.token_ids), batch.rows(batch.supervised, False)
        documents = batch.rows(batch.document_ids, -1)
        counts = num_anchors(batch, self._density)
        chosen = []
        for row, generator in enumerate(row_generators(seeds)):
            eligible = eligible_anchors(supervised[row], spec.num_drafts + 1, documents[row], rule)
            places = [
                choose_anchors(eligible & (documents[row] == document), counts[document], generator)
                for document in documents[row].unique().tolist()
                if document >= 0
            ]
            chosen.append(torch.cat(places).sort().values)
        most = max(max(map(len, chosen)), 1)
        padded = [pad_anchors(anchors, most) for anchors in chosen]
        length = ids.shape[1]
        masks, labels = [], []
        for row, (anchors, keep) in enumerate(padded):
            masks.append(block_mask(anchors, keep, 1, length, documents[row])[:, :length])
            labels.append(
                block_labels(ids[row], supervised[row], anchors, spec.num_drafts, documents[row], keep)
            )
        return Blocks(
            torch.stack([anchors for anchors, _ in padded]),
            torch.stack(masks),
            torch.stack([each.ids for each in labels]),
            torch.stack([each.teacher for each in labels]),
            torch.stack([each.valid for each in labels]),
        )
