"""Load a causal language model and its tokenizer from Hugging Face, or say why that is impossible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

if TYPE_CHECKING:  # its import takes seconds, which a fused network does not need
    from transformers import PreTrainedModel

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


class LoadError(RuntimeError):
    """A model cannot be served; the message says what is wrong and what would help.  For the server's log."""


class UnsupportedAttention(ValueError):
    """The model asks for attention that this engine does not compute."""


def load_model(path: str, dtype: torch.dtype, device: str, max_context: int = 0) -> PreTrainedModel:
    """Load the weights of ``path``, a local folder or a Hugging Face id.

    Raises:
        LoadError: the files are missing or incomplete, or the architecture is unsupported.
    """
    from transformers import AutoModelForCausalLM

    from angelspec_backend.engine.hf_attention import ATTENTION_NAME

    config = load_config(path, max_context)
    # transformers refuses a foreign attention name for some classes; check_model says it better.
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    supported = getattr(model_class, "_supports_attention_backend", False) is True
    model, info = _load(
        path,
        AutoModelForCausalLM.from_pretrained,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        **({"attn_implementation": ATTENTION_NAME} if supported else {}),
    )
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise LoadError(
            f"{path}: the checkpoint lacks {len(info['missing_keys'])} weights of {type(model).__name__} "
            f"({names}, ...); they would be random. Download it again or use a complete checkpoint"
        )
    return model.to(device)


def load_config(path: str, max_context: int = 0) -> Any:
    """The configuration of ``path``, a local folder with weights or a Hugging Face id.

    Raises:
        LoadError: files are missing or broken, or the model would be served wrongly.
    """
    _check_folder(path, "config.json", *WEIGHTS)
    config = _load(path, AutoConfig.from_pretrained)
    check_config(config, max_context)
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(f"{path}: quantized checkpoints are not supported; use one with plain weights")
    return config


def load_generation_config(path: str) -> Any:
    """The generation config of ``path``, None if it has none."""
    from transformers.generation.configuration_utils import GenerationConfig

    folder = Path(path).expanduser()
    try:
        return GenerationConfig.from_pretrained(str(folder) if folder.is_dir() else path)
    except OSError:
        return None


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of ``path``, a local folder or a Hugging Face id.

    Raises:
        LoadError: it is missing or broken.
    """
    _check_folder(path, "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return _load(path, AutoTokenizer.from_pretrained)


def check_config(config: Any, max_context: int = 0) -> None:
    """Refuse a configuration that would be served wrongly.

    Raises:
        LoadError: a layer type other than attention, or positions that depend on the batch.
    """
    text = config.get_text_config()
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in SUPPORTED_LAYERS:
            raise LoadError(
                f"model type '{config.model_type}' is not supported: layer {layer} is '{kind}', "
                f"served are only {' and '.join(SUPPORTED_LAYERS)} (a state that cannot be cut off after a "
                f"rejected draft, or attention in another pattern)"
            )
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope" or "dynamic" in kind:
            limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            if not 0 < max_context <= limit:
                raise LoadError(
                    f"rope type '{kind}' picks its frequencies by the longest sequence of a batch, so a text "
                    f"would depend on its batch mates; they are fixed for short contexts: "
                    f"set max_context to at most {limit}"
                )


def check_model(model: PreTrainedModel, max_context: int = 0) -> None:
    """Refuse a model that would not call the engine's attention function or would be served wrongly.

    Raises:
        LoadError: says which architecture and why.
    """
    check_config(model.config, max_context)
    # Both this flag and the layer types are needed: bloom fails only here, qwen3_next only there.
    if getattr(model, "_supports_attention_backend", False) is not True:
        raise LoadError(
            f"{type(model).__name__} (model type '{model.config.model_type}') is not supported: "
            f"it computes attention by itself (transformers: _supports_attention_backend is not set)"
        )


def model_max_context(config: Any) -> int:
    """The most tokens the model's positions allow."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20)


def eos_token_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """Every token id that ends a text.  generation_config: None if there is none."""
    found: list[int] = []
    for each in (generation_config, config, config.get_text_config()):
        ids = getattr(each, "eos_token_id", None)
        found += ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(int(token) for token in found))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rope settings: one dictionary, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def _check_folder(path: str, *wanted: str) -> None:
    """For a local folder: is it there, and does it hold the wanted files?"""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.is_file():
            raise LoadError(f"{path} is a file; give the folder that holds the model's config.json")
        if path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.parent.is_dir():
            raise LoadError(f"{path}: no such folder, and not a Hugging Face id like 'org/name'")
        return
    required = [wanted[:1], wanted[1:]] if wanted[0] == "config.json" else [wanted]
    for names in required:
        if not any(any(folder.glob(name)) for name in names):
            present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise LoadError(
                f"{path}: {' or '.join(names)} is missing; the folder holds {present}. "
                f"Save model and tokenizer there with save_pretrained, or give the folder that has them"
            )


def _load(path: str, load: Any, **options: Any) -> Any:
    folder = Path(path).expanduser()
    try:
        return load(str(folder) if folder.is_dir() else path, **options)
    except Exception as error:  # whatever transformers meets: files, network, unknown architectures
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        hint = "" if folder.is_dir() else "; is the id right, and is the Hugging Face hub reachable?"
        raise LoadError(f"{path}: cannot be loaded: {reason}{hint}") from error
