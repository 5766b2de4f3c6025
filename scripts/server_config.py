"""The engine options of a run: the user's YAML file with the launcher's TARGET and DRAFTER on top."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from angelspec_backend.core.config import (
    CONFIG_ENV,
    NETWORK_DRAFTERS,
    ConfigError,
    EngineConfig,
    load_config,
)
from checks import CheckError
from prepare_target import DEFAULT_TARGET, prepare_default_target

BUNDLED = Path(__file__).resolve().parent.parent / "model_repository" / "drafter" / "weights"
"""Drafters trained for the default target, a folder for each kind."""


def build_config(path: str, target: str, drafter: str) -> tuple[dict[str, Any], EngineConfig]:
    """The options to write for the models, and the same ones checked and complete.

    path: a YAML file, or "" for none.  The default target is unpacked when no other is named.

    Raises:
        CheckError: the file cannot be read, an option is unknown or out of range, a folder is missing.
        PrepareError: the default target cannot be unpacked.
    """
    return complete_config(merge_config(read_config(path), target, drafter))


def complete_config(options: dict[str, Any]) -> tuple[dict[str, Any], EngineConfig]:
    """The same for merged options."""
    if not options.get("target"):
        options["target"] = str(prepare_default_target())
    os.environ.pop(CONFIG_ENV, None)  # only the merged options count
    try:
        return options, load_config(options)
    except ConfigError as error:
        raise CheckError(str(error).replace("config.pbtxt parameters", "CONFIG")) from None


def read_config(path: str) -> dict[str, Any]:
    """The user's YAML file as it is; its keys and values are checked after merging."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckError(f"CONFIG: cannot read {path}: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise CheckError(f"CONFIG: {path} must hold 'key: value' lines")
    return content or {}


def merge_config(user: Mapping[str, Any], target: str, drafter: str) -> dict[str, Any]:
    """The user's options with TARGET and DRAFTER, where not empty, on top.

    drafter: a drafter's name, 'none', or the id or folder of a draft model or of a drafter's checkpoint.
    The default target brings the drafters that were trained for it.
    """
    options = dict(user)
    if target:
        options["target"] = target
    bundled = bundled_drafters(str(options.get("target", "")))
    if bundled and "drafters" not in options:
        options["drafters"] = ",".join(["ngram", *bundled])
    if drafter:
        is_model = "/" in drafter or Path(drafter).is_dir()
        name = _kind(drafter) if is_model else drafter
        if is_model:
            options[name] = drafter
        loaded = str(options.get("drafters", EngineConfig.model_fields["drafters"].default))
        names = [part.strip() for part in loaded.split(",") if part.strip()]
        if name not in ("none", *names):
            options["drafters"] = ",".join([*names, name])
        options["drafter"] = name
    for name in str(options.get("drafters", "")).replace(" ", "").split(","):
        if name in bundled and not options.get(name):
            options[name] = bundled[name]
    for key in ("target", "draft_model", *NETWORK_DRAFTERS):
        if options.get(key):
            options[key] = _absolute_or_id(key, str(options[key]))
    return options


def bundled_drafters(target: str) -> dict[str, str]:
    """Folders of the drafters in this repository that fit a target, by kind.  target: "" for the default."""
    if target and Path(target).name != DEFAULT_TARGET:
        return {}
    return {
        folder.name: str(folder) for folder in sorted(BUNDLED.glob("*")) if folder.name in NETWORK_DRAFTERS
    }


def _kind(model: str) -> str:
    """The option that names a model: a drafter's kind if it is a checkpoint of one, else 'draft_model'."""
    try:
        content = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        kind = content.get("drafter", {}).get("kind")
    except (OSError, ValueError, AttributeError):
        kind = None
    return kind if kind in NETWORK_DRAFTERS else "draft_model"


def _absolute_or_id(key: str, value: str) -> str:
    # The models run in another folder, so that a local path has to be absolute.
    path = Path(value).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckError(f"{key}: {value} is no model folder: it has no config.json")
        return str(path.resolve())
    if path.is_absolute() or value.startswith((".", "~")):
        raise CheckError(f"{key}: there is no folder {value}")
    return value
