"""The named values of a request: which exist, and how each is read and checked.

Every reader answers None for a value that is absent and raises InvalidRequest with what was wrong,
the value, and what is allowed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

INPUT_TYPES: Mapping[str, str] = {
    "text_input": "STRING",
    "input_ids": "INT32",
    "messages": "STRING",
    "max_tokens": "INT32",
    "stream": "BOOL",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "stop_words": "STRING",
    "ignore_eos": "BOOL",
    "exclude_input_in_output": "BOOL",
    "drafter": "STRING",
    "num_draft_tokens": "INT32",
    "frequency_penalty": "FP32",
    "presence_penalty": "FP32",
    "sampling_parameters": "STRING",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""Name and Triton type of every input of the public model."""

LIST_FIELDS = ("input_ids", "stop_words")
"""Fields of any number of values, also none; all others hold exactly one."""

JSON_NAMES = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
"""Keys of the JSON object in sampling_parameters; 'stop' is the field stop_words, a string or a list."""

_NUMPY_KINDS = {"STRING": "OSU", "INT32": "iu", "UINT64": "iu", "FP32": "fiu", "BOOL": "b"}
_SHOWN_CHARACTERS = 40


class InvalidRequest(ValueError):
    """A request cannot be served; the message is meant for the client."""


def read_fields(fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Python values of a request's arrays: a list for LIST_FIELDS, a scalar for the others.

    fields: arrays of any shape (a batch dimension of 1 is dropped), strings as bytes or str.
    The members of sampling_parameters are merged in; a field given as an array wins.
    """
    values: dict[str, Any] = {}
    for name, array in fields.items():
        if name not in INPUT_TYPES:
            raise InvalidRequest(f"unknown input '{name}'{_hint(name, INPUT_TYPES)}")
        if array.dtype.kind not in _NUMPY_KINDS[INPUT_TYPES[name]]:
            raise InvalidRequest(f"{name} must be of type {INPUT_TYPES[name]}, got {array.dtype}")
        items = [_decoded(name, item) for item in array.reshape(-1).tolist()]
        if name in LIST_FIELDS:
            values[name] = items
        elif len(items) == 1:
            values[name] = items[0]
        else:
            raise InvalidRequest(f"{name} must hold one value, got {len(items)}")
    return _sampling_parameters(values.pop("sampling_parameters", None)) | values


def integer(values: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer in low..high."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {show(value)}")
    if not low <= value <= high:
        # The HTTP endpoint keeps the low 32 bits of a larger number, which may come out negative.
        may_be_wrapped = value < 0 and INPUT_TYPES[name] == "INT32"
        wrapped = "; larger numbers than 2147483647 wrap around in INT32" if may_be_wrapped else ""
        raise InvalidRequest(f"{name} must be in {low}..{high}, got {value}{wrapped}")
    return value


def number(
    values: Mapping[str, Any], name: str, low: float, high: float, open_low: bool = False
) -> float | None:
    """A finite number in low..high; open_low excludes low itself."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {show(value)}")
    inside = low < value <= high if open_low else low <= value <= high
    if not inside:  # also NaN, which compares with nothing
        allowed = f"above {low:g} and at most {high:g}" if open_low else f"in {low:g}..{high:g}"
        raise InvalidRequest(f"{name} must be {allowed}, got {show(value)}")
    return float(value)


def flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean, or its default."""
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {show(value)}")
    return value


def show(value: Any) -> str:
    """A value for an error message: quoted and never long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def require_unicode(name: str, text: str) -> str:
    """The text, if it can be encoded: JSON escapes can hold half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half of a surrogate pair, which is not a character") from None
    return text


def parse_json(name: str, text: str) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error.msg} at character {error.pos}") from None
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        raise InvalidRequest(f"{name} is not valid JSON: nested too deeply or a number too long") from None


def _decoded(name: str, item: Any) -> Any:
    if not isinstance(item, bytes):
        return require_unicode(name, item) if isinstance(item, str) else item
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8 at byte {error.start}") from None


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    """Field values in the JSON object of sampling_parameters, in which numbers may be strings."""
    if text is None:
        return {}
    parameters = parse_json("sampling_parameters", text)
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"sampling_parameters must be a JSON object, got {show(parameters)}")
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in JSON_NAMES:
            raise InvalidRequest(f"sampling_parameters: unsupported '{name}'{_hint(name, JSON_NAMES)}")
        if name == "stop":
            values["stop_words"] = [value] if isinstance(value, str) else value
        elif value is not None:
            values[name] = _number_in_text(value)
    return values


def _number_in_text(value: Any) -> Any:
    """ "64" as 64: genai-perf sends numbers as strings.  Anything else is left for the range checks."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _hint(name: str, allowed: Mapping[str, str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; allowed: {', '.join(allowed)}"
