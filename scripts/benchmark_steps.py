"""The steps that the engine's benchmarks time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.messages import NO_DRAFTER, ROW, DraftOutput, StepInput
from angelspec_backend.engine.loader import load_tokenizer
from angelspec_backend.engine.target import TargetEngine
from loadtest.task_sets import DEFAULT_PROMPTS, load_prompts

BLOCK_SIZE = 16
PREFILL_CHUNK = 512  # tokens, as in the server's steps
_NO_TOKENS = np.zeros(0, np.int32)


def median_seconds(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median time of each function; they run in turns, so that a drift of the machine hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 2):
        for function, seen in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            if repeat >= 2:  # the first runs warm up
                seen.append(time.perf_counter() - begin)
    return [statistics.median(seen) for seen in times]


def make_step(
    rows: int, tokens: int, context: int, vocab_size: int, temperature: float
) -> tuple[StepInput, DraftOutput]:
    """A step of ``rows`` sequences with ``context`` computed tokens, each verifying ``tokens`` - 1 drafts."""
    rng = np.random.default_rng(0)
    blocks = -(-(context + tokens) // BLOCK_SIZE)
    records = np.zeros(rows, ROW)
    records["num_computed"], records["num_tokens"], records["sample"] = context, 1, 1
    records["num_draft_tokens"], records["num_blocks"], records["drafter"] = tokens - 1, blocks, -1
    records["temperature"], records["top_p"] = temperature, 0.95 if temperature else 1.0
    records["seed"] = np.arange(rows)
    ids = rng.integers(0, vocab_size, rows).astype(np.int32)
    table = np.arange(1, 1 + rows * blocks, dtype=np.int32)
    drafts = rng.integers(0, vocab_size, rows * (tokens - 1)).astype(np.int32)
    step = StepInput(records, ids, np.zeros(0, np.int32), table)
    return step, DraftOutput.of(drafts, np.full(rows, tokens - 1, np.int32))


class TextRows:
    """Rows that stand in the middle of real texts, with their keys and values computed.

    Made-up tokens would do for the matrix products, but not for sampling: what that costs depends on how
    sure the model is of the next token.
    """

    def __init__(self, engine: TargetEngine, target: str, rows: int, context: int, most_tokens: int) -> None:
        """Prefill ``context`` tokens of ``rows`` texts; a step may bring ``most_tokens`` to each row."""
        self.context, self.blocks = context, -(-(context + most_tokens) // BLOCK_SIZE)
        texts = [
            message["content"] for prompt in load_prompts(DEFAULT_PROMPTS) for message in prompt.messages
        ]
        ids = np.array(load_tokenizer(target)("\n\n".join(texts))["input_ids"], np.int32)
        starts = np.arange(rows) * len(ids) // rows
        self._ids = ids[(starts[:, None] + np.arange(context + most_tokens)) % len(ids)]  # [rows, tokens]
        for row in range(rows):
            for at in range(0, context, PREFILL_CHUNK):
                engine.step(self.prefill(row, at, min(PREFILL_CHUNK, context - at)), DraftOutput.empty(1))

    def prefill(self, row: int, computed: int, tokens: int) -> StepInput:
        """The next ``tokens`` of one row's context, after ``computed`` ones."""
        records, table = self._rows(np.array([row]), computed, tokens)
        return StepInput(records, self._ids[row, computed : computed + tokens], _NO_TOKENS, table)

    def verify(self, rows: int, tokens: int, temperature: float) -> tuple[StepInput, DraftOutput]:
        """The first ``rows`` texts go on by a token and verify the ``tokens`` - 1 that follow in them."""
        records, table = self._rows(np.arange(rows), self.context, 1)
        records["sample"], records["num_draft_tokens"] = 1, tokens - 1
        records["temperature"], records["top_p"] = temperature, 0.95 if temperature else 1.0
        new = self._ids[:rows, self.context : self.context + tokens]
        step = StepInput(records, new[:, 0].copy(), _NO_TOKENS, table)
        return step, DraftOutput.of(new[:, 1:].ravel(), np.full(rows, tokens - 1, np.int32))

    def _rows(
        self, which: NDArray[Any], computed: int, tokens: int
    ) -> tuple[NDArray[np.void], NDArray[np.int32]]:
        records = np.zeros(len(which), ROW)
        records["num_computed"], records["num_tokens"], records["drafter"] = computed, tokens, NO_DRAFTER
        records["num_blocks"], records["seed"], records["slot"] = self.blocks, which, which
        table = 1 + which[:, None] * self.blocks + np.arange(self.blocks)  # [rows, blocks]
        return records, table.astype(np.int32).ravel()
