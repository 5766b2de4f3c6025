"""Golden vectors of block drafters: context, one round per anchor, training logits, losses, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork, Slot
from angelspec_backend.drafters.checkpoint import load_drafter
from angelspec_backend.drafters.masked import block_hidden_states, train_forward
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.training.losses import position_terms
from angelspec_backend.training.masks import block_mask
from angelspec_backend.training.objectives import BlockLoss, BlockObjective, block_loss
from golden_compare import GRADIENT, HIDDEN, LOSS, Compare
from golden_losses import block_objective

Vectors = dict[str, Tensor]


def check_blocks(folder: Path, compare: Compare) -> None:
    """All comparisons of one folder."""
    vectors = load_file(folder / "vectors.safetensors")
    about = json.loads((folder / "vectors.json").read_text())
    head = load_file(folder / "target.safetensors")["lm_head.weight"]
    network = load(folder)
    spec = network.spec
    compare("tap ids", torch.tensor(spec.tap_ids), torch.tensor(about["tap_layer_ids"]))
    compare("label shift", torch.tensor(spec.label_shift), torch.tensor(about["label_shift"]))
    with torch.no_grad():
        check_round(network, vectors, compare)
    if "in.train_anchors" in vectors:
        check_training(network, vectors, head, about["train"]["options"], compare)


def load(folder: Path) -> BlockNetwork:
    """The drafter of a folder, with what it borrows from the target there."""
    config = json.loads((folder / "config.json").read_text())
    parts = load_file(folder / "target.safetensors")
    target = TargetParts(
        parts["model.embed_tokens.weight"],
        parts["lm_head.weight"],
        None,
        config["rms_norm_eps"],
        int(config.get("target_num_hidden_layers") or config["num_target_layers"]),
    )
    network = load_drafter(str(folder), target)[1]
    assert isinstance(network, BlockNetwork)
    return network.requires_grad_(True)


def check_round(network: BlockNetwork, vectors: Vectors, compare: Compare) -> None:
    """One greedy round per anchor, each token conditioned on the one drafted before."""
    features, ids, anchors = (
        vectors["in.taps"].transpose(0, 1),
        vectors["in.input_ids"],
        vectors["in.anchors"],
    )
    compare("layer context", network.layer_context(features), vectors["out.layer_context"], HIDDEN)
    compare("block input", network.block_ids(ids[anchors]), vectors["out.block_input_ids"])
    keep = torch.ones(len(anchors), dtype=torch.bool)
    mask = block_mask(anchors, keep, network.spec.block_size, len(ids))
    hidden = block_hidden_states(network, features[None], ids[None], anchors[None], mask[None])[0]
    compare("block hidden", hidden, vectors["out.block_hidden"], HIDDEN)
    compare("base logits", network.lm_head(hidden), vectors["out.base_logits"], HIDDEN)

    tokens, confidence = network.draft(hidden, ids[anchors])
    compare("tokens", tokens, vectors["out.tokens"])
    first = anchors[:, None] + 1
    compare("positions", first + torch.arange(tokens.shape[1]), vectors["out.draft_positions"])
    previous = torch.cat([ids[anchors][:, None], tokens[:, :-1]], 1)
    slots = network.teacher_forced(network.drafting(hidden), previous)
    compare("logits", slots.logits, vectors["out.logits"], HIDDEN)
    if "out.corrected_hidden" in vectors:
        corrected = network.correct(network.drafting(hidden), previous)
        compare("corrected hidden", corrected, vectors["out.corrected_hidden"], HIDDEN)
    if "out.confidence" in vectors:
        assert slots.confidence is not None
        compare("confidence logits", slots.confidence, vectors["out.confidence_logit"], HIDDEN)
        compare("confidence", confidence, vectors["out.confidence"], HIDDEN)
    if "out.tokens_no_head" in vectors:
        plain = network.drafting(network.lm_head(hidden)).argmax(-1)
        compare("tokens without head", plain, vectors["out.tokens_no_head"])


def check_training(
    network: BlockNetwork, vectors: Vectors, head: Tensor, options: dict[str, Any], compare: Compare
) -> None:
    """The training forward over all blocks at once, its loss and its gradients."""
    features, ids = vectors["in.taps"].transpose(0, 1), vectors["in.input_ids"]
    anchors, keep = vectors["in.train_anchors"], vectors["in.train_keep"]
    mask = block_mask(anchors, keep, network.spec.block_size, len(ids))
    _, slots = train_forward(network, features[None], ids[None], anchors[None], mask[None])
    logits = slots.logits[0]  # [blocks, drafts, vocab]
    first = 1 - network.spec.label_shift  # vectors have the anchor's slot too
    expected = vectors["out.train_teacher_forced_logits"][:, first:]
    compare("teacher-forced logits", logits[keep], expected, HIDDEN)

    labels_at = anchors[:, None] + 1 + torch.arange(logits.shape[1])  # [blocks, drafts]
    inside = labels_at.clamp(max=len(ids) - 1)
    valid = keep[:, None] & (labels_at < len(ids)) & (vectors["in.train_loss_mask"][inside] > 0)
    teacher = vectors["in.train_last_hidden"][inside - 1] @ head.T
    loss, hits, ce = losses(slots, ids[inside], teacher, valid, block_objective(options))
    compare("loss", loss.total, vectors["out.train_loss"], LOSS)
    for part, name in (("l1", "l1"), ("kl", "kl"), ("lk", "lk"), ("ce", "ce"), ("confidence", "confidence")):
        # AngelSpec reports 0 for a term that it does not use.
        wanted = vectors.get(f"out.train_component.{name}_loss")
        if part in loss.parts and wanted is not None and wanted != 0:
            compare(f"{part} loss", loss.parts[part], wanted, LOSS)
    compare("accuracy", hits[valid].float().mean(), vectors["out.train_accuracy"], LOSS)
    count = valid.sum(0)
    compare("labels per slot", count.float(), vectors["out.train_count_per_position"][first:])
    for name, values in (("loss", ce), ("acc", hits.float())):
        mean = (values * valid).sum(0) / count.clamp(min=1)
        compare(f"{name} per slot", mean, vectors[f"out.train_{name}_per_position"][first:], LOSS)

    loss.total.backward()
    parameters = {name: each for name, each in network.named_parameters() if each.grad is not None}
    for name, gradient in vectors.items():
        if name.startswith("out.train_grad."):
            own = parameters[name.removeprefix("out.train_grad.")]
            compare(name.removeprefix("out.train_"), own.grad, gradient, GRADIENT)
    norms = torch.stack([each.grad.norm() for each in parameters.values() if each.grad is not None])
    compare("norm of all gradients", norms.norm(), vectors["out.train_grad_norm"], GRADIENT)


def losses(
    slots: Slot, labels: Tensor, teacher: Tensor, valid: Tensor, chosen: BlockObjective
) -> tuple[BlockLoss, Tensor, Tensor]:
    """The objective, and per draft whether it is right and its cross entropy, [blocks, drafts] both."""
    logits = slots.logits[0]
    terms = position_terms(logits.flatten(0, 1), labels.flatten(), teacher.flatten(0, 1), chosen.terms)
    terms = terms.view(*valid.shape)
    confidence = None if slots.confidence is None else slots.confidence[0]
    return block_loss(terms, valid, chosen, confidence), terms.hit, terms.ce.detach()
