"""perf_analyzer and AIPerf beside our own load, on a running server: same requests, same numbers in flight.

    python scripts/run_standard_tools.py --concurrency 4,8,16,32,64 --aiperf peers/aiperf/bin/aiperf \\
        --tokenizer models/SmolLM2-135M-Instruct --out tools.jsonl

Closed loop in every tool.  The tools take turns, window by window, so that a slow phase of the machine hits
them alike: load (ours, gRPC), perf_analyzer (gRPC), load-http (ours, HTTP), aiperf (HTTP).  One JSON line
per mode, tool and concurrency, a table of them, and every difference between what a tool says and what the
server counted meanwhile.  loadtest/standard_tools.md says how the tools are installed and what their
figures mean.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rich.console import Console

import tool_aiperf
import tool_perf_analyzer
from angelspec_client import AngelSpecError
from benchmark_options import run_command
from benchmark_report import AR, to_line
from experiment_server import Subject, describe_subject
from load import Request, Sender, connect, run_loop, run_window, warm_up
from loadtest.task_sets import Prompt, PromptError, load_prompts
from server_counters import CountersError, read_counters
from tool_runs import Measured, ToolError, from_generations
from tools_options import Plan, read_plan
from tools_report import ToolWindow, make_record, make_table

TABLE_WIDTH = 150
CONSOLE = Console(stderr=True, highlight=False)


async def measure(plan: Plan, prompts: Sequence[Prompt]) -> AsyncIterator[dict[str, Any]]:
    """Run everything, and yield the records of a concurrency when it is complete."""
    senders = {
        "load": connect(plan.grpc, "grpc", timeout=plan.timeout),
        "load-http": connect(plan.http, "http", timeout=plan.timeout),
    }
    for concurrency in plan.concurrency:
        cells: dict[tuple[str, str], list[ToolWindow]] = {}
        size = plan.requests[concurrency]
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
    requests = []
    for number in numbers:
        prompt = prompts[number % len(prompts)]
        requests.append(Request(number, prompt.messages, prompt.task, options | {"seed": number}))
    return requests


def show_progress(what: str, measured: Measured) -> None:
    """One line per window, and the first error in full."""
    CONSOLE.print(f"{what}: {measured.tokens_per_second:.1f} tokens/s", markup=False)
    if measured.failed:
        CONSOLE.print(f"  {measured.failed} failed, the first: {measured.first_error}", markup=False)


async def run(plan: Plan) -> None:
    """Measure, write a line per cell, show the table and what the counters say against it."""
    conditions = {
        "experiment": "standard tools",
        **describe_subject(Subject(plan.grpc, "", {}), "grpc"),
        "settings": plan.settings(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    records = []
    async for record in measure(plan, load_prompts(*plan.prompts)):
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
    plan = read_plan(sys.argv[1:], __doc__ or "")
    errors = AngelSpecError, CountersError, PromptError, ToolError
    return run_command("run_standard_tools", lambda: run_loop(run(plan)), *errors)


if __name__ == "__main__":
    sys.exit(main())
