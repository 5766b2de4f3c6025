"""Our server against any others that speak the OpenAI API: same prompts, same lengths, same client.

    python scripts/benchmark_peers.py --freeze --out peers.jsonl \\
        --server ours=angelspec:http://127.0.0.1:8000 --body 'ours={"drafter": "none"}' \\
        --server llama.cpp=openai:http://127.0.0.1:18200 --start 'llama.cpp=llama-server -m model.gguf …' \\
        --server vllm=openai:http://127.0.0.1:18100:smol

Closed loop: as many requests as --concurrency are in flight until all are answered, each with --max-tokens
new tokens, greedy, past any end of text.  Servers take turns window by window, so that a slow phase of the
machine hits them alike; --freeze stops the processes (SIGSTOP) of those whose turn it is not.  The first
server named is compared with each other one.  One JSON line per server, concurrency and window;
peers_report defines the figures.  A request that ends in an error, with a finish reason other than length,
or with too few tokens has failed.

loadtest/peers.md says how vLLM and llama.cpp are installed and started, and has a whole command.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmark_options import run_command
from benchmark_report import describe_machine, to_line
from load import garbage_kept, run_loop
from loadtest.task_sets import Prompt, PromptError, fits, load_prompts
from peers_options import Plan, read_plan
from peers_report import make_table, summarize
from peers_servers import PeerError, PeerServer, maybe_frozen, start, stop, version, wait_until_ready
from peers_stream import Reply, Task, send

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_TOKENS = 8
MAX_WARM_UP_REQUESTS = 4
TABLE_WIDTH = 140
CONSOLE = Console(stderr=True, highlight=False)


async def measure(
    session: aiohttp.ClientSession, plan: Plan, prompts: Sequence[Prompt]
) -> AsyncIterator[dict[str, Any]]:
    """Run everything, and yield a record when a window is complete."""
    for concurrency in plan.concurrency:
        size = plan.requests[concurrency]
        for window in range(plan.windows):
            numbers = range(window * size, (window + 1) * size)
            for server in plan.servers:
                with maybe_frozen(plan.freeze, plan.servers, server):
                    # Whatever ran before has emptied the caches, so every window starts with a few requests.
                    few = range(min(concurrency, MAX_WARM_UP_REQUESTS))
                    await run_window(session, plan, server, prompts, concurrency, few, WARM_UP_TOKENS)
                    replies = await run_window(
                        session, plan, server, prompts, concurrency, numbers, plan.max_tokens
                    )
                record = {"server": server.name, "kind": server.kind, "concurrency": concurrency}
                yield record | {"window": window} | summarize(replies)


async def run_window(
    session: aiohttp.ClientSession,
    plan: Plan,
    server: PeerServer,
    prompts: Sequence[Prompt],
    concurrency: int,
    numbers: range,
    max_tokens: int,
) -> list[Reply]:
    """Send the requests of the given numbers, at most concurrency of them at a time."""
    replies, waiting = [], iter(numbers)

    async def work() -> None:
        for number in waiting:
            task = Task(prompts[number % len(prompts)].messages, max_tokens, server.extra)
            replies.append(await send(session, server.kind, server.url, server.model, task, plan.timeout))

    with garbage_kept():
        await asyncio.gather(*(work() for _ in range(concurrency)))
    return replies


def git_revision() -> str | None:
    """The commit of this checkout, marked when files differ from it; None outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


async def run(plan: Plan, prompts: Sequence[Prompt]) -> None:
    """Start what is to be started, measure, write a line per window, show the table, stop it again."""
    records = []
    # A connection per request: some servers close one after a stream without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            conditions = {"max_tokens": plan.max_tokens, "prompts": [path.name for path in plan.prompts]}
            conditions |= {"freeze": plan.freeze, "git": git_revision(), **describe_machine()}
            versions = await start_all(session, plan)
            async for record in measure(session, plan, prompts):
                records.append(record)
                show_progress(record)
                record |= {"version": versions[record["server"]], **conditions}
                line = to_line(record | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
                if plan.out is None:
                    print(line, flush=True)
                else:
                    with plan.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
        finally:
            for server in plan.servers:
                stop(server)
            if records:
                Console(stderr=True, highlight=False, width=TABLE_WIDTH).print(make_table(records))


async def start_all(session: aiohttp.ClientSession, plan: Plan) -> dict[str, str | None]:
    """Bring all servers up, one after the other; their versions by name."""
    versions = {}
    for server in plan.servers:
        if server.command is not None:
            log = ROOT / "run" / f"peer-{server.name}.log"
            CONSOLE.print(f"starting {server.name}, log in {log}", markup=False)
            start(server, log)
        await wait_until_ready(session, server, plan.start_timeout)
        versions[server.name] = await version(session, server)
    return versions


def show_progress(record: dict[str, Any]) -> None:
    """One line per window, and the first error in full."""
    rate = record["tokens_per_second"] or 0.0
    CONSOLE.print(
        f"c={record['concurrency']} {record['server']} {record['window'] + 1}: {rate:.1f} tokens/s, "
        f"TTFT {record['ttft_p50_ms']}, TPOT {record['tpot_p50_ms']} ms",
        markup=False,
    )
    if record["failed"]:
        CONSOLE.print(f"  {record['failed']} failed, the first: {record['first_error']}", markup=False)


def main() -> int:
    """Returns the exit status."""
    plan = read_plan(sys.argv[1:], __doc__ or "")
    # SIGTERM ends it like Ctrl-C: what is frozen has to be woken, what was started to be stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def work() -> None:
        keep = bool if plan.tokenizer is None else fits(plan.tokenizer, plan.max_prompt_tokens)
        run_loop(run(plan, load_prompts(*plan.prompts, keep=keep)))

    return run_command("benchmark_peers", work, PeerError, PromptError)


if __name__ == "__main__":
    sys.exit(main())
