"""How far drafts get on held-out documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from angelspec_backend.training.batches import make_batch
from angelspec_backend.training.block_step import BlockStep
from angelspec_backend.training.chain_step import ChainStep
from angelspec_backend.training.corpus import Corpus
from angelspec_backend.training.features import Features
from angelspec_backend.training.metrics import Survival
from angelspec_backend.training.packing import pack

Step = BlockStep | ChainStep
GetFeatures = Callable[[tuple[int, ...]], Features]


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out documents.  Accepted lengths count the token that a round always gives."""

    loss: float
    by_group: dict[str, Survival]

    @property
    def overall(self) -> Survival:
        """Of the target's own answers where there are any, else of all documents."""
        answers = [found for group, found in self.by_group.items() if group != "text"]
        first, *others = answers or list(self.by_group.values())
        for other in others:
            first = first + other
        return first

    @property
    def accepted_length(self) -> float:
        """Tokens a round gives."""
        return 1 + self.overall.accepted_length

    def values(self) -> dict[str, float]:
        """For the log."""
        found = {"eval/loss": self.loss, "eval/accepted_length": self.accepted_length}
        for group, each in self.by_group.items():
            found[f"eval/accepted_length/{group}"] = 1 + each.accepted_length
        rates = self.overall.rates.tolist()
        return found | {f"eval/rate/{number}": rate for number, rate in enumerate(rates, 1)}


def held_out_sample(corpus: Corpus, count: int) -> list[int]:
    """Documents to evaluate on: as many of each group as possible, up to ``count`` together."""
    groups: dict[str, list[int]] = {}
    for index, document in enumerate(corpus.documents):
        groups.setdefault(document.group, []).append(index)
    turns = max(map(len, groups.values()), default=0)
    mixed = [members[turn] for turn in range(turns) for members in groups.values() if turn < len(members)]
    return mixed[:count]


@torch.no_grad()
def evaluate(
    step: Step, corpus: Corpus, documents: list[int], row_length: int, features: GetFeatures
) -> Evaluation:
    """Draft at the same places every time.  documents: of the corpus, at least one."""
    step.eval()
    by_group: dict[str, Survival] = {}
    losses: list[float] = []
    lengths = corpus.lengths
    for number, row in enumerate(pack(documents, lambda index: int(lengths[index]), row_length)):
        batch = make_batch(corpus, [row])
        drafts = step(batch, features(batch.documents), [number], "whole")
        losses.append(float(step.loss(drafts).total))
        groups = [corpus.documents[index].group for index in batch.documents]
        for group in set(groups):
            own = torch.tensor([each == group for each in groups])[drafts.documents.cpu()]
            found = drafts.survival(own.to(drafts.valid.device))
            by_group[group] = by_group[group] + found if group in by_group else found
    step.train()
    return Evaluation(sum(losses) / len(losses), by_group)
