"""CUDA graphs of verify steps: one launch instead of some hundred per step.

A graph is captured when its shape comes up for the first time, right after that step ran without one, and
replayed from then on.  All graphs share one memory pool, as only one runs at a time, so what a step returns
is copied to buffers outside of it, which the next step overwrites.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.graph_shapes import GraphShape, GraphShapes
from angelspec_backend.engine.upload import buffer_of, split

_log = logging.getLogger(__name__)

Forward = Callable[[PackedBatch, Sequence[int]], tuple[Tensor, list[Tensor]]]
"""Batch and taps to logits and hidden states."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Work on fixed tensors to something that repeats it."""


@dataclass(frozen=True)
class _Captured:
    """A step of one shape: where its batch goes, how to run it, where its results lie."""

    inputs: Tensor  # [num_bytes] the batch's tensors
    replay: Callable[[], None]
    results: list[Tensor]  # [num_tokens, ...] logits, then the hidden states of each tap


class CudaGraphs:
    """Forward passes of padded batches, from graphs where they can be had."""

    def __init__(self, forward: Forward, shapes: GraphShapes, capture: Capture | None = None) -> None:
        """forward: launches kernels only, nothing in it may wait for the device; else no graph is used.

        capture: a CUDA graph; tests have another one.
        """
        self._forward, self._shapes = forward, shapes
        self._capture = capture or _cuda_capture()
        self._captured: dict[tuple[GraphShape, tuple[int, ...]], _Captured] = {}
        self._results: dict[int, Tensor] = {}  # of all graphs; -1: logits, else a tap's hidden states
        self._enabled = True

    @property
    def shapes(self) -> GraphShapes | None:
        """The shapes that batches are to be padded to; None when this model cannot be captured."""
        return self._shapes if self._enabled else None

    def run(self, batch: PackedBatch, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """A forward pass of a batch with a ``graph_shape``, padding included.

        Returns logits [num_tokens, vocab_size] and per tap [num_tokens, hidden], valid until the next call.
        """
        assert batch.graph_shape is not None
        key = (batch.graph_shape, tuple(taps))
        captured = self._captured.get(key)
        if captured is not None:
            captured.inputs.copy_(buffer_of(batch.token_ids), non_blocking=True)
            captured.replay()
            return captured.results[0], captured.results[1:]
        # This run also compiles kernels and picks algorithms, which must not happen during a capture.
        logits, states = self._forward(batch, taps)
        if self._enabled:
            try:
                self._captured[key] = self._captured_step(batch, taps, [logits, *states])
            except RuntimeError as error:  # torch has no narrower type for a failed capture
                self._enabled = False
                _log.warning("no CUDA graphs: this model cannot be captured: %s", str(error).splitlines()[0])
        return logits, states

    def _captured_step(self, batch: PackedBatch, taps: Sequence[int], like: list[Tensor]) -> _Captured:
        inputs = buffer_of(batch.token_ids).clone()
        fixed = batch.with_tensors(split(inputs, batch.tensors()))
        results = [self._result(tap, each) for tap, each in zip((-1, *taps), like, strict=True)]

        def step() -> None:
            logits, states = self._forward(fixed, taps)
            for result, each in zip(results, (logits, *states), strict=True):
                result.copy_(each)

        return _Captured(inputs, self._capture(step), results)

    def _result(self, name: int, like: Tensor) -> Tensor:
        """The first rows of the buffer for some result, which is made when it is first asked for."""
        if name not in self._results:
            size = (self._shapes.max_tokens, *like.shape[1:])
            self._results[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._results[name][: len(like)]


def _cuda_capture() -> Capture:
    """Capture into graphs of one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture
