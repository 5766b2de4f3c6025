"""Types of command-line options that the measuring scripts share."""

from __future__ import annotations

import argparse


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
