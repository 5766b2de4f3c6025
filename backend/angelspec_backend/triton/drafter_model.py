"""The Triton model `drafter`: proposes draft tokens, with one or several drafters in one process."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from angelspec_backend.core.config import NETWORK_DRAFTERS, ConfigError
from angelspec_backend.drafters.base import Drafter, DrafterHost, MissingDrafter
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.triton import bridge, codec
from angelspec_backend.triton.instance import Instance

if TYPE_CHECKING:
    from angelspec_backend.drafters.served import ServedTarget

FOLDERS = re.compile(r"(?<![\w.])[/~][^\s'\":,;]*/")
"""In error texts: clients are told the last part of a path only."""

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """Created by Triton, one per instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load every drafter that the option ``drafters`` names."""
        bridge.install_log_handler()
        instance = Instance.from_args(args)
        self._config = instance.config
        drafters = load_drafters(instance)
        self._states = bridge.states_on(self._config.hidden_states_on)
        self._host = DrafterHost(drafters, self._config.max_num_seqs, self._states.arrays)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request; never raises."""
        read = self._states.read
        return [bridge.answer("drafter", request, self._answer, read) for request in requests]

    def _answer(self, arrays: codec.Arrays) -> codec.Arrays:
        step = codec.decode_step(arrays)
        if len(step.rows) == 0:
            return codec.encode_info(self._info())
        return codec.encode_drafts(self._host.propose(step))

    def _info(self) -> codec.DrafterModelInfo:
        return codec.DrafterModelInfo(
            pool=codec.PoolInfo(self._config.num_blocks, self._config.block_size),
            drafters=tuple(each.info for each in self._host.drafters),
            hidden_states_on=self._config.hidden_states_on,
        )


def load_drafters(instance: Instance) -> list[Drafter]:
    """The drafters that the configuration names, in its order.

    Drafters only make texts appear sooner, so one that cannot be loaded is logged and replaced by a
    MissingDrafter.
    """
    config = instance.config
    loaders = _loaders(instance)
    if set(config.drafter_names) - {"ngram"} and config.num_threads:
        import torch

        torch.set_num_threads(config.num_threads)
    return [_load(name, loaders[name]) for name in config.drafter_names]


def _load(name: str, load: Callable[[], Drafter]) -> Drafter:
    try:
        return load()
    except Exception as error:
        from angelspec_backend.engine.loader import LoadError

        if isinstance(error, LoadError | ConfigError):
            reason = " ".join(str(error).split())
            logger.error("drafter '%s' cannot be loaded, requests go on without it: %s", name, reason)
        else:
            reason = f"{type(error).__name__}, see the server's log"
            logger.exception("drafter '%s' cannot be loaded, requests go on without it", name)
        return MissingDrafter(name, FOLDERS.sub("", reason))


def _loaders(instance: Instance) -> dict[str, Callable[[], Drafter]]:
    """How each drafter is loaded.  Torch is imported when the first needs it: the n-gram drafter does not."""
    config = instance.config

    @functools.cache
    def target() -> ServedTarget:
        return _served_target(instance)

    def network(kind: str) -> Drafter:
        from angelspec_backend.drafters.served import load_served

        lookup = config.ngram_max if config.lookup else 0
        return load_served(kind, instance.model_path(kind), target(), config.drafter_quantization, lookup)

    return {
        "ngram": lambda: NgramDrafter(config.ngram_min, config.ngram_max, config.max_num_seqs),
        "draft_model": lambda: _load_draft_model(instance),
        **{kind: functools.partial(network, kind) for kind in NETWORK_DRAFTERS},
    }


def _served_target(instance: Instance) -> ServedTarget:
    import torch

    from angelspec_backend.drafters.served import ServedTarget

    config = instance.config
    return ServedTarget(
        path=instance.model_path("target"),
        dtype=getattr(torch, config.dtype),
        device=instance.device,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_context=config.max_context,
    )


def _load_draft_model(instance: Instance) -> Drafter:
    import torch

    from angelspec_backend.drafters.draft_model import DraftModelDrafter, check_compatible
    from angelspec_backend.engine.linear_native import resolve_quantization
    from angelspec_backend.engine.runner import ModelRunner

    config, path = instance.config, instance.model_path("draft_model")
    check_compatible(instance.model_path("target"), path)
    dtype = getattr(torch, config.dtype)
    runner = ModelRunner.from_pretrained(
        path,
        dtype=dtype,
        device=instance.device,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        quantization=resolve_quantization(config.drafter_quantization, dtype, instance.device),
        batch_invariant=False,  # drafts change no text
        cuda_graphs=config.cuda_graphs,
    )
    logger.info("draft_model: %s", runner.describe())
    return DraftModelDrafter(runner)
