"""What the loaders and exporters of MTP and EAGLE-3 checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.block_formats import IDENTITY
from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.checkpoint_files import Checkpoint, load_strict
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.format_checks import Sizes, need
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.spec import DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.tensor_files import rope_theta

Tensors = dict[str, Tensor]


def layer_shape(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], config: Mapping[str, Any], input_size: int
) -> LayerShape:
    """The shape of ``midlayer``, from its tensors; the configuration only splits heads, and must agree.

    input_size: width of what q_proj reads, in hidden sizes.

    Raises:
        LoadError: names the field, what it is and what was expected.
    """
    size, attention = Sizes(checkpoint, tensors), "midlayer.self_attn"
    hidden = size("midlayer.input_layernorm.weight", 0)
    qk_norm = f"{attention}.q_norm.weight" in tensors
    if qk_norm:
        head_dim = size(f"{attention}.q_norm.weight", 0)
    else:
        head_dim = int(config.get("head_dim") or hidden // need(checkpoint, config, "num_attention_heads"))
    mlp = "midlayer.mlp.gate_proj.weight"
    intermediate = size(mlp, 0) if mlp in tensors else int(need(checkpoint, config, "intermediate_size"))
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": size(f"{attention}.q_proj.weight", 0) / head_dim,
        "num_key_value_heads": size(f"{attention}.k_proj.weight", 0) / head_dim,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }
    for field, expected in sizes.items():
        agree(checkpoint, f"{field} in config.json", config.get(field), expected, "as the tensors have it")
    width = size(f"{attention}.q_proj.weight", 1)
    agree(checkpoint, f"the width of {attention}.q_proj.weight", width, input_size * hidden)
    theta = rope_theta(config)
    if theta is None:  # a default would be wrong without anybody noticing
        raise checkpoint.refuse("rope_theta", "missing", "a number, at the top level or in rope_parameters")
    return LayerShape(
        hidden,
        intermediate,
        int(sizes["num_attention_heads"]),
        int(sizes["num_key_value_heads"]),
        head_dim,
        eps=float(need(checkpoint, config, "rms_norm_eps")),
        rope_theta=theta,
        qk_norm=qk_norm,
    )


def agree(checkpoint: Checkpoint, field: str, found: object, expected: object, why: str = "") -> None:
    """Refuse a field that is there and differs.

    Raises:
        LoadError: says what it is and what was expected.
    """
    if found is not None and found != expected:
        raise checkpoint.refuse(field, found, f"{expected}, {why}" if why else expected)


def pop_vocab(checkpoint: Checkpoint, tensors: Tensors, vocab_size: int) -> DraftVocab | None:
    """Take the draft vocabulary out of the tensors; None if the drafter has the target's.

    Raises:
        LoadError: d2t and t2d are no draft vocabulary, or contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if t2d is not None and not bool(t2d.all()):
            raise checkpoint.refuse("d2t", "missing", "there, since t2d is")
        return None
    try:
        vocab = DraftVocab(d2t, vocab_size)
    except ValueError as error:
        raise LoadError(f"{checkpoint.path}: {error}") from None
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d()):
        raise LoadError(
            f"{checkpoint.path}: t2d and d2t name different tokens; d2t must hold offsets "
            f"(target id - draft id)"
        )
    agree(
        checkpoint, "draft_vocab_size in config.json", checkpoint.config.get("draft_vocab_size"), len(vocab)
    )
    return vocab


def common_fields(config: Mapping[str, Any], target: TargetParts, vocab: DraftVocab | None) -> dict[str, Any]:
    """Fields of the specification that all chain drafters get alike."""
    return {
        "num_layers": 1,
        "vocab_size": target.vocab_size,
        "target_hidden": target.hidden_size,
        "target_num_layers": target.num_layers,
        "draft_vocab_size": 0 if vocab is None else len(vocab),
        "max_context": int(config.get("max_position_embeddings") or 0),
        "num_steps": int(config.get("num_steps") or 0),
        "target": TargetIdentity(**(config.get(IDENTITY) or {})),
    }


def build(
    checkpoint: Checkpoint,
    create: Callable[[DrafterSpec, TargetParts, DraftVocab | None], ChainNetwork],
    tensors: Tensors,
    target: TargetParts,
    vocab: DraftVocab | None,
    fields: dict[str, Any],
) -> ChainNetwork:
    """The network of a specification with these fields, and tensors.

    Raises:
        LoadError: they contradict each other, or the target.
    """
    try:
        spec = DrafterSpec(**fields)
        with torch.device("meta"):
            network = create(spec, target, vocab)
    except (ValueError, TypeError) as error:
        raise LoadError(f"{checkpoint.path}: {error}") from error
    if vocab is not None:
        tensors["vocab.d2t"] = vocab.d2t
    load_strict(network, checkpoint, tensors)
    return network


def common_config(network: ChainNetwork) -> dict[str, Any]:
    """Fields of config.json that all chain drafters have; ``tap_ids`` and ``num_steps`` are our own."""
    spec, shape = network.spec, network.spec.shape
    return {
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
        "num_steps": spec.num_steps,
        "tap_ids": list(spec.tap_ids),
        IDENTITY: asdict(spec.target),
    }
