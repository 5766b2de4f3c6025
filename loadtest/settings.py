"""The options of a load test: on Locust's command line, in its web UI, and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.task_sets import DEFAULT_PROMPTS

DEFAULT_TIERS = "1,4,8,16,32,64"
SERVERS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
SERVERS_DRAFT_TOKENS = -1


class SettingsError(ValueError):
    """An option has a value that is not allowed; the message says which."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options.  Their types are simple ones, since the web UI edits them as text."""
    add = parser.add_argument_group("load test of a language model").add_argument
    add("--protocol", choices=list(SERVERS), default="grpc", help="streams over gRPC or HTTP (SSE)")
    add("--prompts", default=str(DEFAULT_PROMPTS), help="files, folders or public sets, between commas")
    add("--seed", type=int, default=0, help="of the order of the prompts and of the first request")
    add("--max-tokens", type=int, default=128, help="tokens of an answer")
    add("--ignore-eos", action="store_true", help="always generate all of them")
    add("--min-expected-tokens", type=int, default=0, help="fewer fail; 0: all with --ignore-eos, else 1")
    add("--temperature", type=float, default=0.0)
    add("--drafter", default="", help="none for plain decoding; empty: the server's")
    add("--num-draft-tokens", type=int, default=SERVERS_DRAFT_TOKENS, help="-1: the server's")
    add("--request-timeout", type=float, default=600.0, help="seconds")
    add("--tiers", default=DEFAULT_TIERS, help="numbers of users, one after the other")
    add("--tier-seconds", type=float, default=60.0, help="how long each of them is measured")
    add("--settle-seconds", type=float, default=10.0, help="how long each of them runs before that")
    add("--results", default="", help="file to which one JSON line per tier is appended")


@dataclass(frozen=True)
class Settings:
    """A load test as it was asked for."""

    protocol: str  # grpc or http
    prompts: tuple[str, ...]
    seed: int
    max_tokens: int
    ignore_eos: bool
    min_expected_tokens: int
    temperature: float
    drafter: str | None  # None: the server's
    num_draft_tokens: int | None
    request_timeout: float
    tiers: tuple[int, ...]
    tier_seconds: float
    settle_seconds: float
    results: Path | None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Settings:
        """The settings in parsed options.

        Raises:
            SettingsError: a value is not allowed.
        """
        values = {name: options[name] for name in cls.__dataclass_fields__}
        values["tiers"] = tuple(_count(text) for text in _items(options["tiers"]))
        values["prompts"] = tuple(_items(options["prompts"]))
        values["drafter"] = options["drafter"] or None
        values["results"] = Path(options["results"]) if options["results"] else None
        if options["num_draft_tokens"] == SERVERS_DRAFT_TOKENS:
            values["num_draft_tokens"] = None
        values["min_expected_tokens"] = options["min_expected_tokens"] or (
            options["max_tokens"] if options["ignore_eos"] else 1
        )
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.protocol not in SERVERS:
            raise SettingsError(f"protocol must be one of {', '.join(SERVERS)}, got '{self.protocol}'")
        if not self.tiers or not self.prompts:
            raise SettingsError("tiers and prompts must not be empty")
        for name, least in (("max_tokens", 1), ("tier_seconds", 1), ("settle_seconds", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise SettingsError(
                    f"{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}"
                )
        if self.min_expected_tokens > self.max_tokens:
            raise SettingsError(
                f"min-expected-tokens must be at most max-tokens, {self.max_tokens}, "
                f"got {self.min_expected_tokens}"
            )

    def request_options(self, number: int) -> dict[str, Any]:
        """The options of the request of that number."""
        return {
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "seed": self.seed + number,
            "drafter": self.drafter,
            "num_draft_tokens": self.num_draft_tokens,
        }


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(f"tiers must be positive numbers between commas, got '{text}'")
    return int(text)
