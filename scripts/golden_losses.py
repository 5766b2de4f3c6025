"""Comparisons of the losses with stored vectors: terms of a position, weights, objectives of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.training.anchors import block_labels
from angelspec_backend.training.losses import (
    cross_entropy,
    keep_top,
    kl_divergence,
    lk_alpha,
    lk_hybrid,
    position_terms,
    topk_kl,
    total_variation,
)
from angelspec_backend.training.metrics import position_means
from angelspec_backend.training.objectives import (
    BlockLoss,
    BlockObjective,
    block_loss,
    dpace_weights,
    end_to_end_tv,
    expected_accepted,
    masked_mean,
)
from golden_rows import Row, close, exact, gradient, load

OPTIONS = {  # names in the vectors: ours
    "loss_objective": "weighting",
    "loss_decay_gamma": "decay_gamma",
    "dpace_alpha": "dpace_alpha",
    "ce_loss_alpha": "ce_weight",
    "l1_loss_alpha": "l1_weight",
    "kl_loss_weight": "kl_weight",
    "kl_topk": "kl_topk",
    "lk_loss_weight": "lk_weight",
    "lk_loss_type": "lk_type",
    "lk_eta": "lk_eta",
    "e2e_tv_loss_weight": "e2e_weight",
    "confidence_head_alpha": "confidence_weight",
}
PARTS = {"ce_loss": "ce", "l1_loss": "l1", "kl_loss": "kl", "lk_loss": "lk", "e2e_tv_loss": "e2e_tv"}
PARTS["confidence_loss"] = "confidence"


def block_objective(options: dict[str, Any]) -> BlockObjective:
    """The objective that a training part's options describe."""
    known = {OPTIONS[name]: value for name, value in options.items() if name != "note"}
    return BlockObjective(**known, dpace_over_masked=True)


def check_losses(folder: Path) -> list[Row]:
    """Terms, weights, end-to-end TV and block objectives, with their gradients."""
    vectors, about = load(folder)
    rows = [*_dpace_rows(vectors), *_term_rows(vectors), *_end_to_end_rows(vectors)]
    for name, options in about["block"]["options"].items():
        rows += _objective_rows(vectors, f"block.{name}", block_objective(options))
    return rows


def _dpace_rows(vectors: dict[str, Tensor]) -> list[Row]:
    confidence, prefix = vectors["dpace.confidence"], "dpace.weights_alpha"
    names = [name for name in vectors if name.startswith(prefix)]
    alphas = {name: float(name.removeprefix(prefix)) for name in names}
    return [close(name, dpace_weights(confidence, alpha), vectors[name]) for name, alpha in alphas.items()]


def _term_rows(vectors: dict[str, Tensor]) -> list[Row]:
    """Row 0 has p = q, where |p - q| has a kink: gradients of it are not compared."""
    teacher = vectors["point.teacher_logits"]

    def hybrid(student: Tensor, eta: float, support: int = 16) -> Tensor:
        pair = keep_top(student, teacher, support)
        return lk_hybrid(kl_divergence(*pair), total_variation(*pair), eta)

    functions = {
        "tv": lambda s: total_variation(s, teacher),
        "l1": lambda s: 2 * total_variation(s, teacher),
        "kl": lambda s: kl_divergence(s, teacher),
        "kl_full": lambda s: topk_kl(s, teacher, 16, "b"),
        "kl_top5_variant_a": lambda s: topk_kl(s, teacher, 5, "a"),
        "kl_top5_variant_b": lambda s: topk_kl(s, teacher, 5, "b"),
        "lk_hybrid_eta3.0": lambda s: hybrid(s, 3.0),
        "lk_hybrid_eta1.0": lambda s: hybrid(s, 1.0),
        "lk_hybrid_eta3.0_top5": lambda s: hybrid(s, 3.0, 5),
        "lk_alpha": lambda s: lk_alpha(total_variation(s, teacher)),
    }
    rows = []
    for name, function in functions.items():
        student = vectors["point.student_logits"].clone().requires_grad_()
        value = function(student)
        value.sum().backward()
        assert student.grad is not None
        rows.append(close(f"point.{name}", value, vectors[f"point.{name}"]))
        rows.append(gradient(f"point.{name}.grad", student.grad[1:], vectors[f"point.{name}.grad"][1:]))
    return rows


def _end_to_end_rows(vectors: dict[str, Tensor]) -> list[Row]:
    student = vectors["e2e.student_logits"].clone().requires_grad_()
    valid = vectors["e2e.valid"].bool()
    tv = total_variation(student.flatten(0, 1), vectors["e2e.teacher_logits"].flatten(0, 1)).view(valid.shape)
    loss = end_to_end_tv(tv, valid)
    loss.backward()
    length = expected_accepted(tv, valid)[valid.any(-1)].mean()
    return [
        close("e2e.loss", loss, vectors["e2e.loss"]),
        close("e2e.accept_length", length, vectors["e2e.accept_length"]),
        gradient("e2e.loss.grad", student.grad, vectors["e2e.loss.grad"]),
    ]


def _objective_rows(vectors: dict[str, Tensor], name: str, objective: BlockObjective) -> list[Row]:
    """One objective on the blocks, with a Markov and a confidence head if it weighs a confidence."""
    names = [key for key in vectors if key.startswith(f"{name}.grad.")]
    heads = {
        key.rsplit(".", 1)[1]: vectors[key.replace(".grad.", ".")].clone().requires_grad_() for key in names
    }
    hidden = vectors["block.student_logits"].clone().requires_grad_()  # [blocks, slots, vocab]
    labels = block_labels(
        vectors["block.input_ids"],
        vectors["block.loss_mask"],
        vectors["block.anchors"],
        hidden.shape[1] - 1,
        keep=vectors["block.keep"],
    )
    logits, confidence = hidden[:, 1:], None
    if heads:
        anchor_ids = vectors["block.input_ids"][vectors["block.anchors"]]
        previous = torch.cat([anchor_ids[:, None], labels.ids[:, :-1]], 1)
        features = torch.cat([logits, heads["markov_w1"][previous]], -1)
        confidence = (features @ heads["conf_weight"].T + heads["conf_bias"])[..., 0]
        logits = logits + heads["markov_w1"][previous] @ heads["markov_w2"].T
    teacher = vectors["block.teacher_logits_by_position"][labels.teacher]
    flat = position_terms(logits.flatten(0, 1), labels.ids.flatten(), teacher.flatten(0, 1), objective.terms)
    loss = block_loss(flat.view(*labels.ids.shape), labels.valid, objective, confidence)
    loss.total.backward()
    rows = [
        close(f"{name}.loss", loss.total, vectors[f"{name}.loss"]),
        *part_rows(vectors, f"{name}.component", loss),
    ]
    rows += [gradient(f"{name}.grad", hidden.grad, vectors[f"{name}.grad"])]
    rows += [
        gradient(f"{name}.grad.{part}", head.grad, vectors[f"{name}.grad.{part}"])
        for part, head in heads.items()
    ]
    if objective == BlockObjective(dpace_over_masked=True):
        rows += _metric_rows(vectors, logits.detach(), labels.ids, labels.valid)
    return rows


def part_rows(vectors: dict[str, Tensor], prefix: str, loss: BlockLoss) -> list[Row]:
    """The parts of a block loss against `prefix.*`; parts of no weight are 0 there."""
    stored = {key: part for key, part in PARTS.items() if f"{prefix}.{key}" in vectors}
    zero = torch.zeros(())
    return [
        close(f"{prefix}.{key}", loss.parts.get(part, zero), vectors[f"{prefix}.{key}"])
        for key, part in stored.items()
    ]


def _metric_rows(vectors: dict[str, Tensor], logits: Tensor, ids: Tensor, valid: Tensor) -> list[Row]:
    ce = cross_entropy(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
    hits = (logits.argmax(-1) == ids).float()
    means, counts = position_means(ce, valid)
    want = {key: vectors[f"block.metric.{key}"] for key in ("loss_per_position", "acc_per_position")}
    return [
        close("metric.accuracy", masked_mean(hits, valid.float()), vectors["block.metric.accuracy"]),
        close("metric.loss_per_position", means, want["loss_per_position"][1:]),
        close("metric.acc_per_position", position_means(hits, valid)[0], want["acc_per_position"][1:]),
        exact("metric.count_per_position", counts, vectors["block.metric.count_per_position"][1:]),
    ]
