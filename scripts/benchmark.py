"""Plain decoding (AR) against each drafter, on a running server.

    python scripts/benchmark.py --modes none,ngram --concurrency 1,4,16,64 --out results.jsonl

Closed loop: as many requests as --concurrency are in flight until all are answered.  The modes take
turns window by window, so that a slow phase of the machine hits them alike, and all get the same
prompts and seeds.  One JSON line per cell, a mode at a concurrency; benchmark_report says how a cell
is made of its windows, angelspec_client.metrics defines its figures.  Warm-up requests do not count.

Speculation must not change the text: every answer is compared, token for token, with the first answer
to the same prompt and seed, whatever mode and concurrency that came from ("identical").
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from angelspec_client import AngelSpecError
from benchmark_options import add_requests, counts, names, read_requests, run_command
from benchmark_report import AR, Answers, describe_machine, make_cell, make_table, to_line
from load import DEFAULT_SERVERS, Request, Window, connect, run_loop, run_window, warm_up
from loadtest.task_sets import DEFAULT_PROMPTS, Prompt, PromptError, load_prompts

TABLE_WIDTH = 110
CONSOLE = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    server: str
    protocol: str  # grpc or http
    prompts: Path
    modes: tuple[str, ...]  # names of drafters, none for AR
    concurrency: tuple[int, ...]
    requests: Mapping[int, int]  # per window, by concurrency
    windows: int
    max_tokens: int
    ignore_eos: bool
    temperature: float
    num_draft_tokens: int | None  # None: the server's default
    seed: int  # of the first request; every further one has the next
    timeout: float  # seconds per request
    out: Path | None


async def measure(plan: Plan, prompts: Sequence[Prompt]) -> AsyncIterator[dict[str, Any]]:
    """Run everything, and yield each cell when it is complete."""
    sender = connect(plan.server, plan.protocol, timeout=plan.timeout)
    answers = Answers()
    for concurrency in plan.concurrency:
        size = plan.requests[concurrency]
        windows: dict[str, list[Window]] = {mode: [] for mode in plan.modes}
        for mode in plan.modes:
            await warm_up(sender, make_requests(plan, prompts, mode, range(size)), concurrency)
        for index in range(plan.windows):
            numbers = range(index * size, (index + 1) * size)
            for mode in plan.modes:
                window = await run_window(sender, make_requests(plan, prompts, mode, numbers), concurrency)
                answers.compare(window)
                windows[mode].append(window)
                show_progress(f"c={concurrency} {mode} {index + 1}/{plan.windows}", window)
        for mode in plan.modes:
            cell = make_cell(mode, concurrency, windows[mode], windows.get(AR, []))
            yield cell | {"num_draft_tokens": request_options(plan, mode, 0)["num_draft_tokens"]}
    await sender.close()


def make_requests(plan: Plan, prompts: Sequence[Prompt], mode: str, numbers: range) -> list[Request]:
    """The requests of the given numbers; a number has the same prompt and seed in every mode."""
    drawn = ((number, prompts[number % len(prompts)]) for number in numbers)
    return [
        Request(number, prompt.messages, prompt.task, request_options(plan, mode, number))
        for number, prompt in drawn
    ]


def request_options(plan: Plan, mode: str, number: int) -> dict[str, Any]:
    """The options of a request: all but those of the drafter depend on its number alone."""
    return {
        "max_tokens": plan.max_tokens,
        "ignore_eos": plan.ignore_eos,
        "temperature": plan.temperature,
        "seed": plan.seed + number,
        "drafter": mode,
        "num_draft_tokens": 0 if mode == AR else plan.num_draft_tokens,
    }


def show_progress(what: str, window: Window) -> None:
    """One line per window, and the first error in full."""
    CONSOLE.print(
        f"{what}: {window.tokens_per_second:.1f} tokens/s in {window.duration_s:.1f} s", markup=False
    )
    if window.errors:
        CONSOLE.print(f"  {len(window.errors)} failed, the first: {window.errors[0]}", markup=False)


def describe(plan: Plan) -> dict[str, Any]:
    """The conditions, which every line repeats."""
    return {
        "protocol": plan.protocol,
        "prompts": plan.prompts.name,
        "max_tokens": plan.max_tokens,
        "ignore_eos": plan.ignore_eos,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "windows": plan.windows,
    }


def read_plan(arguments: Sequence[str]) -> Plan:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--server", help="host:port; 127.0.0.1:8001 for gRPC, 127.0.0.1:8000 for HTTP")
    add("--grpc", dest="protocol", action="store_const", const="grpc", default="grpc", help="the default")
    add("--http", dest="protocol", action="store_const", const="http")
    add("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSONL file, folder of them, or public set")
    add("--modes", type=names, default=(AR, "ngram"), help="drafters, none for AR: none,ngram")
    add("--concurrency", type=counts, default=(1, 4, 16, 64), help="requests in flight: 1,4,16,64")
    add_requests(parser)
    add("--windows", type=int, default=3, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--ignore-eos", action="store_true", help="always generate --max-tokens")
    add("--temperature", type=float, default=0.0)
    add("--num-draft-tokens", type=int, help="default: the server's")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    values = vars(parser.parse_args(arguments))
    values["requests"] = read_requests(parser, values)
    values["server"] = values["server"] or DEFAULT_SERVERS[values["protocol"]]
    if values["windows"] < 1:
        parser.error("--windows must be at least 1")
    return Plan(**values)


async def run(plan: Plan) -> None:
    """Measure, write a line per cell, show the table."""
    cells = []
    conditions = describe(plan) | describe_machine()
    async for cell in measure(plan, load_prompts(plan.prompts)):
        cells.append(cell)
        line = to_line(cell | conditions)
        if plan.out is None:
            print(line, flush=True)
        else:
            with plan.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    Console(stderr=True, highlight=False, width=TABLE_WIDTH).print(make_table(cells))


def main() -> int:
    """Returns the exit status."""
    plan = read_plan(sys.argv[1:])
    return run_command("benchmark", lambda: run_loop(run(plan)), AngelSpecError, PromptError)


if __name__ == "__main__":
    sys.exit(main())
