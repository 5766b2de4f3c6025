"""Check and measure the engine on a GPU, all of it in one run, and write a report.

    python scripts/gpu_check.py [--target FOLDER] [--out gpu_report.json]

Every attention against the reference, the fixed-order products, CUDA graphs against plain steps, copies that
block, step times against the memory bandwidth, plain decoding against n-gram drafts, and how often a greedy
text is another one in a batch than alone; the model's part with and without batch-invariant kernels.
Exit code 0 when all checks pass, 1 when not, 2 on a machine without a CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from angelspec_backend.engine.loader import load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from benchmark_options import counts
from benchmark_report import describe_machine
from benchmark_steps import BLOCK_SIZE
from gpu_generation import compare_generation
from gpu_kernels import check_attention, check_products
from gpu_steps import check_graphs, step_times, weight_bytes
from loadtest.task_sets import DEFAULT_PROMPTS, load_prompts

ROOT = Path(__file__).resolve().parent.parent


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


def check_model(options: argparse.Namespace, device: str, batch_invariant: bool) -> dict[str, Any]:
    """Everything that is measured on the model, with or without batch-invariant kernels."""
    cells = list(itertools.product(options.rows, options.tokens, options.contexts))
    longest = max(options.contexts) + max(options.tokens)
    runner = ModelRunner.from_pretrained(
        options.target,
        device=device,
        num_blocks=1 + max(options.rows) * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_invariant=batch_invariant,
    )
    tokenizer = load_tokenizer(options.target)
    prompts = [
        list(tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False))
        for prompt in load_prompts(DEFAULT_PROMPTS)[: options.prompts]
    ]
    graphs = check_graphs(runner, cells)
    # A model that cannot be captured turns graphs off.
    described = {**runner.describe(), "cuda_graphs": runner.graph_shapes is not None}
    model = runner.network.model  # type: ignore[attr-defined]  # on a GPU it is the generic network
    return {
        "model": {"target": Path(options.target).name, **described},
        "graphs": graphs,
        "steps": step_times(runner, weight_bytes(model), cells, options.repeats),
        "generation": compare_generation(runner, prompts, options.max_tokens, options.draft_tokens),
    }


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    """What failed, and what batch invariance costs.  report: as ``main`` builds it."""
    invariant, fast = report["batch_invariant"], report["fast"]
    default = [each for each in report["attention"] if each["implementation"] == "default"]
    failures = {
        "attention differs from the reference": _count(report["attention"], "agrees"),
        "default attention depends on the batch": _count(default, "batch_invariant"),
        "products differ from the reference": _count(report["products"], "agrees"),
        "products depend on the batch": _count(report["products"], "batch_invariant"),
        "graphs differ from plain steps": sum(_count(mode["graphs"], "agrees") for mode in (invariant, fast)),
        "the engine is not batch-invariant": int(not invariant["model"]["batch_invariant"]),
        "texts flip though the engine is batch-invariant": sum(
            each["texts_that_differ"] for each in invariant["generation"]["flips"].values()
        ),
        "greedy steps with more than one blocking copy": sum(
            cell["blocking_copies"]["greedy"] > 1 for cell in invariant["steps"]["cells"]
        ),
    }
    speeds = {
        f"{setting}, {drafter}": {
            name: mode["generation"][setting][drafter]["tokens_per_second"]
            for name, mode in (("batch_invariant", invariant), ("fast", fast))
        }
        for setting in ("alone", "batch")
        for drafter in ("plain", "ngram")
    }
    return {
        "failures": {name: count for name, count in failures.items() if count},
        "tokens_per_second": speeds,
        "price_of_batch_invariance": {
            name: 1 - speed["batch_invariant"] / speed["fast"] for name, speed in speeds.items()
        },
        "flips_per_token_without_it": {
            name: each["flips_per_token"] for name, each in fast["generation"]["flips"].items()
        },
    }


def _count(checks: list[dict[str, Any]], name: str) -> int:
    """How many checks failed."""
    return sum(not each[name] for each in checks)


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device on this machine, so nothing was checked", file=sys.stderr)
        return 2
    device = "cuda:0"
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "torch": torch.__version__,
        **describe_machine(),
        "attention": check_attention(device, [(700, 3), (30, 1), (255, 8), (1, 200)]),
        "products": check_products(device),
        "batch_invariant": check_model(options, device, True),
    }
    gc.collect()  # the first model and its pool
    torch.cuda.empty_cache()
    report["fast"] = check_model(options, device, False)
    report["summary"] = summarize(report)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failures = report["summary"]["failures"]
    print(
        f"{options.out}: {'; '.join(f'{name}: {count}' for name, count in failures.items()) or 'all agree'}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
