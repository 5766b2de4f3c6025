"""What the command lines of the measuring scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

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
