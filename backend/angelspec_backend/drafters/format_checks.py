"""What loaders of published formats have in common: sizes of tensors, refusals, the target's tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.drafters.checkpoint_files import Checkpoint
from angelspec_backend.drafters.target_parts import TargetParts

logger = logging.getLogger(__name__)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # fields, and the values that mean nothing unusual
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "rope_scaling": (),
    "use_sliding_window": (False,),
    "fusion_type": ("concat", "none"),
    "causal": (False,),
    "sample_from_anchor": (False,),
}


class Sizes:
    """Sizes of tensors by name."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        self._checkpoint, self._tensors = checkpoint, tensors

    def __call__(self, name: str, dim: int, default: int | None = None) -> int:
        tensor = self._tensors.get(name)
        if tensor is not None and dim < tensor.dim():
            return tensor.shape[dim]
        if tensor is None and default is not None:
            return default
        found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
        raise self._checkpoint.refuse(name, found, f"a tensor with {dim + 1} dimensions or more")


def check_plain(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refuse settings that this network does not have."""
    for field, plain in UNSUPPORTED.items():
        value = config.get(field)
        if value is not None and value not in plain:
            expected = " or ".join(str(each) for each in plain) or "nothing"
            raise checkpoint.refuse(f"{field} in config.json", value, f"{expected}; others are not supported")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise checkpoint.refuse("layer_types", ", ".join(sorted(kinds)), "full_attention only")
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        raise checkpoint.refuse("rope_type", f"'{rope_type}'", "default")


def need(checkpoint: Checkpoint, config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise checkpoint.refuse(f"{field} in config.json", "missing", "a value; give it as an override")
    return config[field]


def own_parts(checkpoint: Checkpoint, tensors: dict[str, Tensor], target: TargetParts) -> TargetParts:
    """Take embedding and LM head out of the checkpoint; the target's are used where they are the same."""
    for field in ("embed_tokens", "lm_head"):
        own, theirs = tensors.pop(f"{field}.weight", None), getattr(target, field)
        if own is None:
            continue
        if own.shape != theirs.shape:
            raise checkpoint.refuse(
                f"{field}.weight", f"of shape {tuple(own.shape)}", f"{tuple(theirs.shape)}, the target's"
            )
        if not torch.equal(own.to(theirs.device, theirs.dtype), theirs):
            logger.warning("%s: its %s is not the target's; its own is used", checkpoint.path, field)
            changed: dict[str, Any] = {field: own.to(theirs.device, theirs.dtype)}
            target = replace(target, **changed)
    return target
