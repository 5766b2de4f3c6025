"""Golden vectors of MTP and EAGLE-3 drafters: chains, the mixture of experts alone, losses over steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.checkpoint import load_drafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.drafters.unroll import UnrolledStep, shifted, unroll
from angelspec_backend.training.draft_vocab import covered_by, draft_index
from angelspec_backend.training.losses import position_terms
from angelspec_backend.training.ttt import StepObjective, StepsLoss, step_rows, steps_loss
from golden_compare import GRADIENT, HIDDEN, LOSS, Compare


def check_chain(folder: Path, compare: Compare) -> None:
    """All comparisons of one folder.

    compare: called with a name, what was found, what was expected, and a tolerance.
    """
    vectors = load_file(folder / "vectors.safetensors")
    about = json.loads((folder / "vectors.json").read_text())
    network = load(folder)
    if about["family"] == "mtp":
        hidden_states = vectors["in.last_hidden_prenorm"][:, None]
        features = network.features(hidden_states)
        compare("features", features, vectors["in.last_hidden_postnorm"], HIDDEN)
        first = 1  # in row 0 AngelSpec's training and serving differ on purpose
    else:
        hidden_states = vectors["in.taps"].transpose(0, 1)
        compare("tap_ids", torch.tensor(network.spec.tap_ids), torch.tensor(about["tap_layer_ids"]))
        compare("fc", network.features(hidden_states)[:-1], vectors["out.fc"], HIDDEN)
        first = 0
    check_steps(network, hidden_states, vectors, first, compare)
    if network.spec.moe is not None:
        check_experts(network, vectors, compare)
    if "in.loss_mask" in vectors:
        for case, options in about["train"]["options"].items():
            check_mtp_loss(network, vectors, case, options, compare)
    if "in.train_loss_mask" in vectors:
        check_eagle3_loss(network, folder, hidden_states, vectors, compare)


def load(folder: Path) -> ChainNetwork:
    """The drafter of a folder, with what it borrows from the target there."""
    config = json.loads((folder / "config.json").read_text())
    network = load_drafter(str(folder), load_target(folder, config))[1]
    assert isinstance(network, ChainNetwork)
    return network.requires_grad_(True)


def load_target(folder: Path, config: dict[str, Any]) -> TargetParts:
    """What the drafter of a folder borrows; the targets of all folders have twelve layers."""
    parts = load_file(folder / "target.safetensors")
    return TargetParts(
        parts["model.embed_tokens.weight"],
        parts["lm_head.weight"],
        parts.get("model.norm.weight"),
        config["rms_norm_eps"],
        num_layers=12,
    )


def check_steps(
    network: ChainNetwork, hidden_states: Tensor, vectors: dict[str, Tensor], first: int, compare: Compare
) -> None:
    """A chain of drafts behind every row, each step fed what the one before drafted."""
    steps, n = len(vectors["out.chain_logits"]), vectors["out.chain_logits"].shape[1]
    found = unroll(network, hidden_states, vectors["in.input_ids"], steps, on_policy=True)
    own = slice(first, n)
    for index, step in enumerate(found):
        assert step.logits is not None
        hidden = vectors["out.chain_hidden"][index]
        compare(f"step {index} hidden", step.hidden[own], hidden[own], HIDDEN)
        compare(f"step {index} logits", step.logits[own], vectors["out.chain_logits"][index, own], HIDDEN)
        drafts = step.logits[own].argmax(-1)
        if "out.chain_draft_ids" in vectors:
            compare(f"step {index} draft ids", drafts, vectors["out.chain_draft_ids"][index, own])
        tokens = vectors["out.chain_tokens"][index, own]
        compare(f"step {index} tokens", network.to_target(drafts), tokens)


def check_experts(network: Any, vectors: dict[str, Tensor], compare: Compare) -> None:
    """The mixture of experts alone."""
    mlp, x = network.midlayer.mlp, vectors["in.moe_x"]
    compare("chosen experts", mlp.route(x)[0].sort(-1).values, vectors["out.moe_topk"])
    compare("mixture of experts", mlp(x), vectors["out.moe_y"], HIDDEN)


def objective(options: dict[str, Any]) -> StepObjective:
    """A case of the MTP losses as an objective of this project."""
    form, top = options.get("single_step_form"), int(options.get("kl_topk", 0))
    distill: Any = form or (("topk_kl" if top else "kl") if options.get("use_kl") else "none")
    return StepObjective(
        distill=distill,
        support=top if form else 0,
        topk=0 if form else top,
        topk_variant=options.get("kl_variant", "a"),
        lk_eta=options.get("single_step_eta", 3.0),
        e2e_weight=float(options.get("e2e_weighting", False)),
        e2e_form="direct" if options.get("e2e_direct") else "surrogate",
        step_weights=(1 / 3,) * 3,
    )


def check_mtp_loss(
    network: Any, vectors: dict[str, Tensor], case: str, options: dict[str, Any], compare: Compare
) -> None:
    """One case of the losses over steps, with gradients where there are some."""
    expected = {
        name.removeprefix(f"out.loss.{case}."): tensor
        for name, tensor in vectors.items()
        if name.startswith(f"out.loss.{case}.")
    }
    network.zero_grad()
    documents = vectors["in.loss_doc_ids"] if options.get("_packed") else None
    loss, valid = mtp_loss(network, vectors, options, documents)
    compare(f"{case} ce", loss.ce, expected["ce"], LOSS)
    compare(f"{case} distill", loss.distill, expected["distill"], LOSS)
    compare(f"{case} count", valid.sum(-1).float(), expected["count"])
    if "e2e" in expected:
        assert loss.e2e is not None
        compare(f"{case} e2e", loss.e2e, expected["e2e"], LOSS)
    if "recipe_total" in expected:
        compare(f"{case} total", loss.total, expected["recipe_total"], LOSS)
        loss.total.backward()
        parameters = dict(network.named_parameters())
        for name, gradient in expected.items():
            if name.startswith("grad."):
                compare(f"{case} {name}", parameters[name[5:]].grad, gradient, GRADIENT)


def mtp_loss(
    network: Any, vectors: dict[str, Tensor], options: dict[str, Any], documents: Tensor | None
) -> tuple[StepsLoss, Tensor]:
    """The losses of an MTP case; labels are the text's or (ce_self) the target's likeliest."""
    tokens, mask = vectors["in.input_ids"], vectors["in.loss_mask"]
    hidden_states = vectors["in.last_hidden_prenorm"][:, None]
    steps = unroll(
        network,
        hidden_states,
        tokens,
        3,
        document_ids=documents,
        on_policy=bool(options.get("on_policy")),
        blank_first_row=True,
    )
    teacher = (vectors["in.last_hidden_postnorm"] @ network.lm_head.weight.T).detach()  # [seq, vocab]
    chosen = objective(options)
    terms, valid = [], []
    for index, step in enumerate(steps):
        rows = step_rows(tokens, mask, index, documents)
        labels = rows.labels if options.get("ce_use_ground_truth") else teacher[rows.teacher].argmax(-1)
        terms.append(position_terms(_logits(step), labels, teacher[rows.teacher], chosen.terms))
        valid.append(rows.valid)
    return steps_loss(terms, torch.stack(valid), chosen), torch.stack(valid)


def check_eagle3_loss(
    network: ChainNetwork,
    folder: Path,
    hidden_states: Tensor,
    vectors: dict[str, Tensor],
    compare: Compare,
) -> None:
    """The losses over steps of EAGLE-3, against the target's distribution on the draft vocabulary."""
    assert network.vocab is not None
    head = load_file(folder / "target.safetensors")["lm_head.weight"]
    tokens, mask = vectors["in.input_ids"], vectors["in.train_loss_mask"]
    hidden = vectors["in.train_last_hidden"]
    index = draft_index(network.vocab.target_ids, head.shape[0])
    for number, step in enumerate(unroll(network, hidden_states, tokens, 3)):
        rows = step_rows(tokens, mask, number, mask_shift=0)
        # Behind the end the teacher's hidden state is zero.  Such rows may count, as the mask is not shifted.
        at_row = shifted(hidden, number + 1, torch.zeros_like(tokens)) @ head.T  # [seq, vocab]
        terms = position_terms(
            _logits(step),
            index[at_row.argmax(-1)],
            at_row[:, network.vocab.target_ids],
            StepObjective(distill="soft_ce").terms,
        )
        valid = rows.valid & covered_by(at_row, index)
        if number == 0:
            compare("supervised rows", valid.float(), vectors["out.train_position_mask"])
        compare(f"loss of step {number} rows", valid.sum().float(), vectors["out.train_step_count"][number])
        assert terms.soft_ce is not None
        loss = terms.soft_ce[valid].mean()
        compare(f"loss of step {number}", loss, vectors["out.train_step_loss"][number], LOSS)
        hits = terms.hit[valid].float().mean()
        compare(f"hits of step {number}", hits, vectors["out.train_step_acc"][number], LOSS)


def _logits(step: UnrolledStep) -> Tensor:
    assert step.logits is not None
    return step.logits
