"""Prompts by task, from JSONL files, folders of them, or public sets by name; all in equal shares.

One prompt per line, in one of these forms; other keys are ignored:

    {"prompt": "Why is the sky blue?"}
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}, …]}
    {"conversations": [{"from": "human", "value": "Why is the sky blue?"}, …]}      (ShareGPT)
    {"turns": ["Why is the sky blue?", …]}                                          (MT-Bench)

Of a conversation everything up to its last user message is the prompt: what follows is an answer.  Of turns
it is the first: the others need the model's own answers.  A prompt's task is its "task", else the name of
its file.  hub_sets lists the public sets that are known by name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import hub_sets
from loadtest.hub_sets import HUB_SETS, PromptError

Messages = list[dict[str, str]]
"""Chat messages, role and content: the target's chat template makes the text."""

DEFAULT_PROMPTS = Path(__file__).with_name("prompts")

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


@dataclass(frozen=True)
class Prompt:
    """One request's input and the task it belongs to."""

    task: str
    messages: Messages


def load_prompts(
    *sources: str | Path, keep: Callable[[Prompt], bool] = lambda prompt: True, seed: int = 0
) -> list[Prompt]:
    """The prompts of files, of folders' *.jsonl files and of public sets, the tasks taking turns.

    The order is random but the same for the same seed.  Each task contributes as many prompts as the
    smallest has, so that the first n prompts are a fair sample for every n.  keep: which ones count.

    Raises:
        PromptError: no prompts there, or a line that is none.
    """
    tasks: dict[str, list[Prompt]] = {}
    for source in sources:
        for prompt in read_source(source):
            tasks.setdefault(prompt.task, []).append(prompt)
    groups = []
    for task, prompts in tasks.items():
        group = [prompt for prompt in prompts if keep(prompt)]
        if not group:
            raise PromptError(f"the task '{task}' holds no prompts that are short enough")
        random.Random(seed).shuffle(group)
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
        return sum(len(tokenizer.encode(message["content"]).ids) for message in prompt.messages) <= max_tokens

    return check


def read_source(source: str | Path) -> Iterator[Prompt]:
    """All prompts of one file, folder or public set, in their order there.  Raises PromptError."""
    path, task = Path(source), hub_sets.find(str(source))
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise PromptError(f"{path} holds no *.jsonl files")
        for file in files:
            yield from read_file(file)
    elif task is not None and not path.exists():
        yield from (Prompt(task, [_user(text)]) for text in hub_sets.read(task))
    else:
        yield from read_file(path)


def read_file(file: Path) -> list[Prompt]:
    """The prompts of a JSONL file.  Raises PromptError."""
    try:
        # Not splitlines: JSON may hold characters that Unicode counts as line ends.
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        known = ", ".join(HUB_SETS)
        raise PromptError(f"cannot read {file}: no such file, nor a public set ({known})") from None
    except OSError as error:
        raise PromptError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"cannot read {file}: it is not UTF-8 text ({error.reason})") from None
    prompts = [read_prompt(line, f"{file}:{n}", file.stem) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{file} holds no prompts")
    return prompts


def read_prompt(line: str, where: str, task: str) -> Prompt:
    """The prompt of one line.  where: for errors; task: of lines that do not name one.

    Raises:
        PromptError: the line is none of the forms above.
    """
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise PromptError(f"{where} must be a JSON object, got {line[:40]}")
    if isinstance(record.get("task"), str):
        task = record["task"]
    match record:
        case {"prompt": str(text)} | {"turns": [str(text), *_]}:
            return Prompt(task, [_user(text)])
        case {"messages": list(messages)}:
            return Prompt(task, _conversation(messages, "role", "content", where))
        case {"conversations": list(messages)}:
            return Prompt(task, _conversation(messages, "from", "value", where))
    raise PromptError(
        f'{where} must have "prompt", a text, or "messages", "conversations" or "turns", a list; '
        f"it has {', '.join(record) or 'nothing'}"
    )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _conversation(messages: Sequence[Any], role: str, content: str, where: str) -> Messages:
    """Messages with the keys role and content, up to the last one of the user."""
    read: Messages = []
    for index, message in enumerate(messages):
        fields: dict[str, Any] = message if isinstance(message, dict) else {}
        known = _ROLES.get(str(fields.get(role)))
        if known is None or not isinstance(fields.get(content), str):
            raise PromptError(
                f'{where}: message {index} must have "{role}", one of {", ".join(_ROLES)}, '
                f'and "{content}", a text'
            )
        read.append({"role": known, "content": fields[content]})
    while read and read[-1]["role"] != "user":
        read.pop()
    if not read:
        raise PromptError(f"{where} holds no message of the user")
    return read
