"""The Triton model `target`: verifies drafts and samples, for all rows of a step at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from angelspec_backend.triton import bridge, codec
from angelspec_backend.triton.instance import Instance

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """Created by Triton, one per instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the target and allocate its KV pool."""
        bridge.install_log_handler()
        instance = Instance.from_args(args)
        if instance.config.num_threads:
            torch.set_num_threads(instance.config.num_threads)
        config = instance.config
        runner = ModelRunner.from_pretrained(
            instance.model_path("target"),
            dtype=getattr(torch, config.dtype),
            device=instance.device,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            quantization=config.quantization,
            max_context=config.max_context,
            batch_invariant=config.batch_invariant,
            cuda_graphs=config.cuda_graphs,
        )
        self._hidden_states_on = config.hidden_states_on
        self._engine = TargetEngine(runner, states_on_device=config.hidden_states_on == "device")
        logger.info("target: %s", runner.describe())

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request; never raises."""
        return [bridge.answer("target", request, self._answer) for request in requests]

    def _answer(self, arrays: codec.Arrays) -> codec.Arrays:
        step = codec.decode_step(arrays)
        if len(step.rows) == 0:
            return codec.encode_info(self._info())
        drafts = codec.decode_drafts(arrays, len(step.rows))
        return codec.encode_output(self._engine.step(step, drafts))

    def _info(self) -> codec.TargetInfo:
        runner = self._engine.runner
        return codec.TargetInfo(
            pool=codec.PoolInfo(runner.pool.num_blocks, runner.pool.block_size),
            max_context=runner.max_context,
            vocab_size=runner.vocab_size,
            eos_token_ids=tuple(runner.eos_token_ids),
            num_layers=runner.num_layers,
            hidden_bytes=runner.hidden_size * runner.dtype.itemsize,
            hidden_states_on=self._hidden_states_on,
        )
