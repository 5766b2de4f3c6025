"""Block drafters as other projects store them: AngelSpec, z-lab (DFlash), DeepSpec (DSpark)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from angelspec_backend.drafters.block_formats import (
    DFLASH_ARCHITECTURE,
    DSPARK_ARCHITECTURE,
    FC_NAMES,
    IDENTITY,
)
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.spec import DrafterSpec

ANGELSPEC_ARCHITECTURES = {  # kind: architecture, model type
    "dflash": (DFLASH_ARCHITECTURE, "dflash"),
    "dflare": (DFLASH_ARCHITECTURE, "dflash"),
    "dfly": ("Qwen3DFlyModel", "qwen3"),
    "dspark": ("DSparkDraftModel", "dspark"),
}
EXPRESSIBLE = {  # naming: kinds, label shift
    "angelspec": (tuple(ANGELSPEC_ARCHITECTURES), 0),
    "zlab": (("dflash",), 0),
    "deepspec": (("dspark",), 1),
}


def export_block(network: BlockNetwork, naming: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors in another project's naming, a key of EXPRESSIBLE.

    Raises:
        ValueError: that format cannot express this drafter, and why.
    """
    spec = network.spec
    _check_expressible(spec, naming)
    tensors = network.own_tensors()
    if naming != "zlab":
        tensors["embed_tokens.weight"] = network.embed_tokens
    if naming == "angelspec":
        return _angelspec_config(network), tensors
    if naming == "deepspec":
        tensors["lm_head.weight"] = network.lm_head.weight
    theirs = {ours: name for name, ours in FC_NAMES.items()}
    return _qwen3_config(network, naming), {theirs.get(name, name): t for name, t in tensors.items()}


def _check_expressible(spec: DrafterSpec, naming: str) -> None:
    kinds, label_shift = EXPRESSIBLE[naming]
    for field, found, expected in (
        ("kind", spec.kind, kinds),
        ("label_shift", spec.label_shift, (label_shift,)),
        ("draft_vocab_size", spec.draft_vocab_size, (0,)),
        ("qk_norm", spec.shape.qk_norm, (True,)),
    ):
        if found not in expected:
            allowed = " or ".join(str(each) for each in expected)
            raise ValueError(
                f"naming '{naming}' cannot express {field} {found}, only {allowed}; use 'native'"
            )


def _common(network: BlockNetwork) -> dict[str, Any]:
    spec, shape = network.spec, network.spec.shape
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        **({"max_position_embeddings": spec.max_context} if spec.max_context else {}),
        "block_size": spec.block_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(network.final_norm.weight.dtype).removeprefix("torch."),
        IDENTITY: asdict(spec.target),
    }


def _dspark(spec: DrafterSpec) -> dict[str, Any]:
    return {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov_kind,
        "enable_confidence_head": spec.confidence_head,
        "confidence_head_with_markov": spec.confidence_with_markov,
    }


def _angelspec_config(network: BlockNetwork) -> dict[str, Any]:
    spec = network.spec
    architecture, model_type = ANGELSPEC_ARCHITECTURES[spec.kind]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **_common(network),
        "num_target_layers": len(spec.tap_ids),  # here the number of taps
        "target_hidden_size": spec.target_hidden,
        "target_num_hidden_layers": spec.target_num_layers,
        "target_layer_ids": list(spec.tap_ids),
        "mask_token_id": spec.mask_token_id,
        **({"model_arch": "dflare"} if spec.kind == "dflare" else {}),
        **(
            {
                "enable_hidden_correction": spec.correction_size > 0,
                "hidden_correction_intermediate_size": spec.correction_size or None,
            }
            if spec.kind == "dfly"
            else {}
        ),
        **(_dspark(spec) if spec.kind == "dspark" else {}),
    }


def _qwen3_config(network: BlockNetwork, naming: str) -> dict[str, Any]:
    spec = network.spec
    taps = {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.tap_ids)}
    return {
        "architectures": [DFLASH_ARCHITECTURE if naming == "zlab" else DSPARK_ARCHITECTURE],
        "model_type": "qwen3",
        **_common(network),
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * spec.num_layers,
        "num_target_layers": spec.target_num_layers,  # here the depth of the target
        **({"dflash_config": taps} if naming == "zlab" else {**taps, **_dspark(spec)}),
    }
