"""Start the server and measure what its users feel: start-up, prefix cache, fairness, memory.

    python scripts/benchmark_serving.py [--measures start,memory,...] [--config FILE] [--out FILE]

Every figure has a bar that it must not exceed:

start     seconds from the prepared weights until the first generated token
memory    MB of the target's process beyond its weights and the KV blocks in use, and what each process
          still grows by, KV apart, when the load is repeated
prefix    time to the first token of a prompt whose long prefix is cached, as a share of the cold time
fairness  inter-token p99 of running streams while a long prompt is computed, as a multiple of without
overhead  ms of a decoding step outside the target: the loop, the messages, the calls between models, the text

A line of JSON per figure goes to --out, a table to the terminal; the exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from angelspec_backend.core.config import EngineConfig
from angelspec_client import AngelSpecError, AsyncGrpcClient
from angelspec_client.metrics import percentile
from benchmark_options import counts, names
from benchmark_report import describe_machine, to_line
from checks import CheckError, free_ports
from prepare_target import PrepareError
from server import ServerError, TritonServer
from server_config import build_config
from server_options import ROOT, ServerOptions
from serving_load import (
    Prompts,
    measure_fairness,
    measure_overhead,
    measure_prefix,
    run_round,
    time_to_first_token,
)
from serving_memory import MB, PROCESSES, kv_bytes, read_server, weight_bytes

MEASURES = ("start", "memory", "prefix", "fairness", "overhead")
START_BAR, OVERHEAD_BAR, GROWTH_BAR, PREFIX_BAR, FAIRNESS_BAR = 20.0, 400.0, 20.0, 0.15, 3.0
OVERHEAD_MS_BARS = {1: 1.0, 64: 3.0}  # by streams


@dataclass(frozen=True)
class Figure:
    """One measured figure and what it must not exceed."""

    measure: str
    case: str
    value: float
    unit: str
    bar: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the bar is met."""
        return self.value <= self.bar

    def record(self) -> dict[str, Any]:
        """What is written to the file."""
        own = {name: getattr(self, name) for name in ("measure", "case", "value", "unit", "bar", "passed")}
        return own | self.details


class Bench:
    """One server after another with the same options, and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prompts = Prompts()
        self.overrides, self.config = build_config(options.config, options.target, "")
        self.target = Path(self.config.target)

    def run(self) -> Iterator[Figure]:
        """All wanted figures; the last of the servers started is the one measured."""
        measures, seconds = self.options.measures, []
        starts = self.options.starts if "start" in measures else 1
        with tempfile.TemporaryDirectory() as folder:
            for index in range(starts):
                http, grpc, metrics = free_ports(3)
                run_dir = Path(folder) / str(index)
                server_options = ServerOptions(http, grpc, metrics, config=self.overrides, run_dir=run_dir)
                begin = time.perf_counter()
                with TritonServer(server_options) as server:
                    server.wait_until_ready()
                    seconds.append(time.perf_counter() - begin)
                    if index == starts - 1:
                        if "start" in measures:
                            details = {"seconds": seconds}
                            yield Figure("start", "", statistics.median(seconds), "s", START_BAR, details)
                        for name in (name for name in MEASURES[1:] if name in measures):
                            yield from self._measure(name, server)

    def _measure(self, name: str, server: TritonServer) -> Iterator[Figure]:
        if name == "memory":
            yield from asyncio.run(self._memory(server))
        elif name == "prefix":
            yield asyncio.run(self._prefix(server))
        elif name == "overhead":
            for num_streams, bar in OVERHEAD_MS_BARS.items():
                yield asyncio.run(self._overhead(server, num_streams, bar))
        else:
            for num_streams in self.options.streams:
                yield asyncio.run(self._fairness(server, num_streams))

    async def _memory(self, server: TritonServer) -> list[Figure]:
        weights = weight_bytes(self.target)
        seen, kv, generations = [read_server(server)], [0], []
        async with connect(server) as client:
            for _ in range(self.options.rounds):
                generations += await run_round(client, self.prompts, 16, 32, 1500)
                seen.append(read_server(server))
                kv.append(kv_bytes(generations, self.config, self.target))
        figures = []
        for when, memory, in_use in ((0, seen[0], kv[0]), (len(kv) - 1, seen[-1], kv[-1])):
            pss = memory["target"].pss
            details = {"pss_mb": pss / MB, "rss_mb": memory["target"].rss / MB}
            details |= {"weights_mb": weights / MB, "kv_mb": in_use / MB}
            case = f"target after {when} rounds" if when else "target after start"
            figures.append(Figure("memory", case, (pss - weights - in_use) / MB, "MB", OVERHEAD_BAR, details))
        for name in PROCESSES:
            pss_mb = [memory[name].pss / MB for memory in seen]
            growth = pss_mb[-1] - pss_mb[1] - ((kv[-1] - kv[1]) / MB if name == "target" else 0.0)
            figures.append(Figure("memory", f"{name}, growth", growth, "MB", GROWTH_BAR, {"pss_mb": pss_mb}))
        return figures

    async def _prefix(self, server: TritonServer) -> Figure:
        size = self.options.prefix
        async with connect(server) as client:
            await time_to_first_token(client, self.prompts.tokens(size))
            pairs = await measure_prefix(client, self.prompts, size, self.options.repeats)
        ratio = statistics.median(warm / cold for cold, warm in pairs)
        details = {"cold_ms": [1e3 * cold for cold, _ in pairs], "warm_ms": [1e3 * warm for _, warm in pairs]}
        return Figure("prefix", f"{size} tokens", ratio, "of cold", PREFIX_BAR, details)

    async def _fairness(self, server: TritonServer, num_streams: int) -> Figure:
        options = self.options
        async with connect(server) as client:
            await time_to_first_token(client, self.prompts.tokens(100))
            seen = await measure_fairness(
                client, self.prompts, num_streams, options.prompt, options.prompts, options.drafter
            )
        alone, beside = percentile(seen.alone, 99), percentile(seen.beside, 99)
        details: dict[str, Any] = {"alone_p99_ms": 1e3 * alone, "beside_p99_ms": 1e3 * beside}
        details |= {"alone_p50_ms": 1e3 * percentile(seen.alone, 50)}
        details |= {"beside_p50_ms": 1e3 * percentile(seen.beside, 50)}
        details |= {"prompt_ttft_ms": [1e3 * seconds for seconds in seen.ttft_s]}
        details |= {"drafter": options.drafter, "prompt": options.prompt}
        return Figure("fairness", f"{num_streams} streams", beside / alone, "x", FAIRNESS_BAR, details)

    async def _overhead(self, server: TritonServer, num_streams: int, bar: float) -> Figure:
        stats = server.options.url(server.options.http_port, "v2/models/target/stats")
        async with connect(server) as client:
            seen = [
                await measure_overhead(client, stats, self.prompts, num_streams)
                for _ in range(self.options.repeats)
            ]
        outside, step = (1e3 * statistics.median(values) for values in zip(*seen, strict=True))
        return Figure("overhead", f"{num_streams} streams", outside, "ms", bar, {"step_ms": step})


def connect(server: TritonServer) -> AsyncGrpcClient:
    """A client of a server of ours."""
    return AsyncGrpcClient(f"127.0.0.1:{server.options.grpc_port}", timeout=600)


def show_table(figures: list[Figure]) -> Table:
    """The figures for people."""
    table = Table(title="Serving")
    for column in ("measure", "case", "value", "bar", "", "details"):
        table.add_column(column, justify="right" if column in ("value", "bar") else "left")
    for figure in figures:
        verdict = "[green]pass[/]" if figure.passed else "[red]miss[/]"
        details = ", ".join(f"{name} {_short(value)}" for name, value in figure.details.items())
        value, bar = f"{figure.value:.2f} {figure.unit}", f"{figure.bar:g}"
        table.add_row(figure.measure, figure.case, value, bar, verdict, details)
    return table


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_short(item) for item in value) + "]"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--measures", type=names, default=MEASURES, help="some of " + ",".join(MEASURES))
    add("--target", default="", help="Hugging Face id or folder; default: the default target")
    add("--config", default="", help="YAML file with engine options")
    add("--starts", type=int, default=3, help="servers started to measure the start")
    add("--rounds", type=int, default=3, help="rounds of load to measure memory")
    add("--prefix", type=int, default=1000, help="tokens of the cached prefix")
    add("--repeats", type=int, default=7, help="prompts to measure the prefix cache")
    add("--streams", type=counts, default=(1, 4, 16), help="streams that run beside the long prompt")
    add("--prompt", type=int, default=4000, help="tokens of the long prompt")
    add("--prompts", type=int, default=2, help="long prompts beside each number of streams")
    add("--drafter", default="none", help="drafter of the running streams")
    add("--out", type=Path, help="file the JSON lines are appended to")
    options = parser.parse_args()
    if unknown := set(options.measures) - set(MEASURES):
        parser.error(f"--measures: unknown '{unknown.pop()}'; allowed: {', '.join(MEASURES)}")
    return options


def main() -> int:
    """Returns the exit status."""
    console = Console(width=160)
    try:
        bench = Bench(options := parse_arguments())
        figures = []
        for figure in bench.run():
            figures.append(figure)
            Console(stderr=True, highlight=False).print(f"{figure.measure} {figure.case}: {figure.value:.2f}")
            if options.out:
                engine = _differing(bench.config)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(to_line(figure.record() | {"config": engine} | describe_machine()) + "\n")
    except (AngelSpecError, CheckError, PrepareError, ServerError) as error:
        Console(stderr=True).print(f"benchmark: {error}", style="red", markup=False)
        return 1
    console.print(show_table(figures))
    return 0 if all(figure.passed for figure in figures) else 1


def _differing(config: EngineConfig) -> dict[str, Any]:
    """The options that are not the defaults, the target's path apart; other paths as in the repository."""
    found = config.model_dump(exclude_defaults=True, exclude={"target"})
    return {
        name: value.removeprefix(f"{ROOT}/") if isinstance(value, str) else value
        for name, value in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
