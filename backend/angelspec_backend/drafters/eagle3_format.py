"""EAGLE-3 checkpoints of AngelSpec, SpecForge, AngelSlim, vLLM and speculators, whose names and ids differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from angelspec_backend.drafters.chain_checks import (
    Tensors,
    expect,
    fill,
    layer_shape,
    pop_embedding,
    pop_vocab,
    rows,
)
from angelspec_backend.drafters.eagle3 import Eagle3, default_tap_ids
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError

NAMINGS = ("midlayer", "layers0")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(names: Mapping[str, Any] | frozenset[str]) -> bool:
    """Whether a checkpoint with these tensors is an EAGLE-3 drafter."""
    return any(name.endswith(".hidden_norm.weight") and "layer" in name for name in names)


def load_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetParts) -> Eagle3:
    """An EAGLE-3 drafter with the weights of a checkpoint, whatever it calls them.

    Raises:
        LoadError: names the field or tensor, what it is and what was expected.
    """
    mine = _rename(tensors)
    # speculators nests what describes the layer.
    inner = {**config, **(config.get("transformer_layer_config") or {})}
    if "sliding_attention" in (inner.get("layer_types") or ()):
        raise LoadError("layer_types: a sliding_attention layer in a drafter is not supported")
    vocab, target = pop_vocab(mine, target.vocab_size), pop_embedding(mine, target)
    shape = layer_shape(mine, inner, input_size=2)
    expect("hidden_size of the weights", shape.hidden, target.hidden_size)
    if "vocab_size" in inner and vocab is not None:
        expect("vocab_size", inner["vocab_size"], target.vocab_size)
    taps = tap_ids(config, target.num_layers)
    expect("width of fc.weight", mine["fc.weight"].shape[1], len(taps) * target.hidden_size)
    flags: dict[str, Any] = {name: _flag(config, name) for name in FLAGS}
    for name, key in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        expect(f"{name} (by {key})", key in mine, flags[name])
    try:
        spec = DrafterSpec(
            "eagle3",
            shape,
            num_layers=1,
            vocab_size=target.vocab_size,
            target_hidden=target.hidden_size,
            tap_ids=taps,
            target_num_layers=target.num_layers,
            draft_vocab_size=0 if vocab is None else len(vocab),
            max_context=int(inner.get("max_position_embeddings") or 0),
            num_steps=int(config.get("num_steps") or 0),
            **flags,
        )
        network = Eagle3(spec, target, vocab)
    except ValueError as error:
        raise LoadError(str(error)) from None
    mine.setdefault("lm_head.weight", network.lm_head.weight.detach())  # the target's rows
    fill(network, mine)
    return network


def tap_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a checkpoint reads, in this project's convention.

    ``tap_ids`` and the list in ``eagle_config`` (SpecForge, AngelSpec) count outputs of layers from 0; at the
    top level (vLLM, speculators) id l is the input of layer l, one more.  Without any: the usual three.

    Raises:
        LoadError: an id that no layer has, or no default for so few layers.
    """
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    shift = 0
    ids = config.get("tap_ids") or nested
    if not ids and config.get(LAYER_IDS):
        ids, shift = config[LAYER_IDS], 1
    try:
        found = default_tap_ids(num_layers) if not ids else tuple(int(id_) - shift for id_ in ids)
    except ValueError as error:
        raise LoadError(str(error)) from None
    if min(found) < 0 or max(found) >= num_layers or list(found) != sorted(set(found)):
        raise LoadError(
            f"{LAYER_IDS} are {list(ids or found)}: allowed are ascending ids from {shift} to "
            f"{num_layers - 1 + shift}"
        )
    return found


def eagle3_checkpoint(network: Eagle3, naming: str = "midlayer") -> tuple[dict[str, Any], Tensors]:
    """Configuration and tensors of an EAGLE-3 drafter, in one of NAMINGS.  The tensors are not copied.

    "midlayer" is AngelSpec's and SpecForge's way, "layers0" vLLM's.

    Raises:
        ValueError: no such naming.
    """
    if naming not in NAMINGS:
        raise ValueError(f"naming is '{naming}', allowed: {', '.join(NAMINGS)}")
    spec, shape = network.spec, network.spec.shape
    outputs = list(spec.tap_ids)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[NAMINGS.index(naming)]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        **{name: getattr(spec, name) for name in FLAGS},
        "num_steps": spec.num_steps,
        "tap_ids": outputs,
    }
    if naming == "midlayer":
        config["eagle_config"] = {LAYER_IDS: outputs}
        return config, network.own_tensors()
    config[LAYER_IDS] = [id_ + 1 for id_ in outputs]
    old, new = "midlayer.", "layers.0."
    tensors = network.own_tensors().items()
    return config, {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors}


def _rename(tensors: Mapping[str, Tensor]) -> Tensors:
    """The names of training, from either naming, behind any prefix."""
    fc = [name for name in tensors if name.endswith("fc.weight")]
    if len(fc) != 1:
        raise LoadError(f"an EAGLE-3 drafter has one fc.weight, this checkpoint {len(fc)}")
    prefix = fc[0].removesuffix("fc.weight")
    mine: Tensors = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(prefix)
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name in mine:
            raise LoadError(f"{name} is there twice, with and without the prefix '{prefix}'")
        mine[name] = tensor
    rows(mine, "midlayer.hidden_norm.weight")
    return mine


def _flag(config: Mapping[str, Any], name: str) -> bool:
    return bool(config.get(name, (config.get("eagle_config") or {}).get(name, False)))
