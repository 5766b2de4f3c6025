"""The figures of a cell, a mode at a concurrency, out of its windows: one line of results.jsonl.

angelspec_client.metrics defines latency, TTFT, ITL and TPOT.  Of requests that failed only the number
counts.  tokens_per_second is the median of the windows; everything else is over all of them together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from angelspec_client import Generation
from angelspec_client.metrics import percentile, summarize
from benchmark_report import rounded
from experiment_config import AR, Experiment
from experiment_limits import AR_MODE
from load import Window
from server_counters import Counters


@dataclass(frozen=True)
class Measured:
    """One window and what the server says of it."""

    window: Window
    counters: Counters | None  # how much the server's own counters grew; None: they are not read
    memory_mb: Mapping[str, float]  # peak of each of the server's processes; empty: they are elsewhere


def make_cell(mode: str, concurrency: int, measured: Sequence[Measured]) -> dict[str, Any]:
    """What a mode did at a concurrency; None where nothing was measured.  mode: a drafter, none for AR."""
    windows = [each.window for each in measured]
    generations = [g for window in windows for g in window.generations.values()]
    summary = asdict(summarize(generations))
    latencies = sorted(1000.0 * generation.duration_s for generation in generations)
    counters = _sum([each.counters for each in measured])
    requests, failed = (sum(len(getattr(w, name)) for w in windows) for name in ("requests", "errors"))
    cell = {
        "mode": mode_name(mode),
        "concurrency": concurrency,
        **summary,
        "p90_ms": percentile(np.array(latencies), 90),
        "requests": requests,
        "failed": failed,
        "error_rate": failed / requests,
        "duration_s": sum(window.duration_s for window in windows),
        "tokens_per_second": statistics.median(window.tokens_per_second for window in windows),
        "draft_tokens": sum(g.total_draft_tokens for g in generations),
        "accepted_draft_tokens": sum(g.total_accepted_draft_tokens for g in generations),
        "acceptance_by_position": counters and counters.acceptance_by_position,
        "by_task": {task: _task(group) for task, group in _by_task(windows)},
        "windows": [_window(window) for window in windows],
        "identical": sum(window.identical for window in windows),
        "compared": sum(window.compared for window in windows),
        "harness_cpu_s": sum(window.cpu_s for window in windows),
        "server": _server(counters),
        "memory_mb": _peaks([each.memory_mb for each in measured]),
        "latencies_ms": latencies,
    }
    return rounded(cell)


def mode_name(drafter: str) -> str:
    """How results call a mode."""
    return AR_MODE if drafter == AR else drafter


def add_derived(cells: Sequence[Mapping[str, Any]], experiment: Experiment) -> list[dict[str, Any]]:
    """The cells with what follows from their figures: speedup, cost_per_million, harness_us_per_token.

    A window's speed-up is to the window of plain decoding beside it; the cell's is the median of them.
    """
    plain = {cell["concurrency"]: cell for cell in cells if cell["mode"] == AR_MODE}
    derived = []
    for cell in cells:
        beside = plain.get(cell["concurrency"], {"windows": []})
        rates = (
            (mine["tokens_per_second"], other["tokens_per_second"])
            for mine, other in zip(cell["windows"], beside["windows"], strict=False)
        )
        ratios = [mine / other for mine, other in rates if other]
        per_hour, tokens = 3600.0 * cell["tokens_per_second"], cell["output_tokens"]
        price = experiment.price_per_hour
        figures = {
            "speedup": statistics.median(ratios) if ratios else None,
            "cost_per_million": 1e6 * price / per_hour if price and per_hour else None,
            "harness_us_per_token": 1e6 * cell["harness_cpu_s"] / tokens if tokens else None,
        }
        derived.append({**cell, **figures})
    return derived


def _by_task(windows: Sequence[Window]) -> Iterator[tuple[str, list[Generation]]]:
    """(task, its generations)."""
    groups: dict[str, list[Generation]] = {}
    for window in windows:
        for number, generation in window.generations.items():
            groups.setdefault(window.requests[number].task, []).append(generation)
    yield from sorted(groups.items())


def _task(generations: Sequence[Generation]) -> dict[str, Any]:
    names = ("requests", "output_tokens", "acceptance_length", "p50_ms", "ttft_p50_ms", "tpot_p50_ms")
    summary = asdict(summarize(generations))
    return {name: summary[name] for name in names}


def _window(window: Window) -> dict[str, Any]:
    tasks = {
        task: {
            "output_tokens": sum(g.num_output_tokens for g in group),
            "request_seconds": sum(g.duration_s for g in group),
        }
        for task, group in _by_task([window])
    }
    return {
        "tokens_per_second": window.tokens_per_second,
        "duration_s": window.duration_s,
        "requests": len(window.requests),
        "failed": len(window.errors),
        "output_tokens": window.output_tokens,
        "harness_cpu_s": window.cpu_s,
        "by_task": tasks,
    }


def _sum(counters: Sequence[Counters | None]) -> Counters | None:
    known = [each for each in counters if each is not None]
    return sum(known, Counters()) if len(known) == len(counters) else None


def _server(counters: Counters | None) -> dict[str, int] | None:
    names = ("requests", "failed", "output_tokens", "draft_tokens", "accepted_draft_tokens")
    return None if counters is None else {name: round(getattr(counters, name)) for name in names}


def _peaks(memory_mb: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    names = dict.fromkeys(name for each in memory_mb for name in each)
    return {name: max(each.get(name, 0.0) for each in memory_mb) for name in names} or None
