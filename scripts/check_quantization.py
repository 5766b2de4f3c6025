"""Compare a target with 8-bit weights with the same target in bf16: quality and speed, side by side.

    python scripts/check_quantization.py [--target FOLDER] [--prompts FILE] [--tokens 32] [--rows 1,8,64]

Perplexity is that of the prompts' text.  Agreement is the share of the tokens of bf16's greedy answers that
the quantized target would choose too, each after the same text.  A step is one token for every row after a
context of 128 tokens; steps of both targets alternate, and the medians are shown.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.loader import Tokenizer, load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from benchmark_engine import ROOT
from benchmark_options import counts
from benchmark_steps import BLOCK_SIZE, make_step, median_seconds
from loadtest.task_sets import DEFAULT_PROMPTS, Messages, load_prompts

CONTEXT = 128
Tokens = NDArray[np.int32]


def logits_of(runner: ModelRunner, tokens: Tokens, start: int = 0, block_size: int = BLOCK_SIZE) -> Tensor:
    """Logits behind every token from ``start`` on, the earlier ones being cached: [n, vocab_size]."""
    blocks = -(-len(tokens) // block_size)
    row = np.zeros(1, ROW)
    row["num_computed"], row["num_tokens"], row["sample"], row["num_blocks"] = start, 1, 1, blocks
    new, table = tokens[start:], np.arange(1, 1 + blocks, dtype=np.int32)
    drafts = DraftOutput.of(new[1:], np.array([len(new) - 1], np.int32))
    batch = pack(row, new[:1], drafts, table, block_size, runner.device)
    return runner.forward(batch).float()


def greedy_answer(runner: ModelRunner, prompt: Tokens, length: int) -> Tokens:
    """The prompt and what the model says, up to its end of text.  prompt: [n] -> [n + at most length]"""
    text = prompt
    for start in (0, *range(len(prompt), len(prompt) + length - 1)):
        token = int(logits_of(runner, text, start)[-1].argmax())
        text = np.append(text, np.int32(token))
        if token in runner.eos_token_ids:
            break
    return text


def perplexity(runner: ModelRunner, texts: list[Tokens]) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each text."""
    losses = [
        torch.nn.functional.cross_entropy(
            logits_of(runner, text)[:-1], torch.from_numpy(text[1:]).long(), reduction="none"
        )
        for text in texts
    ]
    return float(torch.cat(losses).mean().exp())


def agreement(runner: ModelRunner, answers: list[Tokens], prompts: list[Tokens]) -> tuple[int, int]:
    """(tokens of the answers that this model would choose too, all tokens of the answers)"""
    same = total = 0
    for answer, prompt in zip(answers, prompts, strict=True):
        chosen = logits_of(runner, answer)[len(prompt) - 1 : -1].argmax(dim=-1).numpy()
        same += int((chosen == answer[len(prompt) :]).sum())
        total += len(chosen)
    return same, total


def step_milliseconds(runners: list[ModelRunner], rows: int, repeats: int) -> list[float]:
    """Median time of an engine step of ``rows`` sequences, per runner."""
    step, drafts = make_step(rows, 1, CONTEXT, runners[0].vocab_size, 0.0)
    engines = [TargetEngine(runner) for runner in runners]
    steps: list[Callable[[], Any]] = [functools.partial(each.step, step, drafts) for each in engines]
    return [seconds * 1e3 for seconds in median_seconds(steps, repeats)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="as for benchmark.py")
    parser.add_argument("--tokens", type=int, default=32, help="longest greedy answer")
    parser.add_argument("--rows", type=counts, default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=25)
    return parser.parse_args()


def token_ids(tokenizer: Tokenizer, messages: list[Messages]) -> tuple[list[Tokens], list[Tokens]]:
    """Of each prompt: its plain text, and the text that the chat template makes of it."""
    plain, asked = [], []
    for each in messages:
        text = "\n".join(message["content"] for message in each)
        chat: Any = tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True)
        plain.append(np.array(tokenizer(text)["input_ids"], np.int32))
        asked.append(np.array(tokenizer(chat, add_special_tokens=False)["input_ids"], np.int32))
    return plain, asked


def main() -> None:
    options = parse_arguments()
    messages = [prompt.messages for prompt in load_prompts(options.prompts)]
    plain, prompts = token_ids(load_tokenizer(options.target), messages)
    longest = max(map(len, prompts)) + options.tokens
    needed = max(longest // BLOCK_SIZE + 1, max(options.rows) * (CONTEXT // BLOCK_SIZE + 1))
    exact, rounded = (
        ModelRunner.from_pretrained(
            options.target, num_blocks=needed + 1, block_size=BLOCK_SIZE, quantization=quantization
        )
        for quantization in ("none", "int8")
    )
    answers = [greedy_answer(exact, prompt, options.tokens) for prompt in prompts]
    table = Table(title=f"{len(prompts)} prompts, {torch.get_num_threads()} threads")
    for column in ("", "bf16", "int8"):
        table.add_column(column, justify="right")
    table.add_row("perplexity", *(f"{perplexity(runner, plain):.3f}" for runner in (exact, rounded)))
    shares = [agreement(runner, answers, prompts) for runner in (exact, rounded)]
    table.add_row("greedy tokens as bf16", *(f"{same} of {total}" for same, total in shares))
    for rows in options.rows:
        times = step_milliseconds([exact, rounded], rows, options.repeats)
        table.add_row(f"step, {rows} rows, ms", *(f"{time:.2f}" for time in times))
    Console().print(table)


if __name__ == "__main__":
    main()
