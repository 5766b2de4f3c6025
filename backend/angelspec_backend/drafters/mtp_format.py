"""MTP checkpoints: three ways to name the tensors, two to lay out experts, one network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.chain_checks import (
    Tensors,
    expect,
    fill,
    layer_shape,
    pop_embedding,
    pop_vocab,
    required,
    rows,
)
from angelspec_backend.drafters.moe import MoeShape
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError

NAMINGS = ("training", "layers_n", "qwen3_mtp")
NAMES = (
    # AngelSpec in training, and here; in files of the target's own kind, n its depth; Qwen3-Next, qwen3_mtp
    ("eh_proj.", "model.layers.{n}.eh_proj.", "mtp.fc."),
    ("enorm.", "model.layers.{n}.enorm.", "mtp.pre_fc_norm_embedding."),
    ("hnorm.", "model.layers.{n}.hnorm.", "mtp.pre_fc_norm_hidden."),
    ("final_layernorm.", "model.layers.{n}.final_layernorm.", "mtp.norm."),
    ("midlayer.", "model.layers.{n}.", "mtp.layers.0."),
    ("embed_tokens.", "model.embed_tokens.", "model.embed_tokens."),
)
"""Beginnings of the tensors' names, one column per naming; the first that fits counts."""

EXPERT = re.compile(r"midlayer\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = "midlayer.mlp.experts_{}_proj"


def naming_of(names: Mapping[str, Any] | frozenset[str]) -> tuple[str, int] | None:
    """Which of NAMINGS a checkpoint uses, and its n (0 where there is none); None if it is no MTP head."""
    if "eh_proj.weight" in names:
        return "training", 0
    if "mtp.fc.weight" in names:
        return "qwen3_mtp", 0
    layers = [re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in names]
    found = sorted(int(match[1]) for match in layers if match)
    if len(found) > 1:
        raise LoadError(f"MTP heads of several depths are not supported; found layers {found}")
    return ("layers_n", found[0]) if found else None


def load_mtp(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetParts) -> MTP:
    """An MTP head with the weights of a checkpoint, whatever it calls them.

    Raises:
        LoadError: names the field or tensor, what it is and what was expected.
    """
    naming = naming_of(tensors)
    if naming is None:
        raise LoadError("no MTP head: eh_proj.weight (or mtp.fc.weight) is missing")
    kind, layer = naming
    expect("layer of the MTP head", layer, target.num_layers if kind == "layers_n" else 0)
    if kind != "training":  # a training configuration describes the head alone
        expect("num_hidden_layers", config.get("num_hidden_layers", target.num_layers), target.num_layers)
    mine = _fuse_experts({_rename(name, kind, layer): tensor for name, tensor in tensors.items()})
    mine.pop("lm_head.weight", None)  # always the target's
    vocab, target = pop_vocab(mine, target.vocab_size), pop_embedding(mine, target)
    shape = layer_shape(mine, config, input_size=1)
    expect("hidden_size of the weights", shape.hidden, target.hidden_size)
    if "vocab_size" in config:
        expect("vocab_size", config["vocab_size"], target.vocab_size)
    spec = DrafterSpec(
        "mtp",
        shape,
        num_layers=1,
        vocab_size=target.vocab_size,
        target_hidden=target.hidden_size,
        tap_ids=(target.num_layers - 1,),
        target_num_layers=target.num_layers,
        draft_vocab_size=0 if vocab is None else len(vocab),
        max_context=int(config.get("max_position_embeddings") or 0),
        num_steps=int(config.get("num_steps") or 0),
        postnorm_input=bool(config.get("mtp_draft_input_postnorm", True)),
        moe=_moe_shape(mine, config),
    )
    network = MTP(spec, target, vocab)
    fill(network, mine)
    return network


def mtp_checkpoint(network: MTP, naming: str = "training") -> tuple[dict[str, Any], Tensors]:
    """Configuration and tensors of an MTP head, in one of NAMINGS.

    The tensors are the network's own, and not copied.  A draft vocabulary (d2t, t2d), ``num_steps`` and
    ``tap_ids`` are additions of this project.

    Raises:
        ValueError: no such naming.
    """
    if naming not in NAMINGS:
        raise ValueError(f"naming is '{naming}', allowed: {', '.join(NAMINGS)}")
    spec, shape = network.spec, network.spec.shape
    depth = spec.target_num_layers
    config: dict[str, Any] = {
        "architectures": ["MTPDraftModel" if naming == "training" else "MTPForCausalLM"],
        "model_type": {"training": "mtp", "layers_n": "mtp", "qwen3_mtp": "qwen3_mtp"}[naming],
        "num_hidden_layers": 1 if naming == "training" else depth,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "max_position_embeddings": spec.max_context,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "qk_norm": shape.qk_norm,
        "mtp_draft_input_postnorm": spec.postnorm_input,
        "num_steps": spec.num_steps,
        "tap_ids": list(spec.tap_ids),
    }
    tensors = network.own_tensors()
    if spec.moe is not None:
        config |= {
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "moe_intermediate_size": spec.moe.intermediate,
            "num_shared_experts": spec.moe.num_shared_experts,
            "router_scaling_factor": spec.moe.scaling,
        }
    if naming != "training":
        tensors = _split_experts(tensors)
    return config, {_published(name, naming, depth): tensor for name, tensor in tensors.items()}


def _rename(name: str, naming: str, layer: int) -> str:
    column = NAMINGS.index(naming)
    for row in NAMES:
        prefix = row[column].format(n=layer)
        if name.startswith(prefix):
            return row[0] + name.removeprefix(prefix)
    return name


def _published(name: str, naming: str, layer: int) -> str:
    for row in NAMES:
        if name.startswith(row[0]):
            return row[NAMINGS.index(naming)].format(n=layer) + name.removeprefix(row[0])
    return name


def _fuse_experts(tensors: Tensors) -> Tensors:
    """Experts one by one, [out, in] each, as one tensor [num_experts, in, out] per projection."""
    kept, experts = {}, dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[2], {})[int(match[1])] = tensor
        else:
            kept[name] = tensor
    for projection, parts in experts.items():
        expect(f"experts with {projection}_proj", sorted(parts), list(range(len(parts))))
        kept[FUSED.format(projection)] = torch.stack([parts[index].mT for index in range(len(parts))])
    return kept


def _split_experts(tensors: Tensors) -> Tensors:
    split = dict(tensors)
    for projection in ("gate", "up", "down"):
        for index, weight in enumerate(split.pop(FUSED.format(projection), ())):
            split[f"midlayer.mlp.experts.{index}.{projection}_proj.weight"] = weight.mT.contiguous()
    return split


def _moe_shape(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> MoeShape | None:
    if FUSED.format("gate") not in tensors:
        return None
    for name in ("moe_router_use_sigmoid", "route_norm"):
        expect(name, config.get(name, True), True)
    num_experts, _, intermediate = tensors[FUSED.format("gate")].shape
    expect("num_experts of the weights", num_experts, config.get("num_experts", num_experts))
    shared = "midlayer.mlp.shared_mlp.gate_proj.weight"
    return MoeShape(
        num_experts,
        int(required(config, "num_experts_per_tok")),
        intermediate,
        rows(tensors, shared) // intermediate if shared in tensors else 0,
        float(required(config, "router_scaling_factor", "routed_scaling_factor")),
        expert_bias="midlayer.mlp.expert_bias" in tensors,
    )
