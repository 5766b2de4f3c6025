"""What the loaders of MTP and EAGLE-3 checkpoints share: shapes from tensors, and strict accounting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.drafters.tensor_files import rope_theta
from angelspec_backend.engine.loader import LoadError

Tensors = dict[str, Tensor]

BORROWED_EMBEDDING = "embed_tokens.weight"


def layer_shape(tensors: Mapping[str, Tensor], config: Mapping[str, Any], input_size: int) -> LayerShape:
    """The shape of ``midlayer``, from its tensors; the configuration only splits heads, and must agree.

    input_size: width of what q_proj reads, in hidden sizes.

    Raises:
        LoadError: names the field, what it is and what was expected.
    """
    hidden = rows(tensors, "midlayer.input_layernorm.weight")
    queries, keys = rows(tensors, "midlayer.self_attn.q_proj.weight"), rows(
        tensors, "midlayer.self_attn.k_proj.weight"
    )  # fmt: skip
    qk_norm = "midlayer.self_attn.q_norm.weight" in tensors
    if qk_norm:
        head_dim = rows(tensors, "midlayer.self_attn.q_norm.weight")
    else:
        head_dim = int(config.get("head_dim") or 0) or hidden // int(required(config, "num_attention_heads"))
    mlp = "midlayer.mlp.gate_proj.weight"
    intermediate = rows(tensors, mlp) if mlp in tensors else int(required(config, "intermediate_size"))
    found = {
        "hidden_size": hidden,
        "num_attention_heads": queries / head_dim,
        "num_key_value_heads": keys / head_dim,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }
    for name, value in found.items():
        expect(f"{name} of the weights", value, config.get(name) or value)
    width = tensors["midlayer.self_attn.q_proj.weight"].shape[1]
    expect("width of midlayer.self_attn.q_proj.weight", width, input_size * hidden)
    return LayerShape(
        hidden,
        intermediate,
        queries // head_dim,
        keys // head_dim,
        head_dim,
        eps=float(required(config, "rms_norm_eps")),
        rope_theta=plain_rope_theta(config),
        qk_norm=qk_norm,
    )


def plain_rope_theta(config: Mapping[str, Any]) -> float:
    """The base of plain rotary positions.

    Raises:
        LoadError: it is missing (a default would be wrong without anybody noticing), or the positions are
            scaled.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise LoadError(f"{name}: rope type '{kind}' of a drafter is not supported, only 'default'")
    theta = rope_theta(config)
    if theta is None:
        raise LoadError("rope_theta is missing, at the top level of the configuration and in rope_parameters")
    return theta


def rows(tensors: Mapping[str, Tensor], name: str) -> int:
    """The first dimension of a tensor.

    Raises:
        LoadError: there is no such tensor.
    """
    if name not in tensors:
        raise LoadError(f"{name} is missing; the checkpoint has {named(tensors)}")
    return tensors[name].shape[0]


def required(config: Mapping[str, Any], *names: str) -> Any:
    """A field of the configuration, under the first of its names that it has.

    Raises:
        LoadError: it has none of them.
    """
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise LoadError(f"{names[0]} is missing in the configuration")


def expect(name: str, found: object, expected: object) -> None:
    """Refuse a field that differs.

    Raises:
        LoadError: says what it is and what was expected.
    """
    if found != expected:
        raise LoadError(f"{name} is {found}, expected {expected}")


def pop_vocab(tensors: Tensors, vocab_size: int) -> DraftVocab | None:
    """Take the draft vocabulary out of the tensors; None if the drafter has the target's.

    Raises:
        LoadError: d2t and t2d are no draft vocabulary, or contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if t2d is not None and not bool(t2d.all()):
            raise LoadError("t2d is there, but d2t is missing")
        return None
    try:
        vocab = DraftVocab(d2t, vocab_size)
    except ValueError as error:
        raise LoadError(str(error)) from None
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d()):
        raise LoadError("t2d and d2t name different tokens; d2t must hold offsets (target id - draft id)")
    return vocab


def pop_embedding(tensors: Tensors, target: TargetParts) -> TargetParts:
    """Take an embedding out of the tensors.  It stays the drafter's own only if it differs from the target's.

    Raises:
        LoadError: its shape is not the target's.
    """
    own = tensors.pop(BORROWED_EMBEDDING, None)
    if own is None:
        return target
    shared = target.embed_tokens
    expect(f"{BORROWED_EMBEDDING} shape", tuple(own.shape), tuple(shared.shape))
    own = own.to(shared.device, shared.dtype)
    return target if torch.equal(own, shared) else replace(target, embed_tokens=own)


def fill(network: ChainNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Give a network its weights, each exactly once, in the dtype of its embedding.

    Raises:
        LoadError: names tensors that are missing, unexpected or of another shape.
    """
    own = {name: t for name, t in network.state_dict().items() if not name.startswith("vocab.")}
    missing, unexpected = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or unexpected:
        raise LoadError(f"tensors missing: {named(missing)}; tensors unexpected: {named(unexpected)}")
    for name, tensor in tensors.items():
        expect(f"{name} shape", tuple(tensor.shape), tuple(own[name].shape))
    network.to(network.embed_tokens.dtype)
    network.load_state_dict(dict(tensors), strict=False)


def named(names: Iterable[str]) -> str:
    """Some names for a message."""
    ordered = sorted(names)
    return (", ".join(ordered[:4]) + (f", ... ({len(ordered)})" if len(ordered) > 4 else "")) or "none"
