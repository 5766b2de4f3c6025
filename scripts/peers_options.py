"""The command line of the comparison with other servers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_options import add_requests, counts, read_requests
from loadtest.task_sets import DEFAULT_PROMPTS
from peers_servers import PeerError, PeerServer, parse_server


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    servers: tuple[PeerServer, ...]  # the first is compared with the others
    prompts: tuple[Path, ...]
    tokenizer: Path | None  # folder; None: prompts of any length
    max_prompt_tokens: int
    concurrency: tuple[int, ...]
    requests: Mapping[int, int]  # per window, by concurrency
    windows: int
    max_tokens: int
    freeze: bool
    timeout: float  # seconds per request
    start_timeout: float
    out: Path | None


def read_plan(arguments: Sequence[str], description: str) -> Plan:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--server", dest="servers", action="append", required=True, metavar="NAME=KIND:URL[:model]")
    add("--start", action="append", default=[], metavar="NAME=COMMAND", help="runs it, and stops it after")
    add("--body", action="append", default=[], metavar="NAME=JSON", help="more fields of its requests")
    add("--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS], help="files, folders, public sets")
    add("--tokenizer", type=Path, metavar="FOLDER", help="leave out prompts that it finds too long")
    add("--max-prompt-tokens", type=int, default=860, help="how long, without the chat template")
    add("--concurrency", type=counts, default=(1, 4, 16, 64), help="requests in flight: 1,4,16,64")
    add_requests(parser)
    add("--windows", type=int, default=3, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--freeze", action="store_true", help="stop the processes of servers that are not measured")
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--start-timeout", type=float, default=600.0, help="seconds until a started server's first token")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    values = vars(parser.parse_args(arguments))
    values["requests"] = read_requests(parser, values)
    if values["windows"] < 1 or values["max_tokens"] < 2:
        parser.error("--windows must be at least 1, --max-tokens at least 2")
    try:
        values["servers"] = read_servers(values["servers"], values.pop("start"), values.pop("body"))
    except PeerError as error:
        parser.error(str(error))
    return Plan(**values | {"prompts": tuple(values["prompts"])})


def read_servers(
    specs: Sequence[str], commands: Sequence[str], bodies: Sequence[str]
) -> tuple[PeerServer, ...]:
    """The servers with their commands and bodies.

    Raises:
        PeerError: a name occurs twice or not at all, or a body is no JSON object.
    """
    servers: dict[str, PeerServer] = {}
    for server in map(parse_server, specs):
        if servers.setdefault(server.name, server) is not server:
            raise PeerError(f"--server: the name '{server.name}' is given twice")
    for option, texts in (("--start", commands), ("--body", bodies)):
        for text in texts:
            name, _, value = text.partition("=")
            if name not in servers or not value:
                known = ", ".join(servers)
                raise PeerError(
                    f"{option} must be NAME=… with the name of a --server ({known}), got '{text}'"
                )
            if option == "--start":
                servers[name].command = value
            else:
                servers[name].extra = read_body(text, value)
    return tuple(servers.values())


def read_body(text: str, value: str) -> dict[str, Any]:
    """The JSON object of a --body."""
    try:
        body = json.loads(value)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise PeerError(f"--body must be NAME=a JSON object, got '{text}'")
    return body
