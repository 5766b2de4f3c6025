"""Engine steps through Triton: one blocking business-logic call per step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from angelspec_backend.core.loop import Recovered, ServerStopping, StepError
from angelspec_backend.core.loop_config import loaded
from angelspec_backend.core.messages import ROW, StepInput, StepOutput
from angelspec_backend.triton import bridge, codec

NO_ROWS = StepInput(np.zeros(0, ROW), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
"""A step of no rows: a model answers it by describing itself."""

Info = TypeVar("Info")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlsExecutor:
    """Runs steps in the models `speculate` (drafter and target) and `target`.

    Blocking, from one thread.  Only allowed once the calling model has been initialized.
    """

    drafts: bool  # whether there is a drafter model
    read: bridge.Read = bridge.to_arrays  # of what the target answers

    def step(self, step: StepInput) -> StepOutput:
        """One engine step.  Raises StepError when a model did not answer."""
        model = "speculate" if step.speculative else "target"
        answer = _call(model, codec.encode_step(step), codec.step_outputs(step), self.read)
        return codec.decode_output(answer, len(step.rows))

    def target_info(self) -> codec.TargetInfo:
        """What the target says of itself.  Raises StepError when it does not answer."""
        return codec.decode_target_info(_describe("target"))

    def drafter_info(self) -> codec.DrafterModelInfo:
        """What the drafter model says of itself.  Raises StepError when it does not answer."""
        return codec.decode_drafter_info(_describe("drafter"))

    def recover(self) -> Recovered:
        """Load models that died again.

        A model that is alive has lost nothing: the failed step wrote only behind committed tokens.
        Triton does not restart a dead process; loading the model again does, in explicit model control.

        Raises:
            StepError: the target is gone for good.
        """
        target_died = _unless_dead(self.target_info) is None
        if target_died:
            _reload("target")
        if not self.drafts:
            return Recovered(target=target_died, drafter=False, drafters=frozenset())
        info = _unless_dead(self.drafter_info)
        drafter_died = info is None
        if drafter_died:
            try:
                _reload("drafter")
            except StepError:
                logger.exception("going on without drafters")
            info = _unless_dead(self.drafter_info)
        drafters = loaded(info.drafters) if info else frozenset()
        return Recovered(target=target_died, drafter=drafter_died and bool(drafters), drafters=drafters)


def _unless_dead(describe: Callable[[], Info]) -> Info | None:
    """What a model says of itself; None when its process is dead."""
    try:
        return describe()
    except ServerStopping:
        raise  # loading a model now would block until the server gives up
    except StepError:
        return None


def _describe(model: str) -> codec.Arrays:
    return _call(model, codec.encode_step(NO_ROWS), (codec.INFO,))


def _call(
    model: str, arrays: codec.Arrays, outputs: tuple[str, ...], read: bridge.Read = bridge.to_arrays
) -> codec.Arrays:
    """The outputs of a model, each where the model left it: no memory is preferred.

    Raises:
        StepError: with a text for clients; Triton's own, which may name paths, goes to the log.
    """
    request: Any = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=bridge.to_tensors(arrays)
    )
    try:
        response = request.exec()
    except Exception as error:  # the server has gone
        logger.exception("calling %s failed", model)
        raise StepError(f"the model {model} cannot be called") from error
    if response.has_error():
        message = response.error().message()
        logger.error("%s answered: %s", model, message)
        if "Server not ready" in message:
            raise ServerStopping("the server is shutting down")
        raise StepError(f"the model {model} did not answer, see the server's log")
    return read(response.output_tensors())


def _reload(model: str) -> None:
    logger.warning("loading %s again", model)
    try:
        pb_utils.unload_model(model)
        pb_utils.load_model(model)
    except Exception as error:
        logger.exception("loading %s failed", model)
        raise StepError(f"the model {model} died and could not be loaded again") from error
