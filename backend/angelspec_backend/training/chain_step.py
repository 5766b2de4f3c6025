"""A training step of MTP and EAGLE-3: rows of packed documents, unrolled over the drafter's own outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.drafters.chain import ChainNetwork, FrozenHead
from angelspec_backend.drafters.unroll import unroll
from angelspec_backend.training import fused_terms
from angelspec_backend.training.anchors import choose_anchors
from angelspec_backend.training.batches import Batch
from angelspec_backend.training.block_step import Rule
from angelspec_backend.training.chunks import chunked_terms
from angelspec_backend.training.draft_step import (
    DraftTerms,
    Loss,
    column,
    num_anchors,
    row_generators,
    spread,
    stack,
)
from angelspec_backend.training.draft_vocab import draft_index
from angelspec_backend.training.features import Features
from angelspec_backend.training.losses import Terms, position_terms
from angelspec_backend.training.ttt import StepObjective, step_rows, steps_loss


class ChainStep(nn.Module):
    """The network and its objective."""

    head: Tensor  # [draft vocabulary, hidden]
    index: Tensor  # [vocab_size] ids of the draft vocabulary, -1: not in it

    def __init__(
        self,
        network: ChainNetwork,
        lm_head: Tensor,
        objective: StepObjective,
        num_steps: int,
        density: float = 1.0,
        on_policy: bool = False,
        chunk: int = 4096,
        recompute: bool = False,
    ) -> None:
        """lm_head: [vocab_size, hidden] of the target; density: share of the rows that give a loss;
        chunk, recompute: see ``chunked_terms``.
        """
        super().__init__()
        self.network, self.objective, self.num_steps = network, objective, num_steps
        self._density, self._on_policy = density, on_policy
        self._chunk, self._recompute = chunk, recompute
        self.register_buffer("head", network.draft_rows(lm_head), persistent=False)  # the teacher's
        if network.vocab is not None:
            index = draft_index(network.vocab.target_ids, network.spec.vocab_size)
            self.register_buffer("index", index, persistent=False)

    def forward(self, batch: Batch, features: Features, seeds: list[int], rule: Rule = "tails") -> DraftTerms:
        """The terms of all rows and steps.  seeds: of the packed rows; rule: "whole": rows with all steps."""
        network = self.network
        chosen = self._chosen(batch, seeds)
        steps = unroll(
            network,
            features.taps,
            batch.token_ids,
            self.num_steps,
            document_ids=batch.document_ids,
            on_policy=self._on_policy and self.training,
            with_logits=False,
        )
        terms, valid = [], []
        for number, step in enumerate(steps):
            rows = step_rows(batch.token_ids, batch.supervised, number, batch.document_ids)
            counted = rows.valid & chosen
            where = counted.nonzero()[:, 0]
            labels = rows.labels[where]
            labels = labels if network.vocab is None else self.index[labels]
            flat = step.output[where], labels, features.last[rows.teacher[where]]
            of_step = chunked_terms(self._of_chunk, flat, self._chunk, self._recompute)
            terms.append(spread(of_step, where, len(counted)))
            valid.append(counted)
        counted = torch.stack(valid, 1)  # [n, steps]
        counted = counted & counted.all(1, keepdim=True) if rule == "whole" else counted
        kept = chosen.nonzero()[:, 0]
        stacked = stack(terms, kept)
        return DraftTerms(stacked, counted[kept], batch.document_ids[kept])

    def loss(self, drafts: DraftTerms) -> Loss:
        """The objective of all rows and steps."""
        columns = [column(drafts.terms, step) for step in range(drafts.valid.shape[1])]
        found = steps_loss(columns, drafts.valid.T, self.objective)
        parts = {"ce": found.ce.mean(), "distill": found.distill.mean()}
        return Loss(found.total, parts if found.e2e is None else parts | {"e2e_tv": found.e2e})

    def _of_chunk(self, output: Tensor, labels: Tensor, last: Tensor) -> Terms:
        options, teacher = self.objective.terms, None
        if isinstance(self.network.lm_head, FrozenHead) and fused_terms.supports(options):
            return fused_terms.fused_terms(output, labels, self.head, last)
        if options.need_teacher:
            with torch.no_grad():
                teacher = F.linear(last, self.head)
        return position_terms(self.network.logits(output), labels, teacher, options)

    def _chosen(self, batch: Batch, seeds: list[int]) -> Tensor:
        """[n] bool: rows that may give a loss; the row before the first token to be predicted included."""
        following = torch.cat([batch.supervised[1:], batch.supervised.new_zeros(1)])
        eligible = batch.supervised | following
        if self._density >= 1:
            return eligible
        counts = num_anchors(batch, self._density)
        chosen = torch.zeros_like(eligible)
        for places, generator in zip(batch.places, row_generators(seeds), strict=True):
            places = places[places >= 0]
            for document in batch.document_ids[places].unique().tolist():
                own = places[batch.document_ids[places] == document]
                chosen[own[choose_anchors(eligible[own], counts[document], generator)]] = True
        return chosen
