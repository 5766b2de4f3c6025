"""Single tensors out of the safetensors files of a model, local or on the hub, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from angelspec_backend.engine.loader import LoadError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class TensorFiles:
    """The safetensors files of a checkpoint, read tensor by tensor."""

    def __init__(self, path: str) -> None:
        """path: a local folder or a Hugging Face id.

        Raises:
            LoadError: there are no safetensors files.
        """
        self.path = path
        index = _file(path, INDEX)
        if index is not None:
            self._file_of: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        elif (single := _file(path, SINGLE)) is not None:
            try:
                with safe_open(single, "pt") as file:
                    self._file_of = dict.fromkeys(file.keys(), SINGLE)
            except SafetensorError as error:
                raise LoadError(f"{path}: {SINGLE} is broken: {error}") from error
        else:
            raise LoadError(f"{path}: neither {SINGLE} nor {INDEX} found; save the model as safetensors")
        self.names = frozenset(self._file_of)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some of the tensors, by name.

        Raises:
            LoadError: a file that should hold them is missing.
        """
        return {name: self.get(name) for name in names}

    def get(self, name: str) -> Tensor:
        """One of the tensors: a view of its file, in memory only as far as it is read.

        Raises:
            LoadError: the file that should hold it is missing or broken.
        """
        file_name = self._file_of[name]
        path = _file(self.path, file_name)
        if path is None:
            raise LoadError(f"{self.path}: {file_name} is missing; it holds {name}")
        try:
            with safe_open(path, "pt") as file:  # each has a mapping of its own
                return file.get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{self.path}: {file_name} is broken: {error}") from error


def load_decoder_layer(path: str, layer: int) -> dict[str, Tensor]:
    """The weights of one decoder layer of a causal LM, by their names within the layer.

    layer: counted from 0; negative ones from the end.  path: a local folder or a Hugging Face id.

    Raises:
        LoadError: there is no such layer.
    """
    depth = int(text_config(path)["num_hidden_layers"])
    if not -depth <= layer < depth:
        raise LoadError(f"{path}: layer {layer} does not exist, allowed: {-depth} to {depth - 1}")
    files, prefix = TensorFiles(path), f"layers.{layer % depth}."
    names = [name for name in files.names if f".{prefix}" in f".{name}"]
    if not names:
        raise LoadError(f"{path}: the checkpoint has no tensors of '{prefix}'")
    return {name.partition(prefix)[2]: tensor for name, tensor in files.load(names).items()}


def text_config(path: str) -> dict[str, Any]:
    """The part of ``config.json`` that describes the language model.

    path: a local folder or a Hugging Face id.

    Raises:
        LoadError: there is none.
    """
    file = _file(path, "config.json")
    if file is None:
        raise LoadError(f"{path}: config.json is missing; give the folder or hub id of a causal LM")
    config = json.loads(file.read_text())
    return {**config, **config.get("text_config", {})}


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """The base of the rotary positions, wherever a configuration states it; None if it does not.

    Configurations of transformers 5 have it in ``rope_parameters`` only, older ones at the top level.
    """
    nested = config.get("rope_parameters") or {}
    value = nested.get("rope_theta", config.get("rope_theta"))
    return None if value is None else float(value)


def _file(path: str, name: str) -> Path | None:
    """A file of a local folder, or of a model on the hub (downloaded on first use); None if it has none."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path.startswith(("/", ".", "~")):
        return folder / name if (folder / name).is_file() else None
    try:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: {name} cannot be read: {str(error).splitlines()[0]}") from error
    return None if found is None else Path(found)
