"""A causal LM as a configuration and named weights: out of a loaded model, or straight from its files.

Straight from its files a fused network loads without its Hugging Face module: importing and building that
would take seconds, and memory for a second copy of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from angelspec_backend.engine.loader import LoadError, eos_token_ids, load_config, load_generation_config
from angelspec_backend.engine.tensor_files import TensorFiles

Take = Callable[[str], Tensor | None]
"""Gives up the weight of a name, as in the Hugging Face module; None if there is none."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that is not built yet, or that has been taken apart."""

    config: Any
    architecture: str
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    names: frozenset[str]  # of its weights
    take: Take


def of_model(model: Any) -> Checkpoint:
    """The weights of a loaded model, which loses each one that is taken."""

    def take(name: str) -> Tensor | None:
        path, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            return None
        weight = getattr(module, leaf, None)
        if weight is None:
            return None
        module.register_parameter(leaf, None)
        return weight.detach()

    ids = eos_token_ids(model.generation_config, model.config)
    names = frozenset(model.state_dict())
    return Checkpoint(model.config, type(model).__name__, model.dtype, model.device, ids, names, take)


def of_files(path: str, dtype: torch.dtype, max_context: int = 0) -> Checkpoint | None:
    """The weights of a folder or Hugging Face id, for the CPU; None if they are no safetensors.

    A weight that needs no conversion is a view of its file.

    Raises:
        LoadError: the configuration is missing, broken or would be served wrongly.
    """
    config = load_config(path, max_context)
    try:
        files = TensorFiles(path)
    except LoadError:
        return None

    def take(name: str) -> Tensor | None:
        return files.get(name).to(dtype) if name in files.names else None

    ids = eos_token_ids(load_generation_config(path), config)
    architecture = (config.architectures or [type(config).__name__])[0]
    return Checkpoint(config, architecture, dtype, torch.device("cpu"), ids, files.names, take)


def release_memory() -> None:
    """Hand back to the system what loading has freed and malloc keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim:
        trim(0)
