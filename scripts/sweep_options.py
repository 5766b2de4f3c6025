"""The command line of the sweep over draft lengths."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_options import add_requests, counts, names, read_requests
from loadtest.task_sets import DEFAULT_PROMPTS
from sweep_report import Length, Limit

MAX_LENGTH = 32


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    drafter: str
    lengths: tuple[Length, ...]
    concurrency: tuple[int, ...]
    prompts: tuple[str, ...]  # files, folders, public sets
    requests: Mapping[int, int]  # per window, by concurrency
    windows: int
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int  # of the first request; every further one has the next
    timeout: float  # seconds per request
    target: str
    config: str  # YAML file with engine options; "": none
    server: str | None  # host:port of a running one with adaptive_drafts: false
    auto_server: str | None  # host:port of a running one that adapts
    limit: Limit
    out: Path | None
    picture: Path | None
    read: Path | None

    @property
    def longest(self) -> int | None:
        """The longest of the fixed lengths, which also bounds auto; None: the server's own bound."""
        return max((length for length in self.lengths if length), default=None)

    def settings(self) -> dict[str, Any]:
        """What decides the figures, for every line of results."""
        names = ("requests", "windows", "max_tokens", "ignore_eos", "temperature", "seed")
        prompts = [Path(source).name for source in self.prompts]
        return {"prompts": prompts, "target": Path(self.target).name} | {
            name: getattr(self, name) for name in names
        }


def draft_lengths(text: str) -> tuple[Length, ...]:
    """Different draft lengths: numbers, ranges and auto, separated by commas: 0-4,8,auto.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    found: list[Length] = []
    for part in names(text) or ("",):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first]
        if part == "auto":
            found.append(None)
        elif all(end.isdecimal() for end in ends) and int(first) <= int(ends[-1]) <= MAX_LENGTH:
            found += range(int(first), int(ends[-1]) + 1)
        else:
            raise argparse.ArgumentTypeError(
                f"must be numbers up to {MAX_LENGTH}, ranges and auto, as 0-4,8,auto; got '{text}'"
            )
    return tuple(dict.fromkeys(found))


def read_plan(arguments: Sequence[str], description: str) -> Plan:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--drafter", default="ngram", help="its name; options of --config say where its checkpoint is")
    add("--lengths", type=draft_lengths, default=draft_lengths("0-8,auto"), help="0-8,auto")
    add("--concurrency", type=counts, default=(1, 4, 8, 16, 32, 64), help="requests in flight: 1,4,8,16")
    add("--prompts", nargs="+", default=[str(DEFAULT_PROMPTS)], help="files, folders, public sets")
    add_requests(parser)
    add("--windows", type=int, default=3, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--ignore-eos", action="store_true", help="always generate --max-tokens")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--target", default="", help="id or folder; default: SmolLM2-135M-Instruct")
    add("--config", default="", metavar="FILE", help="YAML file with engine options of the servers")
    add("--server", metavar="HOST:PORT", help="HTTP of a running server with adaptive_drafts: false")
    add("--auto-server", metavar="HOST:PORT", help="HTTP of a running server that adapts")
    add("--max-p99-ms", type=float, help="the slowest requests may take so long")
    add("--max-p99-ratio", type=float, default=1.1, help="or so many times as long as in plain decoding")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    add("--picture", type=Path, help="draws a picture: .png, .svg or .pdf")
    add("--read", type=Path, metavar="FILE", help="measures nothing, shows the lines of an earlier run")
    values = vars(parser.parse_args(arguments))
    values["requests"] = read_requests(parser, values)
    if values["windows"] < 1:
        parser.error("--windows must be at least 1")
    limit = Limit(values.pop("max_p99_ms"), values.pop("max_p99_ratio"))
    return Plan(**values | {"prompts": tuple(values["prompts"])}, limit=limit)
