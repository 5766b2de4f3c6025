"""Where Triton runs a model instance, and with which configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angelspec_backend.core.config import ConfigError, EngineConfig, load_config


@dataclass(frozen=True)
class Instance:
    """One model instance, which is one process."""

    config: EngineConfig
    device: str  # as torch names it
    root: Path  # the folder that holds the model repository; relative model paths start here

    @staticmethod
    def from_args(args: Mapping[str, str]) -> Instance:
        """args: what Triton hands to ``TritonPythonModel.initialize``.

        Raises:
            ConfigError: an option is unknown or out of range, or there is more than one instance.
        """
        model_config = json.loads(args["model_config"])
        _refuse_several(model_config.get("instance_group", []))
        parameters = model_config.get("parameters", {})
        # Names in capitals are the python backend's own, such as FORCE_CPU_ONLY_INPUT_TENSORS.
        options = {key: value["string_value"] for key, value in parameters.items() if not key.isupper()}
        on_gpu = args["model_instance_kind"] == "GPU"
        return Instance(
            config=load_config(options),
            device=f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu",
            root=Path(args["model_repository"]).parent.parent,
        )

    def model_path(self, option: str) -> str:
        """The value of an option that names a model: an existing folder, or a Hugging Face id as it is.

        Raises:
            ConfigError: it looks like a folder and is none.
        """
        name = getattr(self.config, option)
        folder = self.root / name
        if folder.is_dir():
            return str(folder)
        if Path(name).is_absolute() or name.startswith((".", "~", "models/")) or name.count("/") > 1:
            raise ConfigError(
                f"{option}: no folder '{name}' (relative to the folder that holds the model repository); "
                "'make setup' prepares the default target"
            )
        return name


def _refuse_several(groups: list[dict[str, Any]]) -> None:
    """KIND_AUTO makes one instance per GPU, but each would hold only part of the sequences' state."""
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    if count > 1:
        raise ConfigError(
            f"instance_group: {count} instances, but this model must have exactly one; on a machine with "
            "several GPUs set CUDA_VISIBLE_DEVICES to one of them, or write kind: KIND_GPU gpus: [ 0 ]"
        )
