"""Validation at the door: the fields of a request become one frozen GenerationRequest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from angelspec_backend.core import fields as read
from angelspec_backend.core.config import EngineConfig
from angelspec_backend.core.fields import InvalidRequest
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.prompt import Tokenizer, read_prompt

MAX_DRAFT_TOKENS = 32
MAX_TEMPERATURE = 100.0
MAX_STOP_WORDS = 16
MAX_STOP_CHARACTERS = 256

_INT32_MAX = 2**31 - 1


class Unavailable(RuntimeError):
    """A good request that cannot be served now; the message is for the client."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn from the target's distribution."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # 0 <= seed < 2**64


@dataclass(frozen=True)
class GenerationRequest:
    """A request that can be served as it is: every value is in range, every default filled in."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int  # prompt and output together fit in the context
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    echo: bool = False  # the output text begins with the prompt text
    prompt_text: str = ""
    drafter: int = NO_DRAFTER
    num_draft_tokens: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What the server allows, and its defaults for what a request leaves out."""

    max_context: int  # prompt and output tokens together
    vocab_size: int
    drafter_names: tuple[str, ...] = ()
    default_drafter: str = "none"
    default_num_draft_tokens: int = 0
    default_max_tokens: int = 256
    failures: Mapping[str, str] = field(default_factory=dict)  # why drafters could not be loaded, by name

    @staticmethod
    def from_config(
        config: EngineConfig, max_context: int, vocab_size: int, failures: Mapping[str, str] | None = None
    ) -> RequestLimits:
        """max_context and vocab_size are the target's own; the configuration may lower the context."""
        return RequestLimits(
            max_context=min(max_context, config.max_context or max_context),
            vocab_size=vocab_size,
            drafter_names=config.drafter_names,
            default_drafter=config.drafter,
            default_num_draft_tokens=config.num_draft_tokens,
            default_max_tokens=config.max_tokens,
            failures=failures or {},
        )


def parse_request(
    fields: Mapping[str, NDArray[Any]],
    limits: RequestLimits,
    tokenizer: Tokenizer,
    timeout_s: float | None = None,
) -> GenerationRequest:
    """Check every field of a request.

    fields: arrays by the names of fields.INPUT_TYPES; strings as bytes or str.

    Raises:
        InvalidRequest: a field or a combination of fields is wrong; the text is for the client.
        Unavailable: it names a drafter that could not be loaded.
    """
    values = read.read_fields(fields)
    sampling = _sampling(values, limits)  # cheap checks first: tokenizing may take a while
    stop = _stop_words(values)
    max_tokens = read.integer(values, "max_tokens", 1, _INT32_MAX) or limits.default_max_tokens
    drafter, num_draft_tokens = _speculation(values, limits)
    ignore_eos = read.flag(values, "ignore_eos", False)
    stream = read.flag(values, "stream", False)
    echo = not read.flag(values, "exclude_input_in_output", True)
    prompt_text, prompt_token_ids = read_prompt(values, tokenizer, limits.max_context, limits.vocab_size)
    if echo and not prompt_text:
        prompt_text = tokenizer.decode(prompt_token_ids)
    return GenerationRequest(
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        # Clamped, not refused: the HTTP endpoint turns 99999999999 into 1215752191.
        max_tokens=min(max_tokens, limits.max_context - len(prompt_token_ids)),
        stop=stop,
        ignore_eos=ignore_eos,
        stream=stream,
        echo=echo,
        prompt_text=prompt_text,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        timeout_s=timeout_s,
    )


def draw_seed() -> int:
    """A random seed of 48 bits: it survives JSON readers that hold every number as a double."""
    return int.from_bytes(os.urandom(6), "little")


def _sampling(values: Mapping[str, Any], limits: RequestLimits) -> SamplingParams:
    temperature = read.number(values, "temperature", 0.0, MAX_TEMPERATURE)
    top_k = read.integer(values, "top_k", -1, _INT32_MAX) or 0
    top_p = read.number(values, "top_p", 0.0, 1.0, open_low=True)
    min_p = read.number(values, "min_p", 0.0, 1.0)
    seed = read.integer(values, "seed", 0, 2**64 - 1)
    for name in ("frequency_penalty", "presence_penalty"):
        if values.get(name):  # frontends always send them, as 0
            raise InvalidRequest(f"{name} is not supported; allowed: 0, got {read.show(values[name])}")
    return SamplingParams(
        temperature=0.0 if temperature is None else temperature,
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        top_p=1.0 if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        seed=draw_seed() if seed is None else seed,
    )


def _stop_words(values: Mapping[str, Any]) -> tuple[str, ...]:
    words = values.get("stop_words") or ()
    if not (isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)):
        raise InvalidRequest(f"stop_words must be strings, got {read.show(words)}")
    if len(words) > MAX_STOP_WORDS:
        raise InvalidRequest(f"stop_words must be at most {MAX_STOP_WORDS} strings, got {len(words)}")
    for word in words:
        if not 1 <= len(word) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop_words must be of 1..{MAX_STOP_CHARACTERS} characters each, got one of {len(word)}"
            )
        read.require_unicode("stop_words", word)
    return tuple(dict.fromkeys(words))


def _speculation(values: Mapping[str, Any], limits: RequestLimits) -> tuple[int, int]:
    """(drafter index or NO_DRAFTER, draft tokens per step); either being off turns both off.

    Whoever asks for a drafter by name learns that there is none; for others it would only have saved time.
    """
    name = values.get("drafter", limits.default_drafter)
    wanted = read.integer(values, "num_draft_tokens", 0, MAX_DRAFT_TOKENS)
    num_draft_tokens = limits.default_num_draft_tokens if wanted is None else wanted
    if name != "none" and name not in limits.drafter_names:
        allowed = ", ".join(("none", *limits.drafter_names))
        raise InvalidRequest(f"drafter {read.show(name)} is not loaded; allowed: {allowed}")
    if "drafter" in values and name in limits.failures:
        raise Unavailable(f"drafter '{name}' could not be loaded: {limits.failures[name]}")
    if name in ("none", *limits.failures) or num_draft_tokens == 0:
        return NO_DRAFTER, 0
    return limits.drafter_names.index(name), num_draft_tokens
