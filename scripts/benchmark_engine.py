"""Time engine steps against what the machine allows, and say where the time goes.

    python scripts/benchmark_engine.py [--rows 1,4,16,64] [--tokens 1,4,8] [--contexts 128,1024] [--out FILE]

The floor of a step is its matrix products alone, with the same packed weights, plus the time to read the
keys and values once at the memory bandwidth measured in the same run.  Floor and step alternate, and the
medians are compared.  One JSON line per cell goes to --out, a table to the terminal.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As the server sets them.  Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

import torch
from rich.console import Console
from rich.table import Table

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.engine import native
from angelspec_backend.engine import target as target_module
from angelspec_backend.engine.linear import PackedLinear, padded_rows
from angelspec_backend.engine.llama import FusedLlama
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from benchmark_options import counts
from benchmark_report import describe_machine, to_line
from benchmark_steps import BLOCK_SIZE, PREFILL_CHUNK, TextRows, median_seconds

ROOT = Path(__file__).resolve().parent.parent
PREFILL_TOKENS = 1024
PARTS = ("matmul", "attention", "norms and the rest", "sampling", "packing")


class Stopwatch:
    """Seconds spent in some functions, by name, while they are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to ``seconds[name]``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        return call

    @contextmanager
    def measuring(self, network: FusedLlama) -> Iterator[None]:
        """Time the parts of a step of this model inside this block."""
        places: list[tuple[Any, str, str]] = [
            (PackedLinear, "forward", "matmul"),
            (native, "paged_attention", "attention"),
            (target_module, "sample", "sampling"),
            (target_module, "pack", "packing"),
            (target_module, "check_step", "packing"),
        ]
        saved = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, part in places:
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        inside = torch.zeros(2, dtype=torch.float64)  # the one native call keeps time itself
        if network.native_forward:
            network.native_forward.seconds = inside
        try:
            yield
        finally:
            if network.native_forward:
                network.native_forward.seconds = None
            for name, seconds in zip(("matmul", "attention"), inside.tolist(), strict=True):
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            for owner, name, function in saved:
                setattr(owner, name, function)


def matmul_floor(model: FusedLlama, num_tokens: int, head: bool = True) -> Callable[[], None]:
    """All matrix products of a step with their activations, nothing else; a prompt's chunk needs no head."""
    count = padded_rows(num_tokens)

    def inputs(linear: PackedLinear) -> torch.Tensor:
        return torch.randn(count, linear.in_features).to(model.dtype)

    shapes = [inputs(linear) for linear in model.decoder.layers[0].linears()]
    at_head = inputs(model.head)

    @torch.inference_mode()
    def run() -> None:
        for layer in model.decoder.layers:
            for linear, x in zip(layer.linears(), shapes, strict=True):
                linear(x)
        if head:
            model.head(at_head)

    return run


def read_bandwidth() -> float:
    """Bytes per second of reading memory with all threads: the median of several passes over 1 GiB."""
    data = torch.ones(1 << 27, dtype=torch.float64)
    return data.nbytes / median_seconds([data.sum], 5)[0]


def measure(
    engine: TargetEngine, texts: TextRows, rows: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One cell: floor, step and its parts, in milliseconds."""
    runner = engine.runner
    assert isinstance(runner.network, FusedLlama)
    step, drafts = texts.verify(rows, tokens, options.temperature)
    floor = matmul_floor(runner.network, rows * tokens)

    def run() -> None:
        engine.step(step, drafts)

    matmul_s, step_s = median_seconds([floor, run], options.repeats)
    stopwatch = Stopwatch()
    with stopwatch.measuring(runner.network):
        for _ in range(options.repeats):
            run()
    kv_bytes = rows * (texts.context + tokens) * runner.pool.bytes_per_token
    floor_s = matmul_s + kv_bytes / options.bandwidth
    parts = {name: stopwatch.seconds.get(name, 0.0) / options.repeats * 1e3 for name in PARTS}
    parts["norms and the rest"] = max(step_s * 1e3 - sum(parts.values()), 0.0)
    cell: dict[str, Any] = {"rows": rows, "new_tokens": tokens, "context": texts.context}
    cell |= {"step_ms": step_s * 1e3, "floor_ms": floor_s * 1e3, "matmul_floor_ms": matmul_s * 1e3}
    return cell | {"ratio": step_s / floor_s} | {f"{name}_ms": value for name, value in parts.items()}


def measure_prefill(engine: TargetEngine, target: str, repeats: int) -> dict[str, Any]:
    """A prompt of PREFILL_TOKENS in the server's chunks, against three rates of matrix products.

    Those of its own products called one by one, those that they reach inside the prompt, where inputs lie as
    the kernel likes them best, and those of torch for the largest of them.  The rate of the prompt counts
    what attention multiplies too, the causal half of scores and values, as the usual model FLOP utilisation
    does.
    """
    model = engine.runner.network
    assert isinstance(model, FusedLlama)
    texts = TextRows(engine, target, 1, PREFILL_TOKENS, 1)
    steps = [texts.prefill(0, at, PREFILL_CHUNK) for at in range(0, PREFILL_TOKENS, PREFILL_CHUNK)]
    floor = matmul_floor(model, PREFILL_CHUNK, head=False)
    stopwatch, decoder = Stopwatch(), model.decoder
    widest = decoder.layers[0].gate_up
    x = torch.randn(PREFILL_TOKENS, widest.in_features).to(model.dtype)
    weight = torch.randn(2 * widest.out_features, widest.in_features).to(model.dtype)

    def matmuls() -> None:
        for _ in steps:
            floor()

    def run() -> None:
        for step in steps:
            engine.step(step, DraftOutput.empty(1))

    matmul_s, prefill_s, torch_s = median_seconds(
        [matmuls, run, lambda: torch.nn.functional.linear(x, weight)], repeats
    )
    with stopwatch.measuring(model):
        for _ in range(repeats):
            run()
    weights = sum(_multiplications(linear) for layer in decoder.layers for linear in layer.linears())
    pairs = PREFILL_TOKENS * (PREFILL_TOKENS + 1) / 2  # of a query and a key that it sees
    attention = 2 * len(decoder.layers) * decoder.num_heads * decoder.head_dim * pairs  # scores and values
    flop = 2 * weights * PREFILL_TOKENS
    rate = (flop + 2 * attention) / prefill_s / 1e9
    rates = {
        "called": flop / matmul_s / 1e9,
        "inside": flop / (stopwatch.seconds["matmul"] / repeats) / 1e9,
        "torch": 2 * x.numel() * len(weight) / torch_s / 1e9,
    }
    return {
        "prefill_tokens": PREFILL_TOKENS,
        "prefill_ms": prefill_s * 1e3,
        "prefill_gflop_s": rate,
        **{f"products_{name}_gflop_s": value for name, value in rates.items()},
        **{f"share_of_{name}": rate / value for name, value in rates.items()},
    }


def _multiplications(linear: PackedLinear) -> int:
    """Of one row."""
    return linear.in_features * linear.out_features * (2 if linear.gated else 1)


def show(cells: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table(title="Engine steps against the floor, medians in ms")
    for column in ("rows", "new tokens", "context", "step", "floor", "ratio", *PARTS):
        table.add_column(column, justify="right")
    for cell in cells:
        numbers = [cell["step_ms"], cell["floor_ms"], cell["ratio"], *(cell[f"{name}_ms"] for name in PARTS)]
        places = [str(cell[name]) for name in ("rows", "new_tokens", "context")]
        table.add_row(*places, *(f"{number:.2f}" for number in numbers))
    Console(width=140).print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=counts, default=[1, 4, 16, 64])
    parser.add_argument(
        "--tokens", type=counts, default=[1, 4, 8], help="new tokens per row: one and its drafts"
    )
    parser.add_argument("--contexts", type=counts, default=[128, 1024])
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy; else with top_p 0.95")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    longest = max(*options.contexts, PREFILL_TOKENS) + max(options.tokens)
    most = max(options.rows) * -(-longest // BLOCK_SIZE)
    dtype = getattr(torch, options.dtype)
    runner = ModelRunner.from_pretrained(
        options.target, dtype=dtype, num_blocks=most + 1, block_size=BLOCK_SIZE
    )
    if not isinstance(runner.network, FusedLlama):
        raise SystemExit("the floor is known for the fused models only")
    engine = TargetEngine(runner)
    options.bandwidth = read_bandwidth()
    print(f"memory read bandwidth {options.bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    cells = []

    def save(cell: dict[str, Any]) -> None:
        if options.out:
            record = {**cell, "bandwidth_gb_s": options.bandwidth / 1e9, **describe_machine()}
            with options.out.open("a", encoding="utf-8") as out:
                out.write(to_line(record) + "\n")

    for context in options.contexts:
        texts = TextRows(engine, options.target, max(options.rows), context, max(options.tokens))
        for rows in options.rows:
            for tokens in options.tokens:
                cells.append(measure(engine, texts, rows, tokens, options))
                save(cells[-1])
    show(cells)
    prefill = measure_prefill(engine, options.target, options.repeats)
    save(prefill)
    print(
        f"a prompt of {PREFILL_TOKENS} tokens: {prefill['prefill_ms']:.0f} ms, "
        f"{prefill['prefill_gflop_s']:.0f} GFLOP/s; {prefill['share_of_called']:.0%} of its matrix products "
        f"called one by one, {prefill['share_of_torch']:.0%} of torch's largest of them, "
        f"{prefill['share_of_inside']:.0%} of what they reach inside"
    )


if __name__ == "__main__":
    main()
