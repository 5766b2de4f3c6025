"""Options in a YAML file, changed by ``key=value`` on the command line, checked by a pydantic model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class OptionsError(ValueError):
    """The options are wrong; the message says which key, the value, and what is allowed."""


class Section(BaseModel):
    """Options that belong together: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Model = TypeVar("Model", bound=BaseModel)


def read_options(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a YAML file with ``section.key=value`` overrides, whose values are YAML too.

    Raises:
        OptionsError: the file cannot be read, or holds no keys and values.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise OptionsError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise OptionsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise OptionsError(f"{path} must hold keys and values, found {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    return values


def check_options(model: type[Model], values: Mapping[str, Any]) -> Model:
    """The checked options.  Raises OptionsError for the first that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = difflib.get_close_matches(key, list(_keys(model)), 1, 0.0)[0]
            raise OptionsError(f"unknown key {key}; did you mean {known}?") from None
        raise OptionsError(f"{key} is {first['input']!r}: {message}" if key else message) from None


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise OptionsError(f"{text}: an override is written key=value")
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise OptionsError(f"{key}: {section} is a value, not a section")
    try:
        values[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionsError(f"{text} is not YAML: {' '.join(str(error).split())}") from None


def _keys(model: Any) -> Iterator[str]:
    """All keys, with their sections in front."""
    for name, field in (getattr(model, "model_fields", None) or model.__dataclass_fields__).items():
        kind: Any = getattr(field, "annotation", None)
        is_section = hasattr(kind, "model_fields") or hasattr(kind, "__dataclass_fields__")
        yield from (f"{name}.{key}" for key in _keys(kind)) if is_section else [name]
