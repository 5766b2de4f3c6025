"""What is evaluated: prompts by task, the target, and drafters by what --drafters names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from angelspec_backend.core.config import DRAFTERS, NETWORK_DRAFTERS
from angelspec_backend.core.fields import InvalidRequest
from angelspec_backend.core.prompt import read_prompt
from angelspec_backend.drafters.base import Drafter
from angelspec_backend.drafters.draft_model import DraftModelDrafter, check_compatible
from angelspec_backend.drafters.lookup import LookupDrafter
from angelspec_backend.drafters.ngram import NgramDrafter
from angelspec_backend.drafters.served import ServedTarget, load_served
from angelspec_backend.drafters.spec import BLOCK_KINDS, DrafterSpec
from angelspec_backend.engine.loader import load_config, load_tokenizer, model_max_context
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.triton.tokenizer import HuggingFaceTokenizer
from evaluation_measure import ScoringRunner
from evaluation_serving import EvaluationError
from loadtest.task_sets import Messages, PromptError, load_prompts

BLOCK_SIZE = 16
DRAFT_TOKENS = 7
"""Draft tokens of drafters that were trained for no number of them."""
NGRAM_SIZES = 2, 4
"""Suffixes that the n-gram drafter looks up, as the server's default."""

MAX_PROMPT_TOKENS = 1 << 20

Tasks = dict[str, list[tuple[int, ...]]]
"""Token ids of the prompts of each task."""


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter as --drafters names it."""

    label: str  # of its figures; the kind, or the kind and more: dfly+lookup-step4000
    kind: str  # of core.config.DRAFTERS
    path: str = ""  # folder or Hugging Face id of the checkpoint; "" for ngram
    lookup: bool = False  # before its network is asked, as the server does it


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that serves, and how many draft tokens it is asked for."""

    choice: DrafterChoice
    drafter: Drafter
    num_draft_tokens: int
    spec: DrafterSpec | None = None  # of a trained drafter


def read_choice(text: str) -> DrafterChoice:
    """NAME, or NAME=FOLDER; a name is a kind of drafter, maybe with +lookup or a note: dfly-step4000.

    Raises:
        ValueError: no such kind, or the checkpoint is missing or needless.
    """
    label, _, path = text.partition("=")
    kind, plus, more = label.partition("-")[0].partition("+")
    if kind not in DRAFTERS or (plus and (more != "lookup" or kind not in NETWORK_DRAFTERS)):
        raise ValueError(
            f"'{label}' is no drafter; allowed: {', '.join(DRAFTERS)}, those with a network also as in "
            "dfly+lookup, and with a note as in dfly-step4000"
        )
    if kind == "ngram" and path:
        raise ValueError(f"ngram has no checkpoint, got '{path}'")
    if kind != "ngram" and not path:
        raise ValueError(f"'{label}' needs a checkpoint: {label}=FOLDER or {label}=HUGGING_FACE_ID")
    return DrafterChoice(label, kind, path, bool(plus))


def load_tasks(sources: Sequence[str], target: str, per_set: int, seed: int, max_tokens: int) -> Tasks:
    """Prompts by task: as many of each, the same for the same seed.

    sources: see ``load_prompts``; per_set: prompts of a task, fewer if one has fewer that leave room for
    max_tokens in the target's context.

    Raises:
        PromptError, LoadError: prompts or the tokenizer cannot be read.
    """
    reader, tasks = PromptReader(target), Tasks()
    longest = reader.context - max_tokens
    for prompt in load_prompts(
        *sources, keep=lambda prompt: len(reader.read(prompt.messages)) <= longest, seed=seed
    ):
        tasks.setdefault(prompt.task, []).append(reader.read(prompt.messages))
    return {task: prompts[:per_set] for task, prompts in tasks.items()}


class PromptReader:
    """Reads prompts as the server does, by the target's chat template where it has one."""

    def __init__(self, target: str) -> None:
        """Raises LoadError."""
        tokenizer = load_tokenizer(target)
        self._tokenizer, self._is_chat = HuggingFaceTokenizer(tokenizer), bool(tokenizer.chat_template)
        config = load_config(target)
        self.context = model_max_context(config)
        self._vocab_size = int(config.get_text_config().vocab_size)

    def read(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of a prompt.  Raises PromptError."""
        if self._is_chat:
            values = {"messages": json.dumps(messages)}
        else:
            values = {"text_input": "\n".join(message["content"] for message in messages)}
        try:  # a prompt that is too long is left out later, not refused
            return read_prompt(values, self._tokenizer, MAX_PROMPT_TOKENS, self._vocab_size)[1]
        except InvalidRequest as error:
            raise PromptError(f"a prompt is refused: {error}") from None


def load_target(path: str, dtype: torch.dtype, device: str, num_rows: int, longest: int) -> ScoringRunner:
    """The target with a KV pool for num_rows sequences of ``longest`` tokens and what drafters write behind.

    Raises:
        LoadError: it cannot be served.
    """
    runner = ScoringRunner.from_pretrained(
        path,
        dtype=dtype,
        device=device,
        num_blocks=1 + num_rows * -(-(longest + 4 * BLOCK_SIZE) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    )
    assert isinstance(runner, ScoringRunner)
    return runner


def load_drafter(
    choice: DrafterChoice, target: str, runner: ModelRunner, num_rows: int, num_draft_tokens: int | None
) -> LoadedDrafter:
    """Load a drafter for a target.

    num_draft_tokens: None for what it was trained for.  A block drafter gives no more than its block.

    Raises:
        LoadError, EvaluationError: it cannot be loaded, or does not fit the target.
    """
    device, blocks, size = str(runner.device), runner.pool.num_blocks, runner.pool.block_size
    drafter: Drafter
    spec: DrafterSpec | None = None
    if choice.kind == "ngram":
        drafter = NgramDrafter(*NGRAM_SIZES, num_rows)
    elif choice.kind == "draft_model":
        check_compatible(target, choice.path)
        drafter = DraftModelDrafter(
            ModelRunner.from_pretrained(
                choice.path, dtype=runner.dtype, device=device, num_blocks=blocks, block_size=size
            )
        )
    else:
        served = ServedTarget(target, runner.dtype, device, blocks, size)
        drafter = network = load_served(choice.kind, choice.path, served)
        spec = network.network.spec  # type: ignore[attr-defined]  # both classes of trained drafters have it
        if choice.lookup:
            drafter = LookupDrafter(network, NGRAM_SIZES[1], blocks, size, spec.most_drafts)
    info = drafter.info.checked(runner.num_layers, runner.hidden_size * runner.dtype.itemsize)
    if info.failure:
        raise EvaluationError(f"{choice.label}: {info.failure}")
    trained = spec.num_drafts if spec else 0
    count = num_draft_tokens or (DRAFT_TOKENS if choice.lookup else trained) or DRAFT_TOKENS
    longest = trained if spec and spec.kind in BLOCK_KINDS and not choice.lookup else count
    return LoadedDrafter(choice, drafter, min(count, longest), spec)
