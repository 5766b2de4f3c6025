"""Engine steps on a GPU: graphs against plain runs, copies that block, and times against the bandwidth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.graph_shapes import GraphShapes
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from benchmark_steps import BLOCK_SIZE, make_step, median_seconds


def synchronized(function: Callable[[], Any], device: str) -> Callable[[], None]:
    """The function, done only when the device is."""

    def run() -> None:
        function()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    return run


def read_bandwidth(device: str, size: int = 1 << 30) -> float:
    """Bytes per second of reading device memory."""
    data = torch.ones(size // 4, device=device)
    return data.nbytes / median_seconds([synchronized(data.sum, device)], 10)[0]


def weight_bytes(model: torch.nn.Module) -> int:
    """What a step reads of the weights: all but an embedding that is not the head too."""
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if embedding.weight.data_ptr() != head.weight.data_ptr():
        del weights[embedding.weight.data_ptr()]
    return sum(weights.values())


def blocking_copies(function: Callable[[], Any]) -> int:
    """How often a function waits for the device, its copies to the host included; 0 without a GPU."""
    function()  # compiles and captures
    if not torch.cuda.is_available():
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


def check_graphs(runner: ModelRunner, cells: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Logits of padded, replayed steps against those of plain ones.  cells: (rows, new tokens, context).

    Each cell runs twice, with other tokens: the first run captures, the second is a replay.
    """
    shapes = runner.graph_shapes or GraphShapes(runner.pool.block_size, runner.max_context)
    results = []
    for rows, tokens, context in cells:
        step, drafts = make_step(rows, tokens, context, runner.vocab_size, 0.0)
        for run in ("captured", "replayed"):
            ids = (step.token_ids + (run == "replayed")) % runner.vocab_size
            args = (step.rows, ids.astype(np.int32), drafts, step.block_table, BLOCK_SIZE, runner.device)
            padded = pack(*args, shapes)
            found = runner.forward(padded).clone()  # the next run overwrites it
            plain = runner.forward(pack(*args))
            difference = float((found.float() - plain.float()).norm() / plain.float().norm())
            results.append(
                {
                    "rows": rows,
                    "new_tokens": tokens,
                    "context": context,
                    "run": run,
                    "padded_to": None if padded.graph_shape is None else asdict(padded.graph_shape),
                    "bit_identical": torch.equal(found, plain),
                    "relative_difference": difference,
                    "agrees": torch.equal(found, plain) if runner.batch_invariant else difference < 0.02,
                }
            )
    return results


def step_times(
    runner: ModelRunner, read_bytes: int, cells: Sequence[tuple[int, int, int]], repeats: int
) -> dict[str, Any]:
    """Engine steps against reading the weights and the cache once.  cells: (rows, new tokens, context)."""
    bandwidth = read_bandwidth(str(runner.device), 1 << 30 if runner.device.type == "cuda" else 1 << 24)
    engine, results = TargetEngine(runner), []
    for rows, tokens, context in cells:
        times = {}
        waits = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            step, drafts = make_step(rows, tokens, context, runner.vocab_size, temperature)
            waits[name] = blocking_copies(lambda s=step, d=drafts: engine.step(s, d))  # type: ignore[misc]
            times[name] = median_seconds([lambda s=step, d=drafts: engine.step(s, d)], repeats)[0]  # type: ignore[misc]
        args = (step.rows, step.token_ids, drafts, step.block_table, BLOCK_SIZE, runner.device)
        batches = [pack(*args), pack(*args, runner.graph_shapes)]
        forwards = [
            synchronized(lambda b=batch: runner.forward(b), str(runner.device))  # type: ignore[misc]
            for batch in batches
        ]
        for forward in forwards:  # capture before the clock runs
            forward()
        plain, replayed = median_seconds(forwards, repeats)
        kv_bytes = rows * (context + tokens) * runner.pool.bytes_per_token
        floor = (read_bytes + kv_bytes) / bandwidth
        results.append(
            {
                "rows": rows,
                "new_tokens": tokens,
                "context": context,
                "step_ms": times["greedy"] * 1e3,
                "sampled_step_ms": times["sampled"] * 1e3,
                "forward_ms": plain * 1e3,
                "graph_forward_ms": None if batches[1].graph_shape is None else replayed * 1e3,
                "blocking_copies": waits,
                "bandwidth_floor_ms": floor * 1e3,
                "ratio": times["greedy"] / floor,
            }
        )
    return {"bandwidth_gb_s": bandwidth / 1e9, "weight_bytes": read_bytes, "cells": results}
