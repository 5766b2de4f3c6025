"""Check and measure the engine on a GPU, and write a report.

    python scripts/gpu_check.py [--target FOLDER] [--out gpu_report.json]

Parity and batch invariance of every attention implementation, step times against the memory bandwidth,
plain decoding against n-gram drafts, and how often a greedy text is another one in a batch than alone.
Exit code 0 when all implementations agree, 1 when not, 2 on a machine without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine.attention import (
    Attention,
    paged_attention,
    sdpa_paged_attention,
    torch_paged_attention,
)
from angelspec_backend.engine.batch import PackedBatch, pack
from angelspec_backend.engine.loader import load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from benchmark_options import counts
from benchmark_prompts import DEFAULT_PROMPTS, load_prompts
from benchmark_report import describe_machine
from benchmark_steps import BLOCK_SIZE, make_step, median_seconds
from gpu_generation import compare_generation

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference to the reference, of values that are standard normal."""
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 100}, {"softcap": 30.0}, {"sinks": True})


@dataclass(frozen=True)
class Case:
    """Random caches and queries, and the rows that attend: (tokens before, queries)."""

    rows: tuple[tuple[int, int], ...]
    query: Tensor  # [num_tokens, num_heads, dim]
    keys: Tensor  # [num_blocks, num_kv_heads, BLOCK_SIZE, dim]
    values: Tensor

    def batch(self) -> PackedBatch:
        """The rows' queries as a batch; row r owns the blocks 1 + r * width ..."""
        width = -(-max(context + count for context, count in self.rows) // BLOCK_SIZE)
        records = np.zeros(len(self.rows), ROW)
        records["num_computed"], records["num_tokens"] = np.array(self.rows).T
        records["num_blocks"] = width
        table = 1 + np.arange(len(self.rows) * width, dtype=np.int32)
        ids = np.zeros(records["num_tokens"].sum(), np.int32)
        return pack(records, ids, DraftOutput.empty(len(records)), table, BLOCK_SIZE, self.query.device)

    def attend(self, function: Attention, **options: Any) -> Tensor:
        """[num_tokens, num_heads, dim]"""
        sinks = torch.linspace(-2, 2, self.query.shape[1], device=self.query.device)
        given = options | ({"sinks": sinks} if options.get("sinks") else {})
        return function(
            self.query, self.keys, self.values, self.batch(), self.query.shape[2] ** -0.5, **given
        )


def make_case(
    rows: Sequence[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> Case:
    """heads: (query, key/value)."""
    torch.manual_seed(0)
    width = -(-max(context + count for context, count in rows) // BLOCK_SIZE)
    cache = (1 + len(rows) * width, heads[1], BLOCK_SIZE, dim)
    tokens = sum(count for _, count in rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return Case(tuple(rows), normal(tokens, heads[0], dim), normal(*cache), normal(*cache))


def check_attention(device: str, rows: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Every implementation against the reference, and the first query alone against in the batch.

    rows: (tokens before, queries) of at least two rows.
    """
    implementations: dict[str, Attention] = {"default": paged_attention, "sdpa": sdpa_paged_attention}
    results = []
    shapes = itertools.product(((9, 3), (8, 1)), (64, 128), TOLERANCE, VARIANTS)
    for heads, dim, dtype, variant in shapes:
        case = make_case(rows, heads, dim, dtype, device)
        expected = case.attend(torch_paged_attention, **variant).float()
        for name, function in implementations.items():
            if name == "sdpa" and (variant.keys() & {"softcap", "sinks"}):
                continue
            out = case.attend(function, **variant)
            error = float((out.float() - expected).abs().max())
            results.append(
                {
                    "implementation": name,
                    "heads": heads,
                    "head_dim": dim,
                    "dtype": str(dtype).removeprefix("torch."),
                    **variant,
                    "largest_error": error,
                    "agrees": error <= TOLERANCE[dtype],
                    "batch_invariant": torch.equal(_first_alone(case, function, variant), out[0]),
                }
            )
    return results


def _first_alone(case: Case, function: Attention, variant: dict[str, Any]) -> Tensor:
    """What the batch's first query gets without the others.  [num_heads, dim]"""
    # A batch of one token is padded to two, the second of no row.
    alone = replace(case, rows=((case.rows[0][0], 1),), query=case.query[:2])
    return alone.attend(function, **variant)[0]


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
    weights = {id(p): p for p in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if embedding.weight is not head.weight:
        del weights[id(embedding.weight)]
    return sum(p.nbytes for p in weights.values())


def step_times(
    runner: ModelRunner, read_bytes: int, cells: Sequence[tuple[int, int, int]], repeats: int
) -> dict[str, Any]:
    """Engine steps against reading the weights and the cache once.  cells: (rows, new tokens, context)."""
    bandwidth = read_bandwidth(str(runner.device), 1 << 30 if runner.device.type == "cuda" else 1 << 24)
    engine, results = TargetEngine(runner), []
    for rows, tokens, context in cells:
        times = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            step, drafts = make_step(rows, tokens, context, runner.vocab_size, temperature)
            times[name] = median_seconds([lambda s=step, d=drafts: engine.step(s, d)], repeats)[0]  # type: ignore[misc]
        batch = pack(step.rows, step.token_ids, drafts, step.block_table, BLOCK_SIZE, runner.device)
        forward = synchronized(lambda b=batch: runner.forward(b), str(runner.device))  # type: ignore[misc]
        kv_bytes = rows * (context + tokens) * runner.pool.bytes_per_token
        floor = (read_bytes + kv_bytes) / bandwidth
        results.append(
            {
                "rows": rows,
                "new_tokens": tokens,
                "context": context,
                "step_ms": times["greedy"] * 1e3,
                "sampled_step_ms": times["sampled"] * 1e3,
                "forward_ms": median_seconds([forward], repeats)[0] * 1e3,
                "bandwidth_floor_ms": floor * 1e3,
                "ratio": times["greedy"] / floor,
            }
        )
    return {"bandwidth_gb_s": bandwidth / 1e9, "weight_bytes": read_bytes, "cells": results}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--rows", type=counts, default=[1, 16, 64])
    parser.add_argument("--tokens", type=counts, default=[1, 8], help="new tokens per row")
    parser.add_argument("--contexts", type=counts, default=[128, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts, all in one batch at the most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"))
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device on this machine, so nothing was checked", file=sys.stderr)
        return 2
    device = "cuda:0"
    cells = list(itertools.product(options.rows, options.tokens, options.contexts))
    longest = max(options.contexts) + max(options.tokens)
    num_blocks = 1 + max(options.rows) * -(-longest // BLOCK_SIZE)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "torch": torch.__version__,
        **describe_machine(),
        "attention": check_attention(device, [(700, 3), (30, 1), (255, 8), (1, 200)]),
    }
    runner = ModelRunner.from_pretrained(
        options.target, device=device, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    report["model"] = {"target": Path(options.target).name, **runner.describe()}
    model = runner.network.model  # type: ignore[attr-defined]  # on a GPU it is the generic network
    report["steps"] = step_times(runner, weight_bytes(model), cells, options.repeats)
    tokenizer = load_tokenizer(options.target)
    prompts = [
        list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        for messages in load_prompts(DEFAULT_PROMPTS)[: options.prompts]
    ]
    report["generation"] = compare_generation(runner, prompts, options.max_tokens, options.draft_tokens)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [each for each in report["attention"] if not each["agrees"]]
    print(f"{options.out}: {len(failed)} of {len(report['attention'])} attention checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
