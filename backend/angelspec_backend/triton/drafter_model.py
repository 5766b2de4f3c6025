"""The Triton model `drafter`: proposes draft tokens, with one or several drafters in one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from angelspec_backend.core.config import NETWORK_DRAFTERS
from angelspec_backend.drafters.base import Drafter, DrafterHost
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.triton import bridge, codec
from angelspec_backend.triton.instance import Instance

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """Created by Triton, one per instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load every drafter that the option ``drafters`` names."""
        bridge.install_log_handler()
        instance = Instance.from_args(args)
        self._config = instance.config
        drafters = load_drafters(instance)
        self._host = DrafterHost(drafters, self._config.max_num_seqs)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request; never raises."""
        return [bridge.answer("drafter", request, self._answer) for request in requests]

    def _answer(self, arrays: codec.Arrays) -> codec.Arrays:
        step = codec.decode_step(arrays)
        if len(step.rows) == 0:
            return codec.encode_info(self._info())
        return codec.encode_drafts(self._host.propose(step))

    def _info(self) -> codec.DrafterModelInfo:
        return codec.DrafterModelInfo(
            pool=codec.PoolInfo(self._config.num_blocks, self._config.block_size),
            drafters=tuple(each.info for each in self._host.drafters),
        )


def load_drafters(instance: Instance) -> list[Drafter]:
    """The drafters that the configuration names, in its order.

    Raises:
        ConfigError, LoadError: one of them cannot be loaded, and why.
    """
    config = instance.config
    drafters: dict[str, Drafter] = {}
    if "ngram" in config.drafter_names:
        drafters["ngram"] = NgramDrafter(config.ngram_min, config.ngram_max, config.max_num_seqs)
    if set(config.drafter_names) - {"ngram"}:
        import torch  # with the n-gram drafter alone this process needs none

        if config.num_threads:
            torch.set_num_threads(config.num_threads)
    if "draft_model" in config.drafter_names:
        drafters["draft_model"] = _load_draft_model(instance)
    if kinds := [name for name in config.drafter_names if name in NETWORK_DRAFTERS]:
        drafters |= _load_networks(kinds, instance)
    return [drafters[name] for name in config.drafter_names]


def _load_networks(kinds: list[str], instance: Instance) -> dict[str, Drafter]:
    import torch

    from angelspec_backend.drafters.served import ServedTarget, load_served

    config = instance.config
    target = ServedTarget(
        path=instance.model_path("target"),
        dtype=getattr(torch, config.dtype),
        device=instance.device,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_context=config.max_context,
    )
    return {kind: load_served(kind, instance.model_path(kind), target, config.quantization) for kind in kinds}


def _load_draft_model(instance: Instance) -> Drafter:
    import torch

    from angelspec_backend.drafters.draft_model import DraftModelDrafter, check_compatible
    from angelspec_backend.engine.runner import ModelRunner

    config, path = instance.config, instance.model_path("draft_model")
    check_compatible(instance.model_path("target"), path)
    runner = ModelRunner.from_pretrained(
        path,
        dtype=getattr(torch, config.dtype),
        device=instance.device,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        quantization=config.quantization,
        batch_invariant=False,  # drafts change no text
        cuda_graphs=config.cuda_graphs,
    )
    logger.info("draft_model: %s", runner.describe())
    return DraftModelDrafter(runner)
