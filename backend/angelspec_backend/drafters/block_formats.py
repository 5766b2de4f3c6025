"""Published formats of block drafters: AngelSpec's, z-lab's DFlash, DeepSpec's DSpark.

Sizes come from the tensors; a configuration that says otherwise is refused.  From the configuration alone
come tap ids, mask token, block size, eps and RoPE base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.checkpoint_files import Checkpoint, load_strict
from angelspec_backend.drafters.format_checks import Sizes, check_plain, need, own_parts
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.spec import DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.tensor_files import rope_theta

FC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
"""Names of z-lab and DeepSpec, and AngelSpec's, which are the network's."""
DSPARK_ARCHITECTURE, DFLASH_ARCHITECTURE = "Qwen3DSparkModel", "DFlashDraftModel"
NEXT_TOKEN = (DSPARK_ARCHITECTURE,)
"""Architectures among those with FC_NAMES whose slot k predicts the token at anchor + k + 1."""
IDENTITY = "trained_for"
"""Field of exported configurations with the TargetIdentity."""


def is_angelspec(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have AngelSpec's names for a block drafter."""
    return checkpoint.has("context_norm.weight", "final_norm.weight")


def is_fc_named(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have the names of z-lab's DFlash and DeepSpec's DSpark."""
    return checkpoint.has(*FC_NAMES)


def load_angelspec(checkpoint: Checkpoint, target: TargetParts) -> BlockNetwork:
    """DFlash, DFlare, DFly and DSpark of AngelSpec, told apart by their tensors; same-position labels."""
    if "layer_fusion_weights" in checkpoint.tensors:
        kind = "dfly" if checkpoint.has("context_proj.weight") else "dflare"
    else:
        kind = "dspark" if _has_dspark_head(checkpoint) else "dflash"
    return _load(checkpoint, target, kind, checkpoint.tensors, "target_num_hidden_layers", 0)


def load_fc_named(checkpoint: Checkpoint, target: TargetParts) -> BlockNetwork:
    """DFlash of z-lab (same-position labels) and DSpark of DeepSpec (next-token labels)."""
    architecture = next(iter(checkpoint.config.get("architectures") or ["unknown"]))
    if architecture not in (DFLASH_ARCHITECTURE, DSPARK_ARCHITECTURE):
        raise checkpoint.refuse(
            "architectures", f"'{architecture}'", f"{DFLASH_ARCHITECTURE} or {DSPARK_ARCHITECTURE}"
        )
    tensors = {FC_NAMES.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}
    kind = "dspark" if _has_dspark_head(checkpoint) else "dflash"
    return _load(checkpoint, target, kind, tensors, "num_target_layers", int(architecture in NEXT_TOKEN))


def _has_dspark_head(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(("markov_head.", "confidence_head.")) for name in checkpoint.tensors)


def _load(
    checkpoint: Checkpoint,
    target: TargetParts,
    kind: str,
    tensors: Mapping[str, Tensor],
    depth_field: str,
    label_shift: int,
) -> BlockNetwork:
    tensors = dict(tensors)
    config = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    check_plain(checkpoint, config)
    spec = _spec(checkpoint, config, kind, tensors, target, depth_field, label_shift)
    parts = own_parts(checkpoint, tensors, target)
    with torch.device("meta"):
        network = BlockNetwork(spec, parts)
    load_strict(network, checkpoint, tensors)
    return network


def _spec(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    kind: str,
    tensors: Mapping[str, Tensor],
    target: TargetParts,
    depth_field: str,
    label_shift: int,
) -> DrafterSpec:
    """The specification: sizes from the tensors, conventions from the configuration."""
    size = Sizes(checkpoint, tensors)
    head_dim, hidden = size("layers.0.self_attn.q_norm.weight", 0), size("final_norm.weight", 0)
    taps = tuple(int(tap) for tap in need(checkpoint, config, "target_layer_ids"))
    markov_rank = size("markov_head.markov_w1.weight", 1, 0)
    confidence_inputs = size("confidence_head.proj.weight", 1, 0)
    theta = rope_theta(config)
    if theta is None:
        raise checkpoint.refuse("rope_theta", "missing", "a number")
    shape = LayerShape(
        hidden=hidden,
        intermediate=size("layers.0.mlp.gate_proj.weight", 0),
        num_heads=size("layers.0.self_attn.q_proj.weight", 0) // head_dim,
        num_kv_heads=size("layers.0.self_attn.k_proj.weight", 0) // head_dim,
        head_dim=head_dim,
        eps=float(need(checkpoint, config, "rms_norm_eps")),
        rope_theta=theta,
    )
    inputs = size("context_proj.weight", 1, size("layer_fusion_weights", 1, 0) * hidden)
    try:
        spec = DrafterSpec(
            kind=kind,
            shape=shape,
            num_layers=len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
            vocab_size=target.vocab_size,
            target_hidden=target.hidden_size,
            tap_ids=taps,
            target_num_layers=target.num_layers,
            max_context=int(config.get("max_position_embeddings") or 0),
            block_size=int(need(checkpoint, config, "block_size")),
            mask_token_id=int(need(checkpoint, config, "mask_token_id")),
            label_shift=label_shift,
            correction_size=size("hidden_correction.gate_proj.weight", 0, 0),
            markov_rank=markov_rank,
            markov_kind=str(config.get("markov_head_type") or "vanilla").lower(),
            confidence_head=confidence_inputs > 0,
            confidence_with_markov=not 0 < confidence_inputs <= hidden,
            target=TargetIdentity(**(config.get(IDENTITY) or {})),
        )
    except (ValueError, TypeError) as error:
        raise LoadError(f"{checkpoint.path}: {error}") from error
    if inputs != len(taps) * target.hidden_size:
        raise LoadError(
            f"{checkpoint.path}: it reads {inputs} features per position, but {len(taps)} target_layer_ids "
            f"of a target with hidden size {target.hidden_size} give {len(taps) * target.hidden_size}"
        )
    _check_config(checkpoint, config, spec, depth_field)
    return spec


def _check_config(
    checkpoint: Checkpoint, config: Mapping[str, Any], spec: DrafterSpec, depth_field: str
) -> None:
    """Refuse a configuration that contradicts the tensors or the target."""
    shape = spec.shape
    derived = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": spec.num_layers,
        "vocab_size": spec.vocab_size,
        "target_hidden_size": spec.target_hidden,
        depth_field: spec.target_num_layers,
        "markov_rank": spec.markov_rank,
        "enable_hidden_correction": spec.correction_size > 0,
        "hidden_correction_intermediate_size": spec.correction_size,
        "enable_confidence_head": spec.confidence_head,
    }
    for field, expected in derived.items():
        found = config.get(field)
        if found is not None and found != expected:
            raise checkpoint.refuse(f"{field} in config.json", found, f"{expected} (tensors and target)")
    last = spec.target_num_layers - 2  # of the last layer, other tools record the normed output
    if max(spec.tap_ids) > last:
        raise checkpoint.refuse("target_layer_ids", list(spec.tap_ids), f"ids from 0 to {last}")
