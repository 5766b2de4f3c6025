"""What the command lines of the measuring scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console


def names(text: str) -> tuple[str, ...]:
    """Different names separated by commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def counts(text: str) -> tuple[int, ...]:
    """Different positive numbers separated by commas.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    given = names(text)
    if not given or not all(name.isdecimal() and int(name) > 0 for name in given):
        raise argparse.ArgumentTypeError(f"must be positive numbers separated by commas, got '{text}'")
    return tuple(int(name) for name in given)


def sizes(text: str) -> tuple[int, ...]:
    """Positive numbers separated by commas, the same one more than once too.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    return tuple(number for part in text.split(",") for number in counts(part))


def window_sizes(given: Sequence[int], tiers: Sequence[int]) -> dict[int, int]:
    """How many requests a window has at each concurrency.

    given: one number for all, or one for each; none: max(16, 2 * concurrency).

    Raises:
        ValueError: it is another number of numbers.
    """
    if not given:
        return {tier: max(16, 2 * tier) for tier in tiers}
    if len(given) not in (1, len(tiers)):
        raise ValueError(
            f"--requests must be one number or {len(tiers)}, one for each --concurrency; got {len(given)}"
        )
    return dict(zip(tiers, tuple(given) * (len(tiers) if len(given) == 1 else 1), strict=True))


def add_requests(parser: argparse.ArgumentParser) -> None:
    """The option --requests, for window_sizes."""
    what = "per window: one number, or one for each concurrency; default max(16, 2 * concurrency)"
    parser.add_argument("--requests", type=sizes, default=(), help=what)


def read_requests(parser: argparse.ArgumentParser, values: dict[str, Any]) -> dict[int, int]:
    """window_sizes of parsed arguments; ends the program where they are wrong."""
    try:
        return window_sizes(values["requests"], values["concurrency"])
    except ValueError as error:
        parser.error(str(error))


def run_command(name: str, work: Callable[[], object], *errors: type[Exception]) -> int:
    """Do the work of a script; its exit status.  Expected errors are told in one line."""
    try:
        work()
    except errors as error:
        Console(stderr=True, highlight=False).print(f"{name}: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
