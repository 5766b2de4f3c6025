"""The prompt of a request: text, token ids or chat messages become token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from angelspec_backend.core.fields import InvalidRequest, parse_json, require_unicode, show

MAX_CHARACTERS_PER_TOKEN = 32
"""Bounds the text that is tokenized at all: real text has about 4 characters per token."""

_PROMPT_FIELDS = ("text_input", "input_ids", "messages")


class Tokenizer(Protocol):
    """What is needed of the target's tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; with add_special_tokens a BOS the text begins with is not added again."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The chat template's text for messages, up to where the answer begins."""


def read_prompt(
    values: Mapping[str, Any], tokenizer: Tokenizer, max_context: int, vocab_size: int
) -> tuple[str, tuple[int, ...]]:
    """(text, token ids) of the one prompt field that was given; the text of input_ids is empty.

    Raises:
        InvalidRequest: not exactly one prompt field, or the prompt is empty, too long or malformed.
    """
    given = [name for name in _PROMPT_FIELDS if name in values]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidRequest(f"exactly one of text_input, input_ids, messages must be given, got {got}")
    name = given[0]
    if name == "input_ids":
        text, token_ids = "", values[name]
    else:
        text, token_ids = _tokenize(name, values[name], tokenizer, max_context)
    _check_token_ids(name, token_ids, max_context, vocab_size)
    return text, tuple(token_ids)


def _tokenize(name: str, value: str, tokenizer: Tokenizer, max_context: int) -> tuple[str, list[int]]:
    _check_characters(name, value, max_context)
    if name == "text_input":
        return value, tokenizer.encode(value, add_special_tokens=True)
    text = require_unicode(name, tokenizer.render(_messages(value)))
    _check_characters(name, text, max_context)
    return text, tokenizer.encode(text, add_special_tokens=False)  # the template writes its own


def _check_token_ids(name: str, token_ids: Sequence[int], max_context: int, vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequest(f"the prompt is empty: {name} holds no tokens")
    if len(token_ids) >= max_context:
        raise InvalidRequest(
            f"prompt of {len(token_ids)} tokens, context {max_context}: "
            f"at most {max_context - 1} leave room for an answer"
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} must be in 0..{vocab_size - 1}, got token id {token_id}")


def _check_characters(name: str, text: str, max_context: int) -> None:
    allowed = max_context * MAX_CHARACTERS_PER_TOKEN
    if not text:
        raise InvalidRequest(f"the prompt is empty: {name} holds no characters")
    if len(text) > allowed:
        raise InvalidRequest(
            f"{name} of {len(text)} characters cannot fit the context of {max_context} tokens; "
            f"at most {allowed} are read"
        )


def _messages(text: str) -> list[dict[str, Any]]:
    messages = parse_json("messages", text)
    if not (isinstance(messages, list) and messages):
        raise InvalidRequest('messages must be a JSON list of {"role": …, "content": …}')
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}] must be an object, got {show(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = show(message.get(key))
                raise InvalidRequest(f"messages[{index}].{key} must be a string, got {found}")
    return messages
