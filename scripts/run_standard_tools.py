"""perf_analyzer and AIPerf beside our own load, on a running server: same requests, same numbers in flight.

    python scripts/run_standard_tools.py --tokenizer models/SmolLM2-135M-Instruct --concurrency 4,8,16,32,64 \\
        --perf-analyzer scripts/perf_analyzer.sh --aiperf peers/aiperf/bin/aiperf --out tools.jsonl

Closed loop in every tool.  The tools take turns, window by window, so that a slow phase of the machine hits
them alike: load (ours, gRPC), perf_analyzer (gRPC), load-http (ours, HTTP), aiperf (HTTP).  One JSON line
per mode, tool and concurrency, a table of them, and every difference between what a tool says and what the
server counted meanwhile.  loadtest/standard_tools.md says how the tools are installed and what their
figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import tool_aiperf
import tool_perf_analyzer
from angelspec_client import AngelSpecError
from benchmark_options import counts, names
from benchmark_prompts import DEFAULT_PROMPTS, Prompt, PromptError, load_prompts
from benchmark_report import AR, describe_machine, to_line
from load import Request, Sender, connect, run_window, warm_up
from server_counters import CountersError, read_counters
from tool_runs import Measured, ToolError, from_generations
from tools_report import ToolWindow, make_record, make_table

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("load", "perf_analyzer", "load-http", "aiperf")
TABLE_WIDTH = 150
CONSOLE = Console(stderr=True, highlight=False)


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
    prompts: Path
    modes: tuple[str, ...]  # names of drafters, none for AR
    concurrency: tuple[int, ...]
    requests: int  # per window; 0: max(16, 2 * concurrency)
    windows: int
    max_tokens: int
    timeout: float  # seconds per run of a tool
    work: Path  # folder of the tools' files
    out: Path | None


async def measure(plan: Plan, prompts: Sequence[Prompt]) -> AsyncIterator[dict[str, Any]]:
    """Run everything, and yield the records of a concurrency when it is complete."""
    most = max(plan.concurrency)
    senders = {
        "load": connect(plan.grpc, "grpc", timeout=plan.timeout),
        "load-http": connect(plan.http, "http", timeout=plan.timeout, concurrency=most),
    }
    for concurrency in plan.concurrency:
        cells: dict[tuple[str, str], list[ToolWindow]] = {}
        size = plan.requests or max(16, 2 * concurrency)
        for index in range(plan.windows):
            numbers = range(index * size, (index + 1) * size)
            for mode in plan.modes:
                requests = make_requests(plan, prompts, mode, numbers)
                for tool in plan.tools:
                    await warm_up(senders["load"], requests, concurrency)
                    before = await asyncio.to_thread(read_counters, plan.metrics)
                    measured = await run_once(plan, senders, tool, requests, concurrency)
                    after = await asyncio.to_thread(read_counters, plan.metrics)
                    cells.setdefault((mode, tool), []).append(ToolWindow(measured, after - before))
                    show_progress(f"c={concurrency} {mode} {tool} {index + 1}/{plan.windows}", measured)
        for (mode, tool), windows in cells.items():
            yield make_record(tool, mode, concurrency, windows)
    for sender in senders.values():
        await sender.close()


async def run_once(
    plan: Plan, senders: dict[str, Sender], tool: str, requests: Sequence[Request], concurrency: int
) -> Measured:
    """Send the requests with one tool.  Raises ToolError."""
    if tool in senders:
        window = await run_window(senders[tool], requests, concurrency)
        return from_generations(list(window.generations.values()), window.errors, window.duration_s)
    folder = plan.work / tool
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if tool == "perf_analyzer":
        return await asyncio.to_thread(
            tool_perf_analyzer.measure,
            *(plan.perf_analyzer, plan.grpc, folder, requests, concurrency, plan.timeout),
        )
    assert plan.tokenizer is not None
    return await asyncio.to_thread(
        tool_aiperf.measure,
        *(plan.aiperf, plan.http, plan.tokenizer, folder, requests, concurrency, plan.timeout),
    )


def make_requests(plan: Plan, prompts: Sequence[Prompt], mode: str, numbers: range) -> list[Request]:
    """The requests of the given numbers: greedy, and of exactly max_tokens."""
    options = {"max_tokens": plan.max_tokens, "ignore_eos": True, "temperature": 0.0, "drafter": mode}
    if mode == AR:
        options["num_draft_tokens"] = 0
    return [
        Request(number, prompts[number % len(prompts)], options=options | {"seed": number})
        for number in numbers
    ]


def show_progress(what: str, measured: Measured) -> None:
    """One line per window, and the first error in full."""
    CONSOLE.print(f"{what}: {measured.tokens_per_second:.1f} tokens/s", markup=False)
    if measured.failed:
        CONSOLE.print(f"  {measured.failed} failed, the first: {measured.first_error}", markup=False)


def read_plan(arguments: Sequence[str]) -> Plan:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--grpc", default="127.0.0.1:8001", metavar="HOST:PORT", help="the server's gRPC port")
    add("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server's HTTP port")
    add("--metrics", default="http://127.0.0.1:8002/metrics", metavar="URL", help="the server's counters")
    add("--tools", type=names, default=TOOLS, help=f"some of {','.join(TOOLS)}")
    add("--perf-analyzer", default=str(ROOT / "scripts" / "perf_analyzer.sh"), help="how it is called")
    add("--aiperf", default="aiperf", help="how it is called")
    add("--tokenizer", type=Path, metavar="FOLDER", help="the target's; AIPerf counts tokens with it")
    add("--prompts", type=Path, default=DEFAULT_PROMPTS, help="a JSONL file, or a directory of them")
    add("--modes", type=names, default=(AR,), help="drafters, none for AR: none,ngram")
    add("--concurrency", type=counts, default=(4, 8, 16, 32, 64), help="requests in flight: 4,8,16,32,64")
    add("--requests", type=int, default=0, help="per window; default max(16, 2 * concurrency)")
    add("--windows", type=int, default=1, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--timeout", type=float, default=900.0, help="seconds per run of a tool")
    add("--work", type=Path, default=ROOT / "run" / "tools", help="folder of the tools' files")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    plan = Plan(**vars(parser.parse_args(arguments)))
    if unknown := set(plan.tools) - set(TOOLS):
        parser.error(f"--tools: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(TOOLS)}")
    if plan.windows < 1 or (plan.requests and plan.requests < max(plan.concurrency)):
        parser.error("--windows must be at least 1, --requests 0 or at least as many as are in flight")
    if "aiperf" in plan.tools and (plan.tokenizer is None or not plan.tokenizer.is_dir()):
        parser.error(f"aiperf needs --tokenizer, a folder; got {plan.tokenizer}")
    for tool, command in (("perf_analyzer", plan.perf_analyzer), ("aiperf", plan.aiperf)):
        program = next(iter(shlex.split(command)), "")
        if tool in plan.tools and shutil.which(program) is None:
            parser.error(f"--{tool.replace('_', '-')}: there is no program '{program}'")
    return plan


async def run(plan: Plan) -> None:
    """Measure, write a line per cell, show the table and what the counters say against it."""
    conditions = {
        "experiment": "standard tools",
        "prompts": plan.prompts.name,
        "max_tokens": plan.max_tokens,
        **describe_machine(),
    }
    records = []
    async for record in measure(plan, load_prompts(plan.prompts)):
        records.append(record)
        line = to_line(record | conditions)
        if plan.out is None:
            print(line, flush=True)
        else:
            with plan.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    Console(stderr=True, highlight=False, width=TABLE_WIDTH).print(make_table(records))
    for record in records:
        for difference in record["differences"]:
            where = f"c={record['concurrency']} {record['drafter']} {record['tool']}"
            CONSOLE.print(f"{where}: {difference}", style="yellow", markup=False, soft_wrap=True)


def main() -> int:
    """Returns the exit status."""
    try:
        asyncio.run(run(read_plan(sys.argv[1:])))
    except (AngelSpecError, CountersError, PromptError, ToolError) as error:
        CONSOLE.print(f"run_standard_tools: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
