"""MTP checkpoints: three ways to name the tensors, two to lay out experts, one network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.chain_formats import (
    Tensors,
    agree,
    build,
    common_config,
    common_fields,
    layer_shape,
    pop_vocab,
)
from angelspec_backend.drafters.checkpoint_files import Checkpoint
from angelspec_backend.drafters.format_checks import Sizes, check_plain, need, own_parts
from angelspec_backend.drafters.moe import MoeShape
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.target_parts import TargetParts

NAMINGS = ("angelspec", "layers_n", "qwen3_mtp")
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


def naming_of(checkpoint: Checkpoint) -> tuple[str, int] | None:
    """Which of NAMINGS a checkpoint uses, and its n (0 where there is none); None if it is no MTP head."""
    if checkpoint.has("eh_proj.weight"):
        return "angelspec", 0
    if checkpoint.has("mtp.fc.weight"):
        return "qwen3_mtp", 0
    layers = [re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in checkpoint.tensors]
    found = sorted(int(match[1]) for match in layers if match)
    if len(found) > 1:
        raise checkpoint.refuse(
            "MTP heads", f"in layers {found}", "one; heads of several depths are not supported"
        )
    return ("layers_n", found[0]) if found else None


def is_mtp(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have the names of an MTP head."""
    return naming_of(checkpoint) is not None


def load_mtp(checkpoint: Checkpoint, target: TargetParts) -> ChainNetwork:
    """An MTP head, whatever its tensors are called.

    Raises:
        LoadError: names the field or tensor, what it is and what was expected.
    """
    naming = naming_of(checkpoint)
    assert naming is not None  # by is_mtp
    kind, layer = naming
    config = checkpoint.config
    check_plain(checkpoint, config)
    if kind == "layers_n":
        agree(checkpoint, "the layer of the MTP head", layer, target.num_layers, "the target's depth")
    if kind != "angelspec":  # there the configuration describes the head alone
        depth = config.get("num_hidden_layers")
        agree(checkpoint, "num_hidden_layers in config.json", depth, target.num_layers, "as the target")
    tensors = _fuse_experts(
        checkpoint, {_rename(name, kind, layer): tensor for name, tensor in checkpoint.tensors.items()}
    )
    vocab = pop_vocab(checkpoint, tensors, target.vocab_size)
    target = own_parts(checkpoint, tensors, target)
    shape = layer_shape(checkpoint, tensors, config, input_size=1)
    agree(checkpoint, "vocab_size in config.json", config.get("vocab_size"), target.vocab_size)
    fields = {
        "kind": "mtp",
        "shape": shape,
        "tap_ids": (target.num_layers - 1,),
        "postnorm_input": bool(config.get("mtp_draft_input_postnorm", True)),
        "moe": _moe_shape(checkpoint, tensors),
        **common_fields(config, target, vocab),
    }
    return build(checkpoint, MTP, tensors, target, vocab, fields)


def export_mtp(network: MTP, naming: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors in one of NAMINGS.  A draft vocabulary (d2t, t2d) is an addition of ours."""
    spec, depth = network.spec, network.spec.target_num_layers
    own = naming == "angelspec"
    config: dict[str, Any] = {
        "architectures": ["MTPDraftModel" if own else "MTPForCausalLM"],
        "model_type": "qwen3_mtp" if naming == "qwen3_mtp" else "mtp",
        "num_hidden_layers": 1 if own else depth,
        **common_config(network),
        "num_nextn_predict_layers": 1,
        "qk_norm": spec.shape.qk_norm,
        "mlp_type": "dense" if spec.moe is None else "moe",
        "mtp_draft_input_postnorm": spec.postnorm_input,
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
    if not own:
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


def _fuse_experts(checkpoint: Checkpoint, tensors: Tensors) -> Tensors:
    """Experts one by one, [out, in] each, as one tensor [num_experts, in, out] per projection."""
    kept, experts = {}, dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[2], {})[int(match[1])] = tensor
        else:
            kept[name] = tensor
    for projection, parts in experts.items():
        agree(checkpoint, f"experts with {projection}_proj", sorted(parts), list(range(len(parts))))
        kept[FUSED.format(projection)] = torch.stack([parts[index].mT for index in range(len(parts))])
    return kept


def _split_experts(tensors: Tensors) -> Tensors:
    split = dict(tensors)
    for projection in ("gate", "up", "down"):
        for index, weight in enumerate(split.pop(FUSED.format(projection), ())):
            split[f"midlayer.mlp.experts.{index}.{projection}_proj.weight"] = weight.mT.contiguous()
    return split


def _moe_shape(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> MoeShape | None:
    if FUSED.format("gate") not in tensors:
        return None
    config, size = checkpoint.config, Sizes(checkpoint, tensors)
    for field in ("moe_router_use_sigmoid", "route_norm"):
        agree(checkpoint, f"{field} in config.json", config.get(field), True)
    experts, intermediate = size(FUSED.format("gate"), 0), size(FUSED.format("gate"), 2)
    agree(checkpoint, "num_experts in config.json", config.get("num_experts"), experts)
    agree(
        checkpoint, "moe_intermediate_size in config.json", config.get("moe_intermediate_size"), intermediate
    )
    factor = "routed_scaling_factor" if "routed_scaling_factor" in config else "router_scaling_factor"
    return MoeShape(
        experts,
        int(need(checkpoint, config, "num_experts_per_tok")),
        intermediate,
        size("midlayer.mlp.shared_mlp.gate_proj.weight", 0, 0) // intermediate,
        float(need(checkpoint, config, factor)),
        expert_bias="midlayer.mlp.expert_bias" in tensors,
    )
