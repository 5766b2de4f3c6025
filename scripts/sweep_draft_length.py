"""How long should drafts be?  Every draft length at every concurrency, on your own prompts.

    python scripts/sweep_draft_length.py --drafter ngram --lengths 0-8,auto --concurrency 1,4,8,16,32,64 \\
        --prompts loadtest/prompts --out sweep.jsonl --picture sweep.png

Length 0 is plain decoding, auto the server's own choice for each step, of at most the longest length asked
for.  Two servers are started for it, without a prefix cache, since prompts repeat: one whose drafts are
always as long as a request says (adaptive_drafts: false), and one for auto.  The lengths take turns window
by window, so that a slow phase of the machine hits them alike, with the same prompts and seeds, and all
answers are compared token for token.

The best length of a concurrency has most tokens/s among those whose P99 of whole requests is within the
limit: --max-p99-ms, or else --max-p99-ratio times that of plain decoding.  Lengths that raise tokens/s while
time to first token or P99 get worse than in plain decoding are flagged.  --read shows and draws what an
earlier run wrote.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from angelspec_client import AngelSpecError
from benchmark_options import run_command
from benchmark_report import AR, Answers, to_line
from checks import CheckError, free_ports
from experiment_server import Subject, describe_subject
from load import Request, Sender, Window, connect, run_loop, run_window, warm_up
from loadtest.task_sets import Prompt, PromptError, load_prompts
from prepare_target import PrepareError
from server import ServerError, TritonServer
from server_config import build_config
from server_options import ROOT, ServerOptions
from sweep_cells import SweepError, make_cell, read_cells
from sweep_options import Plan, read_plan
from sweep_plot import draw
from sweep_report import Length, by_concurrency, choose_best, make_table, make_task_table, show_length

TABLE_WIDTH = 150
CONSOLE = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Servers:
    """host:port by HTTP of the server with fixed lengths and of the one that adapts, where needed."""

    fixed: str | None
    auto: str | None

    def of(self, length: Length) -> str:
        """The one that serves a length."""
        server = self.auto if length is None else self.fixed
        assert server is not None
        return server


@contextlib.contextmanager
def serving(plan: Plan) -> Iterator[Servers]:
    """The servers that were named, and those that the plan needs beside them, started and stopped again.

    Raises:
        CheckError, PrepareError, ServerError: one does not start.
    """
    found = {"fixed": plan.server, "auto": plan.auto_server}
    needed = {"auto" if length is None else "fixed" for length in plan.lengths}
    with contextlib.ExitStack() as stack:
        for name in sorted(needed):
            if found[name] is not None:
                continue
            options, _ = build_config(plan.config, plan.target, plan.drafter)
            options |= {"adaptive_drafts": name == "auto", "prefix_caching": False}
            http, grpc, metrics = free_ports(3)
            folder = ROOT / "run" / f"sweep-{name}"
            CONSOLE.print(f"starting the server for {name} lengths", markup=False)
            server = TritonServer(ServerOptions(http, grpc, metrics, config=options, run_dir=folder))
            stack.enter_context(server).wait_until_ready()
            found[name] = f"127.0.0.1:{http}"
        yield Servers(**found)


async def measure(
    plan: Plan, prompts: Sequence[Prompt], servers: Servers
) -> AsyncIterator[list[dict[str, Any]]]:
    """Run everything, and yield the cells of a concurrency, one per length, when they are complete."""
    senders: dict[Length, Sender] = {
        length: connect(servers.of(length), "http", timeout=plan.timeout) for length in plan.lengths
    }
    answers = Answers()
    for concurrency in plan.concurrency:
        size = plan.requests[concurrency]
        windows: dict[Length, list[Window]] = {length: [] for length in plan.lengths}
        for length, sender in senders.items():
            await warm_up(sender, make_requests(plan, prompts, length, range(size)), concurrency)
        for index in range(plan.windows):
            numbers = range(index * size, (index + 1) * size)
            for length, sender in senders.items():
                window = await run_window(sender, make_requests(plan, prompts, length, numbers), concurrency)
                answers.compare(window)
                windows[length].append(window)
                show_progress(
                    f"c={concurrency} draft {show_length(length)} {index + 1}/{plan.windows}", window
                )
        yield [make_cell(plan.drafter, length, concurrency, windows[length]) for length in plan.lengths]
    for sender in senders.values():
        await sender.close()


def make_requests(plan: Plan, prompts: Sequence[Prompt], length: Length, numbers: range) -> list[Request]:
    """The requests of the given numbers; a number has the same prompt and seed with every length."""
    shared = {
        "max_tokens": plan.max_tokens,
        "ignore_eos": plan.ignore_eos,
        "temperature": plan.temperature,
        "drafter": AR if length == 0 else plan.drafter,
        "num_draft_tokens": plan.longest if length is None else length,
    }
    requests = []
    for number in numbers:
        prompt = prompts[number % len(prompts)]
        requests.append(Request(number, prompt.messages, prompt.task, shared | {"seed": plan.seed + number}))
    return requests


def show_progress(what: str, window: Window) -> None:
    """One line per window, and the first error in full."""
    CONSOLE.print(f"{what}: {window.tokens_per_second:.1f} tokens/s", markup=False)
    if window.errors:
        CONSOLE.print(f"  {len(window.errors)} failed, the first: {window.errors[0]}", markup=False)


async def run(plan: Plan) -> list[dict[str, Any]]:
    """Measure, write a line per cell, return all cells."""
    cells: list[dict[str, Any]] = []
    prompts = load_prompts(*plan.prompts)
    with serving(plan) as servers:
        server = servers.fixed or servers.auto
        assert server is not None
        conditions = {
            "experiment": "draft length",
            **describe_subject(Subject(server, "", {}), "http"),
            "settings": plan.settings(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        async for found in measure(plan, prompts, servers):
            cells += found
            lines = [to_line(cell | conditions) + "\n" for cell in found]
            if plan.out is None:
                print(*lines, sep="", end="", flush=True)
            else:
                with plan.out.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
    return cells


def show(plan: Plan, cells: Sequence[dict[str, Any]]) -> None:
    """The tables, the best length of each concurrency in words, and the picture."""
    console = Console(stderr=True, highlight=False, width=TABLE_WIDTH)
    console.print(make_table(cells, plan.limit))
    console.print(make_task_table(cells))
    for concurrency, group in by_concurrency(cells).items():
        best, limit_ms = choose_best(group, plan.limit), plan.limit.p99_ms(group)
        bound = "no P99 limit" if limit_ms is None else f"P99 within {limit_ms:.0f} ms"
        what = "none" if best is None else f"draft length {show_length(best['num_draft_tokens'])}"
        rate = "" if best is None else f", {best['tokens_per_second']:.1f} tokens/s"
        CONSOLE.print(f"best at {concurrency} in flight, {bound}: {what}{rate}", markup=False)
    if plan.picture is not None:
        draw(cells, plan.limit, plan.picture)
        CONSOLE.print(f"drawn in {plan.picture}", markup=False)


def main() -> int:
    """Returns the exit status."""
    plan = read_plan(sys.argv[1:], __doc__ or "")

    def work() -> None:
        show(plan, run_loop(run(plan)) if plan.read is None else read_cells(plan.read))

    errors = AngelSpecError, CheckError, PrepareError, PromptError, ServerError, SweepError
    return run_command("sweep_draft_length", work, *errors)


if __name__ == "__main__":
    sys.exit(main())
