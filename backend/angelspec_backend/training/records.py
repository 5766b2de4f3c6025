"""Conversations in JSON lines, in the forms that data sets come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
"""Other names of the roles, as ShareGPT writes them."""

Messages = list[dict[str, str]]


class RecordError(ValueError):
    """A data file cannot be read; the message says which line and why."""


def read_lines(path: Path, limit: int | None = None) -> list[tuple[str, Any]]:
    """(where, value) of every line that is not empty or null; of the first ``limit`` lines if given.

    Raises:
        RecordError: the file is missing, or a line is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines[:limit], 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RecordError(f"{path}:{number} is not JSON: {error}") from None
        if value is not None:
            found.append((f"{path}:{number}", value))
    return found


def read_conversations(path: Path) -> list[Messages]:
    """The messages of every line of a file, see ``read_messages``."""
    found = [read_messages(value, where) for where, value in read_lines(path)]
    if not found:
        raise RecordError(f"{path} holds no conversations")
    return found


def read_messages(record: Any, where: str) -> Messages:
    """Messages of {"prompt": text}, {"messages": [...]} or {"conversations": [...]}.

    Raises:
        RecordError: none of these, or a message without role or text.
    """
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return [{"role": "user", "content": record["prompt"]}]
        messages = record.get("messages", record.get("conversations"))
        if isinstance(messages, list) and messages:
            return [_message(message, where) for message in messages]
    raise RecordError(f'{where} must have "prompt", a text, or "messages" or "conversations", a list')


def _message(message: Any, where: str) -> dict[str, str]:
    if isinstance(message, dict):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": ROLES.get(role, role), "content": content}
    raise RecordError(f'{where}: every message must have "role" and "content" (or "from" and "value"), texts')
