"""Drafter checkpoints as files: a configuration and tensors, from a folder or from the hub."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from angelspec_backend.engine.loader import LoadError

CONFIG, SAFETENSORS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEXES = (f"{SAFETENSORS}.index.json", f"{PICKLE}.index.json")
PATTERNS = (CONFIG, "*.safetensors", "pytorch_model*.bin", *INDEXES)


@dataclass(frozen=True)
class Checkpoint:
    """What the files of a drafter say."""

    path: str  # as the user gave it, for messages
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]

    def has(self, *names: str) -> bool:
        """Whether all these tensors are there."""
        return all(name in self.tensors for name in names)

    def refuse(self, field: str, found: object, expected: object) -> LoadError:
        """The error for a field that is not what it must be."""
        return LoadError(f"{self.path}: {field} is {found}, expected {expected}")


def read_checkpoint(path: str, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read a local folder, or download a Hugging Face id (what is in the local cache is not loaded again).

    overrides: fields that replace those of config.json, for configurations that lack one or are wrong.

    Raises:
        LoadError: a file is missing or broken, the hub is out of reach, or a pickle holds more than tensors.
    """
    folder = _folder(path)
    if not (folder / CONFIG).is_file():
        raise LoadError(f"{path}: {CONFIG} is missing")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path}: {CONFIG} is not JSON: {error}") from error
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder, path):
        tensors.update(_read_weights(file, path))
    return Checkpoint(path, {**config, **(overrides or {})}, tensors)


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors; the folder is made if there is none."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        folder / SAFETENSORS,
        metadata={"format": "pt"},
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_strict(network: nn.Module, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Give a network its weights: every one of them, and nothing else.

    tensors: by the network's own names.

    Raises:
        LoadError: names the missing, unexpected or wrongly shaped tensors.
    """
    own = network.state_dict()
    problems = []
    for what, names in (
        ("missing", own.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - own.keys()),
    ):
        if names:
            problems.append(f"{len(names)} {what} tensors ({_some(names)})")
    for name in sorted(own.keys() & tensors.keys()):
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}")
    if problems:
        raise LoadError(f"{checkpoint.path}: {'; '.join(problems[:4])}")
    network.load_state_dict(dict(tensors), assign=True)


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise LoadError(f"{path}: no such folder, and not a Hugging Face id like 'org/name'")
    try:
        return Path(snapshot_download(path, allow_patterns=list(PATTERNS)))
    except Exception as error:  # whatever the hub's client meets: network, rights, wrong ids
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LoadError(
            f"{path}: not a local folder, and cannot be downloaded: {reason}; is the id right, and is the "
            f"Hugging Face hub reachable?"
        ) from error


def _weight_files(folder: Path, path: str) -> list[Path]:
    for index in INDEXES:
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
    for name in (SAFETENSORS, PICKLE):
        if (folder / name).is_file():
            return [folder / name]
    raise LoadError(f"{path}: neither {SAFETENSORS} nor {PICKLE} is there")


def _read_weights(file: Path, path: str) -> dict[str, Tensor]:
    if not file.is_file():
        raise LoadError(f"{path}: {file.name} is missing, which the index names")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = (
            str(error).splitlines()[0]
            if file.suffix == ".safetensors"
            else ("it is broken, or holds more than tensors, and such pickles are not loaded")
        )
        raise LoadError(f"{path}: {file.name} cannot be read: {reason}") from error
    if not (isinstance(tensors, dict) and all(isinstance(value, Tensor) for value in tensors.values())):
        raise LoadError(f"{path}: {file.name} is not a dictionary of tensors")
    return tensors
