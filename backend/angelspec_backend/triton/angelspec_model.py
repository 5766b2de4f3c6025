"""The Triton model `angelspec`, which clients call, and the two threads that serve its requests.

execute    validates a request and hands it to the loop, then returns: responses follow later (decoupled)
loop       schedules, and runs one engine step after another by business-logic calls
output     turns tokens into text and sends it, beside the next step
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from angelspec_backend.core.config import ConfigError, EngineConfig
from angelspec_backend.core.fields import InvalidRequest
from angelspec_backend.core.hidden_states import StateArrays
from angelspec_backend.core.loop import ServerStopping, SpeculativeLoop, StepError
from angelspec_backend.core.loop_config import DrafterInfo, LoopConfig
from angelspec_backend.core.params import RequestLimits, Unavailable, parse_request
from angelspec_backend.triton import bridge
from angelspec_backend.triton.bls import BlsExecutor
from angelspec_backend.triton.codec import TargetInfo
from angelspec_backend.triton.drain import Drain
from angelspec_backend.triton.instance import Instance
from angelspec_backend.triton.metrics import REFUSED, ServingMetrics
from angelspec_backend.triton.streams import Streams
from angelspec_backend.triton.tokenizer import hide_torch, load_tokenizer

JOIN_TIMEOUT = 5.0  # seconds a thread gets to end

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """The running loop, once target and drafter have said what they are."""

    loop: SpeculativeLoop
    limits: RequestLimits
    thread: threading.Thread


class TritonPythonModel:
    """Created by Triton, once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer and start the output thread; the loop waits for the first request."""
        bridge.install_log_handler()
        instance = Instance.from_args(args)
        self._config = instance.config
        if self._config.hidden_states_on == "cpu":
            hide_torch()
        self._states = bridge.states_on(self._config.hidden_states_on)
        self._tokenizer = load_tokenizer(instance.model_path("target"))
        self._metrics = ServingMetrics()
        self._drain = Drain(self._config.drain_timeout)
        self._streams = Streams(self._tokenizer.decode, self._metrics, self._drain)
        self._ids = itertools.count()
        self._service: Service | None = None
        self._output: threading.Thread | None = None

    def execute(self, requests: list[Any]) -> None:
        """Admit requests; their responses are sent by the output thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._admit(request, sender)
            except InvalidRequest as error:
                self._refuse(sender, str(error), bridge.INVALID_ARG)
            except (Unavailable, StepError) as error:
                self._refuse(sender, str(error), bridge.UNAVAILABLE)
            except Exception:
                logger.exception("a request could not be admitted")
                self._refuse(sender, "internal error, see the server's log", bridge.INTERNAL)

    def finalize(self) -> None:
        """End every stream and both threads."""
        if self._service is not None:
            self._service.loop.stop()
            self._service.thread.join(JOIN_TIMEOUT)
        if self._output is not None:
            self._streams.stop()
            self._output.join(JOIN_TIMEOUT)

    def _admit(self, request: Any, sender: Any) -> None:
        if self._drain.active:
            raise Unavailable("the server is draining: it takes no new requests before it stops")
        service = self._service or self._start()
        arrays = bridge.to_arrays(request.inputs())
        generation = parse_request(arrays, service.limits, self._tokenizer, _timeout_s(request))
        request_id = next(self._ids)
        self._streams.open(request_id, generation, sender)
        if not service.loop.submit(request_id, generation):
            self._streams.forget(request_id)
            live = service.loop.num_live
            raise Unavailable(f"the queue is full ({live} requests running or waiting), try again later")

    def _refuse(self, sender: Any, message: str, code: str) -> None:
        self._metrics.finish(REFUSED)
        bridge.send(sender, bridge.error_response(message, code), final=True)

    def _start(self) -> Service:
        """Start serving.  Not in ``initialize``: calls between models are refused there.

        Raises:
            StepError: target or drafter is not there yet; the next request tries again.
        """
        executor = BlsExecutor(bool(self._config.drafter_names), self._states.read)
        executor.recover()  # a model may have died since it was loaded
        try:
            target = executor.target_info()
            drafters = self._drafters(executor, target)
            config = loop_config(self._config, target, drafters, self._states.arrays)
        except (ConfigError, ValueError) as error:
            logger.error("the models do not fit together: %s", error)
            raise Unavailable(f"the server is not configured correctly: {error}") from error
        loop = SpeculativeLoop(executor, config, self._streams.on_tokens)
        thread = threading.Thread(target=loop.run, name="loop", daemon=True)
        self._output = threading.Thread(target=self._streams.run, args=(loop,), name="output", daemon=True)
        failures = {drafter.name: drafter.failure for drafter in drafters if drafter.failure}
        limits = RequestLimits.from_config(self._config, config.max_context, target.vocab_size, failures)
        self._service = Service(loop, limits, thread)
        thread.start()
        self._output.start()
        return self._service

    def _drafters(self, executor: BlsExecutor, target: TargetInfo) -> tuple[DrafterInfo, ...]:
        """What drafters say of themselves, in the order of the configuration.

        A drafter that cannot work with this target counts as one that could not be loaded.

        Raises:
            ConfigError: drafter and target were not configured for each other.
        """
        if not executor.drafts:
            return ()
        try:
            info = executor.drafter_info()
        except ServerStopping:
            raise
        except StepError as error:
            return tuple(DrafterInfo.failed(name, str(error)) for name in self._config.drafter_names)
        names = tuple(drafter.name for drafter in info.drafters)
        if names != self._config.drafter_names:
            raise ConfigError(
                f"drafters: {self._config.drafters} in angelspec, {', '.join(names)} in drafter"
            )
        if len({each.hidden_states_on for each in (self._config, target, info)}) > 1:
            raise ConfigError("hidden_states_on must be the same in angelspec, target and drafter")
        if info.pool != target.pool:
            raise ConfigError(f"drafter has {info.pool}, target has {target.pool}; they share block ids")
        checked = [drafter.checked(target.num_layers, target.hidden_bytes) for drafter in info.drafters]
        for drafter, before in zip(checked, info.drafters, strict=True):
            if drafter != before:
                logger.error("drafter '%s' cannot be used: %s", drafter.name, drafter.failure)
        return tuple(checked)


def loop_config(
    config: EngineConfig, target: TargetInfo, drafters: tuple[DrafterInfo, ...], states: StateArrays
) -> LoopConfig:
    """The loop's limits: the configuration's, within what the target can do.

    states: how hidden states are handled.

    Raises:
        ValueError: the limits contradict each other.
    """
    pool_tokens = (target.pool.num_blocks - 1) * target.pool.block_size
    max_context = min(config.max_context or target.max_context, target.max_context, pool_tokens)
    if max_context < target.max_context:
        logger.warning("context of %d tokens; the target supports %d", max_context, target.max_context)
    return LoopConfig(
        num_blocks=target.pool.num_blocks,
        block_size=target.pool.block_size,
        max_context=max_context,
        eos_token_ids=frozenset(target.eos_token_ids),
        drafters=drafters,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_queue_size=config.max_queue_size,
        adaptive_drafts=config.adaptive_drafts,
        max_slowdown=config.max_slowdown,
        prefix_caching=config.prefix_caching,
        state_arrays=states,
    )


def _timeout_s(request: Any) -> float | None:
    """The deadline a client set, in seconds from now, or None.

    The request parameter "timeout" is in microseconds.  gRPC delivers it as a property of the request,
    the HTTP generate endpoint among the other parameters.
    """
    microseconds = request.timeout() or json.loads(request.parameters() or "{}").get("timeout", 0)
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float) or microseconds < 0:
        raise InvalidRequest(f"timeout must be a number of microseconds of at least 0, got {microseconds!r}")
    return microseconds / 1e6 or None
