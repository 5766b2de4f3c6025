"""Options of evaluate_drafter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from angelspec_backend.core.params import MAX_DRAFT_TOKENS, MAX_TEMPERATURE
from benchmark_options import names
from evaluation_models import DrafterChoice, read_choice
from loadtest.task_sets import DEFAULT_PROMPTS

ROOT = Path(__file__).resolve().parent.parent
WALL_PROMPTS = 6


def drafters(text: str) -> tuple[DrafterChoice, ...]:
    """Type of --drafters."""
    try:
        choices = tuple(read_choice(each) for each in names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise argparse.ArgumentTypeError(
                f"'{label}' is there twice; tell them apart by a note: {label}-b"
            )
    return choices


def temperatures(text: str) -> tuple[float, ...]:
    """Type of --temperatures."""
    try:
        values = tuple(float(each) for each in names(text))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= MAX_TEMPERATURE for value in values):
        raise argparse.ArgumentTypeError(
            f"must be numbers from 0 (greedy) to {MAX_TEMPERATURE:g} separated by commas, got '{text}'"
        )
    return tuple(dict.fromkeys(values))


class Between:
    """Type of an option: a whole number within limits."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self._low <= int(text) <= self._high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {self._low} to {self._high}, got '{text}'"
            )
        return int(text)


def parse_arguments(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the program with a message when they are wrong."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafters",
        type=drafters,
        required=True,
        help="comma-separated: ngram, or KIND=FOLDER, or KIND-NOTE=FOLDER to compare several of a kind",
    )
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=[str(DEFAULT_PROMPTS)],
        help="JSONL files, folders of them, or names of public sets",
    )
    parser.add_argument("--per-set", type=Between(1, 1 << 20), default=8, help="prompts of a task")
    parser.add_argument("--max-tokens", type=Between(1, 1 << 20), default=128, help="of an answer")
    parser.add_argument("--temperatures", type=temperatures, default=(0.0, 1.0), help="default: 0,1")
    parser.add_argument(
        "--draft-tokens",
        type=Between(1, MAX_DRAFT_TOKENS),
        help="default: what each drafter was trained for; a block drafter gives no more than its block",
    )
    parser.add_argument(
        "--adaptive", action="store_true", help="shorten drafts that do not pay, as the server does"
    )
    parser.add_argument("--rows", type=Between(1, 1024), default=8, help="answers computed at a time")
    parser.add_argument(
        "--wall",
        type=Between(1, 1 << 20),
        nargs="?",
        const=WALL_PROMPTS,
        default=0,
        metavar="PROMPTS",
        help=f"time so many prompts one at a time, {WALL_PROMPTS} if no number is given",
    )
    parser.add_argument("--seed", type=Between(0, 2**32 - 1), default=0, help="of prompts and sampling")
    parser.add_argument("--threads", type=Between(1, 1024), default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args(arguments)
