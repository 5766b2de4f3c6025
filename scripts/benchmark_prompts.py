"""Prompts of the benchmark: JSON lines in a file, or in several files in equal shares."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompt = list[dict[str, str]]
"""Chat messages: the target's chat template makes the text."""

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")
_SHUFFLE_SEED = 0


class PromptError(ValueError):
    """The prompts cannot be read; the message says which line and why."""


def load_prompts(*paths: Path, keep: Callable[[Prompt], bool] = bool) -> list[Prompt]:
    """The prompts of files, and of directories' *.jsonl files, taking turns.

    The order is random but always the same.  Of several files each contributes as many prompts as the
    smallest has, so that the first n prompts are a fair sample for every n.  keep: which ones count.

    Raises:
        PromptError: no prompts there, or a line that is none.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise PromptError(f"{path} holds no *.jsonl files")
        files += found
    groups = []
    for file in files:
        group = [prompt for prompt in _read_file(file) if keep(prompt)]
        if not group:
            raise PromptError(f"{file} holds no prompts that are short enough")
        random.Random(_SHUFFLE_SEED).shuffle(group)
        groups.append(group)
    return [prompt for turn in zip(*groups, strict=False) for prompt in turn]


def fits(tokenizer_dir: Path, max_tokens: int) -> Callable[[Prompt], bool]:
    """Whether the contents of a prompt's messages have at most so many tokens, the template not counted.

    Raises:
        PromptError: the folder holds no tokenizer.json.
    """
    from tokenizers import Tokenizer

    file = tokenizer_dir / "tokenizer.json"
    if not file.is_file():
        raise PromptError(f"{tokenizer_dir} holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))

    def check(prompt: Prompt) -> bool:
        return sum(len(tokenizer.encode(message["content"]).ids) for message in prompt) <= max_tokens

    return check


def _read_file(file: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptError(f"cannot read {file}: {error.strerror}") from None
    prompts = [read_prompt(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{file} holds no prompts")
    return prompts


def read_prompt(line: str, where: str) -> Prompt:
    """The messages of one line: {"prompt": text} or {"messages": [...]}; other keys are ignored."""
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is not JSON: {error}") from None
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        return record["messages"]
    raise PromptError(f'{where} must be an object with "prompt", a text, or "messages", a list')
