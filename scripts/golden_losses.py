"""Comparisons of the losses with stored vectors: terms of a position, weights, objectives of blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
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
from golden_compare import GRADIENT, LOSS, Compare

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
PARTS = ("ce", "l1", "kl", "lk", "e2e_tv", "confidence")


def block_objective(options: dict[str, Any]) -> BlockObjective:
    """The objective that a training part's options describe."""
    known = {OPTIONS[name]: value for name, value in options.items() if name != "note"}
    return BlockObjective(**known, dpace_over_masked=True)


def check_losses(folder: Path, compare: Compare) -> None:
    """Terms, weights, end-to-end TV and block objectives, with their gradients."""
    vectors = load_file(folder / "vectors.safetensors")
    about = json.loads((folder / "vectors.json").read_text())
    _check_dpace(vectors, compare)
    _check_terms(vectors, compare)
    _check_end_to_end(vectors, compare)
    for name, options in about["block"]["options"].items():
        _check_objective(vectors, f"block.{name}", block_objective(options), compare)


def _check_dpace(vectors: dict[str, Tensor], compare: Compare) -> None:
    prefix = "dpace.weights_alpha"
    for name in (name for name in vectors if name.startswith(prefix)):
        weights = dpace_weights(vectors["dpace.confidence"], float(name.removeprefix(prefix)))
        compare(name, weights, vectors[name], LOSS)


def _check_terms(vectors: dict[str, Tensor], compare: Compare) -> None:
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
    for name, function in functions.items():
        student = vectors["point.student_logits"].clone().requires_grad_()
        value = function(student)
        value.sum().backward()
        assert student.grad is not None
        compare(f"point.{name}", value, vectors[f"point.{name}"], LOSS)
        compare(f"point.{name}.grad", student.grad[1:], vectors[f"point.{name}.grad"][1:], GRADIENT)


def _check_end_to_end(vectors: dict[str, Tensor], compare: Compare) -> None:
    student = vectors["e2e.student_logits"].clone().requires_grad_()
    valid = vectors["e2e.valid"].bool()
    tv = total_variation(student.flatten(0, 1), vectors["e2e.teacher_logits"].flatten(0, 1)).view(valid.shape)
    loss = end_to_end_tv(tv, valid)
    loss.backward()
    compare("e2e.loss", loss, vectors["e2e.loss"], LOSS)
    length = expected_accepted(tv, valid)[valid.any(-1)].mean()
    compare("e2e.accept_length", length, vectors["e2e.accept_length"], LOSS)
    compare("e2e.loss.grad", student.grad, vectors["e2e.loss.grad"], GRADIENT)


def _check_objective(
    vectors: dict[str, Tensor], name: str, objective: BlockObjective, compare: Compare
) -> None:
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
    compare(f"{name}.loss", loss.total, vectors[f"{name}.loss"], LOSS)
    _check_parts(vectors, f"{name}.component", loss, compare)
    compare(f"{name}.grad", hidden.grad, vectors[f"{name}.grad"], GRADIENT)
    for part, head in heads.items():
        compare(f"{name}.grad.{part}", head.grad, vectors[f"{name}.grad.{part}"], GRADIENT)
    if objective == BlockObjective(dpace_over_masked=True):
        _check_metrics(vectors, logits.detach(), labels.ids, labels.valid, compare)


def _check_parts(vectors: dict[str, Tensor], prefix: str, loss: BlockLoss, compare: Compare) -> None:
    """Parts that an objective does not weigh are stored as 0."""
    for part in PARTS:
        if (stored := vectors.get(f"{prefix}.{part}_loss")) is not None:
            compare(f"{prefix}.{part}", loss.parts.get(part, torch.zeros(())), stored, LOSS)


def _check_metrics(
    vectors: dict[str, Tensor], logits: Tensor, ids: Tensor, valid: Tensor, compare: Compare
) -> None:
    ce = cross_entropy(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
    hits = (logits.argmax(-1) == ids).float()
    means, counts = position_means(ce, valid)
    found = {
        "loss_per_position": means,
        "acc_per_position": position_means(hits, valid)[0],
        "count_per_position": counts,
    }
    compare("metric.accuracy", masked_mean(hits, valid.float()), vectors["block.metric.accuracy"], LOSS)
    for name, value in found.items():
        compare(f"metric.{name}", value, vectors[f"block.metric.{name}"][1:], LOSS)
