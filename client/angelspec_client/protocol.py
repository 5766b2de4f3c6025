"""The request surface of the public model: one place where options become tensors or JSON.

Only what the wire cannot carry is refused here.  Ranges are the server's business, so that every
client gets the same answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_client.errors import InvalidRequest, ServerError
from angelspec_client.options import Options
from angelspec_client.results import Chunk, Usage

Messages = Sequence[Mapping[str, Any]]
Outputs = Mapping[str, list[Any]]
"""The tensors of a response by name, flattened; strings as str."""

_INPUTS: Mapping[str, str] = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "input_ids": "INT32",
    "stream": "BOOL",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "ignore_eos": "BOOL",
    "exclude_input_in_output": "BOOL",
    "drafter": "BYTES",
    "num_draft_tokens": "INT32",
}
_LISTS = ("input_ids", "stop_words")
_NUMPY: Mapping[str, Any] = {
    "BYTES": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
# Triton gives these a meaning of their own.
_RESERVED = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "headers",
    "binary_data_output",
)


@dataclass(frozen=True)
class Request:
    """A request ready to be encoded."""

    fields: Mapping[str, Any]  # by the names of the model's inputs; a list for list inputs, else a scalar
    stream: bool
    request_id: str
    parameters: Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Tensor:
    """One input tensor."""

    name: str
    datatype: str  # Triton's name of the type
    array: NDArray[Any]  # [1, n], n = 1 unless the input is a list


def build_request(
    prompt: str | None,
    messages: Messages | None,
    input_ids: Sequence[int] | None,
    stream: bool,
    options: Options,
) -> Request:
    """Check and collect what a request sends.

    Raises:
        InvalidRequest: not exactly one kind of prompt, a value of the wrong type or too large for its
            tensor, or a parameter name that Triton reserves.
    """
    given: dict[str, Any] = {
        "text_input": prompt,
        "messages": None if messages is None else _json_text("messages", [dict(m) for m in messages]),
        "input_ids": None if input_ids is None else list(input_ids),
    }
    if (count := sum(value is not None for value in given.values())) != 1:
        raise InvalidRequest(f"exactly one of prompt, messages and input_ids must be given, got {count}")
    stop = [options.stop] if isinstance(options.stop, str) else list(options.stop)
    given |= {name: getattr(options, name) for name in _INPUTS if hasattr(options, name)}
    given |= {"stream": stream, "stop_words": stop or None}
    fields = {name: _checked(name, value) for name, value in given.items() if value is not None}
    for name, value in options.parameters.items():
        _check_parameter(name, value)
    return Request(fields, stream, options.request_id, dict(options.parameters))


def to_tensors(request: Request) -> list[Tensor]:
    """The input tensors of a request, for gRPC."""
    tensors = []
    for name, value in request.fields.items():
        values = value if name in _LISTS else [value]
        if _INPUTS[name] == "BYTES":
            values = [text.encode() for text in values]
        tensors.append(Tensor(name, _INPUTS[name], np.array([values], dtype=_NUMPY[_INPUTS[name]])))
    return tensors


def to_json(request: Request) -> bytes:
    """The body of a request, for HTTP.

    Raises:
        InvalidRequest: NaN or infinity, which JSON does not know.
    """
    for name, value in request.fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, got {value}")
    body = dict(request.fields)
    if request.request_id:
        body["id"] = request.request_id
    if request.parameters:
        body["parameters"] = dict(request.parameters)
    return _json_text("the request", body).encode()


def read_chunk(outputs: Outputs, time_s: float) -> Chunk:
    """The chunk a response brought; outputs that are not in the response are absent.

    Raises:
        ServerError: an output that must be there is not.
    """
    usage = None
    if "finish_reason" in outputs:
        usage = Usage(
            finish_reason=str(_one(outputs, "finish_reason")),
            num_input_tokens=int(_one(outputs, "num_input_tokens")),
            num_output_tokens=int(_one(outputs, "num_output_tokens")),
            seed=int(_one(outputs, "seed")),
            total_draft_tokens=int(_one(outputs, "total_draft_tokens")),
            total_accepted_draft_tokens=int(_one(outputs, "total_accepted_draft_tokens")),
        )
    ids = outputs.get("output_ids", ())
    return Chunk(str(_one(outputs, "text_output")), tuple(map(int, ids)), time_s, usage)


def _one(outputs: Outputs, name: str) -> Any:
    values = outputs.get(name)
    if not values:
        raise ServerError(f"the server's answer lacks the output '{name}'; is this an angelspec model?")
    return values[0]


def read_json(event: Mapping[str, Any]) -> Outputs:
    """Outputs out of the JSON of one response, where a tensor of one element is a scalar."""
    return {name: value if isinstance(value, list) else [value] for name, value in event.items()}


def _checked(name: str, value: Any) -> Any:
    if name not in _LISTS:
        return _checked_item(name, value)
    return [_checked_item(name, item) for item in value]


def _checked_item(name: str, value: Any) -> Any:
    datatype = _INPUTS[name]
    if datatype == "BYTES" and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} holds half a surrogate pair, which is not text") from None
        return value
    if datatype == "BOOL" and isinstance(value, bool | np.bool_):
        return bool(value)
    if datatype == "FP32" and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if datatype in ("INT32", "UINT64") and isinstance(value, Integral) and not isinstance(value, bool):
        limits = np.iinfo(_NUMPY[datatype])
        if not limits.min <= int(value) <= limits.max:
            raise InvalidRequest(f"{name} must be in {limits.min}..{limits.max}, got {value}")
        return int(value)
    wanted = {"BYTES": "a string", "BOOL": "true or false", "FP32": "a number"}.get(datatype, "an integer")
    raise InvalidRequest(f"{name} must be {wanted}, got {value!r}")


def _check_parameter(name: str, value: Any) -> None:
    if name in _RESERVED or name.startswith("triton_"):
        raise InvalidRequest(f"the parameter name '{name}' is reserved by Triton")
    if name in _INPUTS:
        raise InvalidRequest(f"'{name}' is an input of the model, not a parameter")
    if not isinstance(value, str | int | float):
        raise InvalidRequest(f"the parameter '{name}' must be a string, a number or a boolean, got {value!r}")


def _json_text(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
    return text
