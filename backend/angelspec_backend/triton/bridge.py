"""Between Triton and everything else: tensors and arrays, errors, and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from angelspec_backend.core.hidden_states import IN_NUMPY, StateArrays
from angelspec_backend.triton.codec import Arrays

Read = Callable[[Iterable[Any]], dict[str, Any]]
"""Makes arrays by name of Triton's tensors."""

INVALID_ARG = "INVALID_ARG"
UNAVAILABLE = "UNAVAILABLE"
INTERNAL = "INTERNAL"

logger = logging.getLogger(__name__)


class TritonLogHandler(logging.Handler):
    """Sends the records of `logging` to Triton's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, its stack included."""
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


def install_log_handler() -> None:
    """Make `logging` write to Triton's log; each model instance has a process of its own."""
    root = logging.getLogger("angelspec_backend")
    root.handlers = [TritonLogHandler()]
    root.setLevel(logging.INFO)
    root.propagate = False


def to_arrays(tensors: Iterable[Any]) -> dict[str, Any]:
    """Arrays by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}


def to_tensors(arrays: Arrays) -> list[Any]:
    """Triton tensors, in the order of the arrays."""
    return [
        pb_utils.Tensor(name, np.ascontiguousarray(array))
        if isinstance(array, np.ndarray)
        else _shared(name, array)
        for name, array in arrays.items()
    ]


def _shared(name: str, tensor: Any) -> Any:
    """A Triton tensor in the memory of one of torch."""
    from angelspec_backend.triton.device_states import complete

    return pb_utils.Tensor.from_dlpack(name, complete(tensor))


@dataclass(frozen=True)
class StatesOn:
    """How a process reads messages with hidden states, and what it has these in."""

    read: Read
    arrays: StateArrays


def states_on(place: str) -> StatesOn:
    """place: the option ``hidden_states_on``.  Torch is imported where they are to stay on a device alone."""
    if place == "cpu":
        return StatesOn(to_arrays, IN_NUMPY)
    from angelspec_backend.triton import device_states

    return StatesOn(device_states.read, device_states.IN_TORCH)


def error_response(message: str, code: str = INTERNAL) -> Any:
    """A response that is an error.  code: a name in pb_utils.TritonError.

    The text repeats the code: over gRPC streams clients get the text alone, over HTTP always status 400.
    """
    # By name: Triton fills in pb_utils only after it has imported the models' modules.
    error = pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)


def send(sender: Any, response: Any, final: bool) -> None:
    """Send a response of a decoupled request; ``final`` says that it is the last one."""
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
    except Exception:  # the receiver is gone
        logger.exception("a response could not be sent")


def answer(model: str, request: Any, compute: Callable[[Arrays], Arrays], read: Read = to_arrays) -> Any:
    """The one response to a request of an inner model.

    An exception becomes a short error; its stack, which may hold paths, goes to the log only.
    """
    try:
        return pb_utils.InferenceResponse(output_tensors=to_tensors(compute(read(request.inputs()))))
    except ValueError as error:  # a step that contradicts itself; the text says where
        logger.exception("%s: bad step", model)
        return error_response(f"{model}: {error}", INVALID_ARG)
    except Exception as error:
        logger.exception("%s: step failed", model)
        return error_response(f"{model}: step failed ({type(error).__name__}), see the server's log")
