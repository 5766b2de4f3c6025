"""One training conversation: which turns the target is asked for, and the record that comes of them.

The user turns are given, or sampled from the target behind a short opener; the assistant turns are always
the target's own.  A conversation depends on nothing but its settings, its seed and its index.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from angelspec_backend.core.params import GenerationRequest, SamplingParams
from angelspec_backend.engine.loader import Tokenizer
from angelspec_backend.training.openers import FOLLOW_UPS, OPENERS

_MARK = "\u2581mark\u2581"  # stands for the content of a turn while a chat template is rendered
_MIN_USER_CHARACTERS = 8


class TemplateError(ValueError):
    """The target's chat template cannot be used to make conversations."""


@dataclass(frozen=True)
class ConversationSettings:
    """What all conversations of a data set have in common.  Sizes in tokens."""

    seed: int = 0
    max_tokens: int = 384  # of an assistant turn
    max_user_tokens: int = 96  # of a sampled user turn
    max_length: int = 1024  # of the conversation
    follow_up: float = 0.25  # probability of a second turn
    min_user_temperature: float = 0.7  # of a sampled user turn
    max_user_temperature: float = 1.0
    greedy: float = 0.5  # share of conversations with greedy answers
    min_temperature: float = 0.7  # of the others' answers
    max_temperature: float = 1.0


@dataclass(frozen=True)
class Turn:
    """The tokens of one generated turn, its end token included, and whether the target ended it itself."""

    token_ids: list[int]
    ended: bool


Request = Generator[GenerationRequest, Turn, "dict[str, Any] | None"]
"""A conversation in progress: yields requests, is sent their turns, returns its record or None."""


class ChatFormat:
    """Conversations as token ids, by the target's chat template."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        """Raises TemplateError when there is no template or it hides the content of a turn."""
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError("this target has no chat template, so no conversations can be made with it")
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.user_prefix([])

    def render(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        """The template's text; with ``answer`` up to where the next answer begins."""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))

    def encode(self, text: str) -> list[int]:
        """Token ids of template text, which brings its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def user_prefix(self, messages: list[dict[str, str]]) -> str:
        """The text before the content of the next user turn."""
        before, mark, _ = self.render([*messages, {"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark:
            raise TemplateError("the chat template does not write the content of a user turn as it is")
        return before


def sampled(
    index: int, chat: ChatFormat, settings: ConversationSettings, excluded: frozenset[str] = frozenset()
) -> Request:
    """A conversation whose user turns the target makes up, behind openers."""
    rng = random.Random(f"{settings.seed}/{index}")
    task = rng.choice(sorted(OPENERS))
    openers = [rng.choice(OPENERS[task])]
    if rng.random() < settings.follow_up:
        openers.append(rng.choice(FOLLOW_UPS))
    record = _Record(index, chat, settings, rng, task)
    for opener in openers:
        prompt = chat.encode(chat.user_prefix(record.messages) + opener)
        temperature = rng.uniform(settings.min_user_temperature, settings.max_user_temperature)
        sampling = SamplingParams(temperature=temperature, seed=rng.getrandbits(64))
        turn = yield GenerationRequest(tuple(prompt), sampling, settings.max_user_tokens)
        content = (opener + chat.decode(turn.token_ids)).strip()
        if len(content) < _MIN_USER_CHARACTERS or normalized(content) in excluded:
            break
        if not (yield from record.answer(content)):
            break
    return record.finish()


def regenerated(
    index: int, chat: ChatFormat, settings: ConversationSettings, messages: list[dict[str, str]]
) -> Request:
    """A conversation with given user turns; given answers are replaced by the target's own."""
    rng = random.Random(f"{settings.seed}/{index}")
    record = _Record(index, chat, settings, rng, "prompts")
    for message in messages:
        if message["role"] == "system":
            record.messages.append(message)
        elif message["role"] == "user" and not (yield from record.answer(message["content"])):
            break
    return record.finish()


def normalized(text: str) -> str:
    """Text for comparisons: lower case, single spaces."""
    return " ".join(text.lower().split())


class _Record:
    """The conversation so far: its messages, and the token ids exactly as the target saw them."""

    def __init__(
        self, index: int, chat: ChatFormat, settings: ConversationSettings, rng: random.Random, task: str
    ) -> None:
        self.index, self.chat, self.settings, self.rng, self.task = index, chat, settings, rng, task
        warm = rng.uniform(settings.min_temperature, settings.max_temperature)
        # spread evenly over the indices: with a half, every second one
        self.temperature = 0.0 if index * settings.greedy % 1 < settings.greedy else round(warm, 3)
        self.messages: list[dict[str, str]] = []
        self.token_ids: list[int] = []
        self.spans: list[list[int]] = []  # [start, end) of the assistant turns, end tokens included
        self.text = ""  # what token_ids say

    def answer(self, content: str) -> Generator[GenerationRequest, Turn, bool]:
        """Add a user turn and the target's answer; whether the conversation may go on."""
        chat, messages = self.chat, [*self.messages, {"role": "user", "content": content}]
        text = chat.render(messages)
        if not text.startswith(self.text):
            return False  # a template that rewrites earlier turns
        prompt = [*self.token_ids, *chat.encode(text[len(self.text) :])]
        room = self.settings.max_length - len(prompt)
        if room < 1:
            return False
        sampling = SamplingParams(temperature=self.temperature, seed=self.rng.getrandbits(64))
        turn = yield GenerationRequest(tuple(prompt), sampling, min(self.settings.max_tokens, room))
        self.token_ids = [*prompt, *turn.token_ids]
        self.spans.append([len(prompt), len(self.token_ids)])
        answer = chat.decode(turn.token_ids)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.text = text + str(chat.tokenizer.decode(turn.token_ids))
        return turn.ended

    def finish(self) -> dict[str, Any] | None:
        """The line of the data set; None without an answer."""
        if not self.spans:
            return None
        return {
            "index": self.index,
            "seed": self.settings.seed,
            "task": self.task,
            "temperature": self.temperature,
            "messages": self.messages,
            "token_ids": self.token_ids,
            "assistant_spans": self.spans,
        }
