"""The command line of the standard tools beside our own load."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_options import add_requests, counts, names, read_requests
from benchmark_report import AR
from loadtest.task_sets import DEFAULT_PROMPTS

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("load", "perf_analyzer", "load-http", "aiperf")


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    grpc: str  # host:port
    http: str  # host:port
    metrics: str  # URL of the server's counters
    tools: tuple[str, ...]
    perf_analyzer: str  # how it is called
    aiperf: str  # how it is called
    tokenizer: Path | None  # folder; AIPerf counts tokens with it
    prompts: tuple[str, ...]  # files, folders, public sets
    modes: tuple[str, ...]  # names of drafters, none for AR
    concurrency: tuple[int, ...]
    requests: Mapping[int, int]  # per window, by concurrency
    windows: int
    max_tokens: int
    timeout: float  # seconds per run of a tool
    work: Path  # folder of the tools' files
    out: Path | None

    def settings(self) -> dict[str, Any]:
        """What decides the figures, for every line of results."""
        prompts = [Path(source).name for source in self.prompts]
        return {
            "prompts": prompts,
            "max_tokens": self.max_tokens,
            "windows": self.windows,
            "ignore_eos": True,
        }


def read_plan(arguments: Sequence[str], description: str) -> Plan:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--grpc", default="127.0.0.1:8001", metavar="HOST:PORT", help="the server's gRPC port")
    add("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server's HTTP port")
    add("--metrics", default="http://127.0.0.1:8002/metrics", metavar="URL", help="the server's counters")
    add("--tools", type=names, default=TOOLS, help=f"some of {','.join(TOOLS)}")
    add("--perf-analyzer", default=str(ROOT / "scripts" / "perf_analyzer.sh"), help="how it is called")
    add("--aiperf", default="aiperf", help="how it is called")
    add("--tokenizer", type=Path, metavar="FOLDER", help="the target's; AIPerf counts tokens with it")
    add("--prompts", nargs="+", default=[str(DEFAULT_PROMPTS)], help="files, folders, public sets")
    add("--modes", type=names, default=(AR,), help="drafters, none for AR: none,ngram")
    add("--concurrency", type=counts, default=(4, 8, 16, 32, 64), help="requests in flight: 4,8,16,32,64")
    add_requests(parser)
    add("--windows", type=int, default=1, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--timeout", type=float, default=900.0, help="seconds per run of a tool")
    add("--work", type=Path, default=ROOT / "run" / "tools", help="folder of the tools' files")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    values = vars(parser.parse_args(arguments))
    values["requests"] = read_requests(parser, values)
    plan = Plan(**values | {"prompts": tuple(values["prompts"])})
    if unknown := set(plan.tools) - set(TOOLS):
        parser.error(f"--tools: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(TOOLS)}")
    if plan.windows < 1 or any(size < concurrency for concurrency, size in plan.requests.items()):
        parser.error("--windows must be at least 1, --requests at least as many as are in flight")
    if "aiperf" in plan.tools and (plan.tokenizer is None or not plan.tokenizer.is_dir()):
        parser.error(f"aiperf needs --tokenizer, a folder; got {plan.tokenizer}")
    for tool, command in (("perf_analyzer", plan.perf_analyzer), ("aiperf", plan.aiperf)):
        program = next(iter(shlex.split(command)), "")
        if tool in plan.tools and shutil.which(program) is None:
            parser.error(f"--{tool.replace('_', '-')}: there is no program '{program}'")
    return plan
