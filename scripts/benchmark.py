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
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loadtest.task_sets import DEFAULT_PROMPTS, Prompt, PromptError, load_prompts
from rich.console import Console

from angelspec_client import AngelSpecError, AsyncGrpcClient, Generation, HttpClient, ServerError
from benchmark_options import counts, names
from benchmark_report import AR, Answers, Window, describe_machine, make_cell, make_table, to_line

WARM_UP_TOKENS = 8
MAX_WARM_UP_REQUESTS = 8
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
    requests: int  # per window; 0: max(16, 2 * concurrency)
    windows: int
    max_tokens: int
    ignore_eos: bool
    temperature: float
    num_draft_tokens: int | None  # None: the server's default
    seed: int  # of the first request; every further one has the next
    timeout: float  # seconds per request
    out: Path | None


class Sender(Protocol):
    """Sends one request and waits for all of it, streamed."""

    async def send(self, prompt: Prompt, options: dict[str, Any]) -> Generation:
        """Raises AngelSpecError."""


class GrpcSender:
    """Over gRPC, a stream per request on one channel."""

    def __init__(self, plan: Plan) -> None:
        self._client = AsyncGrpcClient(plan.server, timeout=plan.timeout)

    async def send(self, prompt: Prompt, options: dict[str, Any]) -> Generation:
        return await self._client.stream(messages=prompt.messages, **options).read()


class HttpSender:
    """Over generate_stream, a thread per request in flight."""

    def __init__(self, plan: Plan) -> None:
        self._client = HttpClient(plan.server, timeout=plan.timeout)
        self._threads = ThreadPoolExecutor(max(plan.concurrency))

    async def send(self, prompt: Prompt, options: dict[str, Any]) -> Generation:
        stream = self._client.stream(messages=prompt.messages, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, stream.read)


async def measure(plan: Plan, prompts: Sequence[Prompt]) -> AsyncIterator[dict[str, Any]]:
    """Run everything, and yield each cell when it is complete."""
    sender = HttpSender(plan) if plan.protocol == "http" else GrpcSender(plan)
    answers = Answers()
    for concurrency in plan.concurrency:
        windows: dict[str, list[Window]] = {mode: [] for mode in plan.modes}
        for mode in plan.modes:
            await warm_up(sender, plan, prompts, mode, concurrency)
        for index in range(plan.windows):
            size = plan.requests or max(16, 2 * concurrency)
            numbers = range(index * size, (index + 1) * size)
            for mode in plan.modes:
                window = await run_window(sender, plan, prompts, mode, concurrency, numbers)
                answers.compare(window)
                windows[mode].append(window)
                show_progress(f"c={concurrency} {mode} {index + 1}/{plan.windows}", window)
        for mode in plan.modes:
            cell = make_cell(mode, concurrency, windows[mode], windows.get(AR, []))
            yield cell | {"num_draft_tokens": request_options(plan, mode, 0)["num_draft_tokens"]}


async def run_window(
    sender: Sender, plan: Plan, prompts: Sequence[Prompt], mode: str, concurrency: int, numbers: range
) -> Window:
    """Send the requests of the given numbers, at most concurrency of them at a time."""
    window, waiting = Window(), iter(numbers)

    async def work() -> None:
        for number in waiting:
            try:
                generation = await sender.send(
                    prompts[number % len(prompts)], request_options(plan, mode, number)
                )
                if generation.finish_reason not in ("stop", "eos", "length"):
                    raise ServerError(f"a generation ended with '{generation.finish_reason}'")
            except AngelSpecError as error:
                window.errors.append(error)
            else:
                window.generations[number] = generation

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    window.duration_s = time.perf_counter() - start
    return window


async def warm_up(sender: Sender, plan: Plan, prompts: Sequence[Prompt], mode: str, concurrency: int) -> None:
    """A few short requests.  Raises AngelSpecError when the server cannot serve this mode at all."""
    short = replace(plan, max_tokens=min(WARM_UP_TOKENS, plan.max_tokens))
    numbers = range(min(concurrency, MAX_WARM_UP_REQUESTS))
    window = await run_window(sender, short, prompts, mode, concurrency, numbers)
    if not window.generations:
        raise window.errors[0]


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
    add("--requests", type=int, default=0, help="per window; default max(16, 2 * concurrency)")
    add("--windows", type=int, default=3, help="how often every cell is measured")
    add("--max-tokens", type=int, default=128)
    add("--ignore-eos", action="store_true", help="always generate --max-tokens")
    add("--temperature", type=float, default=0.0)
    add("--num-draft-tokens", type=int, help="default: the server's")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--out", type=Path, help="file the JSON lines are appended to; default standard output")
    values = vars(parser.parse_args(arguments))
    values["server"] = values["server"] or (
        "127.0.0.1:8000" if values["protocol"] == "http" else "127.0.0.1:8001"
    )
    if values["windows"] < 1 or values["requests"] < 0:
        parser.error("--windows must be at least 1, --requests at least 0")
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
    try:
        asyncio.run(run(read_plan(sys.argv[1:])))
    except (AngelSpecError, PromptError) as error:
        CONSOLE.print(f"benchmark: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
