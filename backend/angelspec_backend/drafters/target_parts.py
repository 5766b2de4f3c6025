"""What a drafter borrows from its target: embedding, LM head and final norm, without loading the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.tensor_files import TensorFiles, text_config

EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
NORMS = ("model.norm.weight", "transformer.ln_f.weight", "gpt_neox.final_layer_norm.weight")
"""Names of the borrowed tensors in checkpoints.  Multimodal ones may have more in front or in between."""

SCALES = ("embedding_multiplier", "scale_emb", "logits_scaling", "logit_scale", "final_logit_softcapping")
"""Settings of a target whose embedding or head is more than a table; no drafter here knows of them."""


@dataclass(frozen=True)
class TargetParts:
    """Frozen tensors of a causal LM that its drafters share."""

    embed_tokens: Tensor  # [vocab_size, hidden]
    lm_head: Tensor  # [vocab_size, hidden], the embedding itself when the two are tied
    norm: Tensor | None  # [hidden] weight of the final RMSNorm, None where the target has another norm
    eps: float  # of that norm
    num_layers: int  # decoder layers of the target

    def __post_init__(self) -> None:
        if self.embed_tokens.shape != self.lm_head.shape:
            raise LoadError(
                f"target: lm_head is {tuple(self.lm_head.shape)}, but the embedding "
                f"{tuple(self.embed_tokens.shape)}; they must be equal"
            )
        if self.norm is not None and self.norm.shape != self.embed_tokens.shape[1:]:
            raise LoadError(
                f"target: the final norm is {tuple(self.norm.shape)}, expected ({self.hidden_size},)"
            )

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return self.embed_tokens.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embed_tokens.shape[1]

    @staticmethod
    def from_model(model: PreTrainedModel) -> TargetParts:
        """Share the tensors of a loaded model, before its weights are repacked.

        Raises:
            LoadError: its embedding or head is more than a table.
        """
        config = model.config.get_text_config().to_dict()
        _check_plain(config, type(model).__name__)
        inner: Any = model.base_model
        norm = getattr(inner, "norm", None)
        embedding, head = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
        return TargetParts(
            embedding.weight.detach(),
            head.weight.detach(),
            None if norm is None or getattr(norm, "bias", None) is not None else norm.weight.detach(),
            _eps(config),
            int(config["num_hidden_layers"]),
        )

    @staticmethod
    def load(path: str, dtype: torch.dtype | None = None, device: str = "cpu") -> TargetParts:
        """Read these tensors, and only these, from a local folder or a Hugging Face id.

        dtype: None keeps that of the checkpoint.

        Raises:
            LoadError: a file or a tensor is missing, or the embedding or head is more than a table.
        """
        config = text_config(path)
        _check_plain(config, path)
        files = TensorFiles(path)
        embedding, head, norm = (_find(files.names, names) for names in (EMBEDDINGS, HEADS, NORMS))
        if embedding is None:
            raise LoadError(
                f"{path}: no embedding found; expected one of {', '.join(EMBEDDINGS)}, the checkpoint has "
                f"{', '.join(sorted(files.names)[:4])}, ..."
            )
        tied = bool(config.get("tie_word_embeddings", True))
        if head is None and not tied:
            raise LoadError(f"{path}: {HEADS[0]} is missing, and tie_word_embeddings is false")
        wanted = [name for name in (embedding, None if tied else head, norm) if name is not None]
        tensors = {name: tensor.to(device, dtype) for name, tensor in files.load(wanted).items()}
        plain_norm = norm is not None and norm.removesuffix("weight") + "bias" not in files.names
        return TargetParts(
            tensors[embedding],
            tensors[embedding] if tied or head is None else tensors[head],
            tensors[norm] if norm is not None and plain_norm else None,
            _eps(config),
            int(config["num_hidden_layers"]),
        )


def _find(names: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    """The name in a checkpoint of one tensor: as listed, or with the last two parts as listed."""
    names = set(names)
    ends = tuple(name.split(".", 1)[1] if name.count(".") > 1 else name for name in wanted)
    loose = [name for name in names if name.endswith(tuple(f"language_model.{end}" for end in ends))]
    return next((name for name in (*wanted, *ends, *sorted(loose)) if name in names), None)


def _check_plain(config: Mapping[str, Any], name: str) -> None:
    if str(config.get("model_type", "")).startswith("gemma"):
        raise LoadError(f"{name}: drafters cannot borrow from gemma models, which scale their embedding")
    for field in SCALES:
        if config.get(field) not in (None, 1, 1.0):
            raise LoadError(
                f"{name}: drafters cannot borrow its embedding and head: {field} is {config[field]}, "
                f"supported is only 1"
            )


def _eps(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or 1e-6)
