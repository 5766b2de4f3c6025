"""EAGLE-3 checkpoints of AngelSpec, SpecForge, AngelSlim, vLLM and speculators: one network, many names."""

from __future__ import annotations

import re
from typing import Any

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
from angelspec_backend.drafters.eagle3 import Eagle3, default_tap_ids
from angelspec_backend.drafters.format_checks import Sizes, check_plain, own_parts
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError

NAMINGS = ("angelspec", "vllm")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Of these namings."""
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have the names of an EAGLE-3 drafter."""
    ends = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return any(name.endswith(ends) for name in checkpoint.tensors)


def load_eagle3(checkpoint: Checkpoint, target: TargetParts) -> ChainNetwork:
    """An EAGLE-3 drafter, whatever its tensors are called.

    Raises:
        LoadError: names the field or tensor, what it is and what was expected.
    """
    tensors = _rename(checkpoint)
    # speculators nests what describes the layer, others the flags.
    config = {
        **(checkpoint.config.get("eagle_config") or {}),
        **checkpoint.config,
        **(checkpoint.config.get("transformer_layer_config") or {}),
    }
    check_plain(checkpoint, config)
    vocab = pop_vocab(checkpoint, tensors, target.vocab_size)
    head = tensors.pop("lm_head.weight", None)
    target = own_parts(checkpoint, tensors, target)
    rows = target.lm_head if vocab is None else target.lm_head[vocab.target_ids]
    tensors["lm_head.weight"] = rows if head is None else head
    shape = layer_shape(checkpoint, tensors, config, input_size=2)
    taps = tap_ids(checkpoint, target.num_layers)
    width = Sizes(checkpoint, tensors)("fc.weight", 1)
    agree(checkpoint, "the width of fc.weight", width, len(taps) * target.hidden_size, "taps * hidden size")
    flags = {name: bool(config.get(name, False)) for name in FLAGS}
    for name, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        agree(checkpoint, f"{name} in config.json", flags[name], tensor in tensors, f"as {tensor} tells")
    fields = {
        "kind": "eagle3",
        "shape": shape,
        "tap_ids": taps,
        **flags,
        **common_fields(config, target, vocab),
    }
    return build(checkpoint, Eagle3, tensors, target, vocab, fields)


def tap_ids(checkpoint: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a checkpoint reads, in this project's convention.

    ``tap_ids`` and the list in ``eagle_config`` (SpecForge, AngelSpec) count outputs of layers from 0; at the
    top level (vLLM, speculators) id l is the input of layer l, one more.  Without any: the usual three.
    num_layers: of the target.

    Raises:
        LoadError: an id that no layer has, or no default for so few layers.
    """
    config, shift = checkpoint.config, 0
    ids = config.get("tap_ids") or (config.get("eagle_config") or {}).get(LAYER_IDS)
    if not ids and config.get(LAYER_IDS):
        ids, shift = config[LAYER_IDS], 1
    try:
        found = default_tap_ids(num_layers) if not ids else tuple(int(id_) - shift for id_ in ids)
    except ValueError as error:
        raise LoadError(f"{checkpoint.path}: {error}") from None
    if min(found) < 0 or max(found) >= num_layers or list(found) != sorted(set(found)):
        allowed = f"ascending ids from {shift} to {num_layers - 1 + shift}"
        raise checkpoint.refuse(LAYER_IDS, list(ids or found), allowed)
    return found


def export_eagle3(network: Eagle3, naming: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors in one of NAMINGS: AngelSpec's and SpecForge's way, or vLLM's."""
    spec = network.spec
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[NAMINGS.index(naming)]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **common_config(network),
        **{name: getattr(spec, name) for name in FLAGS},
    }
    if naming == "angelspec":
        config["eagle_config"] = {LAYER_IDS: list(spec.tap_ids)}
        return config, network.own_tensors()
    config[LAYER_IDS] = [id_ + 1 for id_ in spec.tap_ids]
    tensors = network.own_tensors().items()
    return config, {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors}


def _rename(checkpoint: Checkpoint) -> Tensors:
    """Our names, from either naming, behind any prefix."""
    fc = [name for name in checkpoint.tensors if re.search(r"(^|\.)fc\.weight$", name)]
    if len(fc) != 1:
        raise checkpoint.refuse("fc.weight", f"there {len(fc)} times", "one")
    prefix = fc[0].removesuffix("fc.weight")
    tensors: Tensors = {}
    for name, tensor in checkpoint.tensors.items():
        own = re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix(prefix))
        if own in tensors:
            raise checkpoint.refuse(own, "there twice", f"once, behind '{prefix}' or without")
        tensors[own] = tensor
    return tensors
