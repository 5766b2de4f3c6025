"""The figures of the measuring tools beside each other: one record per cell, what to distrust, a table.

A cell is a tool's runs of one mode at one concurrency.  Its mode is the drafter's name, with the tool's in
brackets when it is not our own: "ar (aiperf)".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import MARKDOWN
from rich.table import Table

from angelspec_client.metrics import percentile
from angelspec_client.results import acceptance_length
from benchmark_report import rounded
from experiment_cells import mode_name
from server_counters import Counters
from tool_runs import Measured

LOADS = {"perf_analyzer": "load", "aiperf": "load-http"}
"""Our own load over the protocol that a tool speaks."""
TOKENS_TOLERANCE = 0.005
"""Share by which a tool's output tokens may differ from the server's before that is said."""


@dataclass(frozen=True)
class ToolWindow:
    """One run of a tool, and what the server counted meanwhile."""

    measured: Measured
    server: Counters  # differences over the run


def name_mode(drafter: str, tool: str) -> str:
    """The mode of a record."""
    return mode_name(drafter) if tool == "load" else f"{mode_name(drafter)} ({tool})"


def make_record(tool: str, drafter: str, concurrency: int, windows: Sequence[ToolWindow]) -> dict[str, Any]:
    """One line of results: sums and percentiles over all windows, rates as medians of the windows."""
    runs = [window.measured for window in windows]
    requests, failed = sum(run.requests for run in runs), sum(run.failed for run in runs)
    latency_ms = np.concatenate([run.latency_ms for run in runs])
    ttft_ms = np.concatenate([run.ttft_ms for run in runs])
    tpot_ms = np.concatenate([run.tpot_ms for run in runs])
    itl_ms = np.concatenate([np.zeros(0) if run.itl_ms is None else run.itl_ms for run in runs])
    server = sum((window.server for window in windows), Counters())
    figures = {
        "mode": name_mode(drafter, tool),
        "tool": tool,
        "drafter": drafter,
        "concurrency": concurrency,
        "requests": requests,
        "failed": failed,
        "error_rate": failed / requests if requests else None,
        "first_error": next((run.first_error for run in runs if run.first_error), None),
        "output_tokens": sum(run.output_tokens for run in runs),
        "duration_s": sum(run.duration_s for run in runs),
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "p50_ms": percentile(latency_ms, 50),
        "p90_ms": percentile(latency_ms, 90),
        "p99_ms": percentile(latency_ms, 99),
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p99_ms": percentile(ttft_ms, 99),
        "ttft_mean_ms": float(ttft_ms.mean()) if len(ttft_ms) else None,
        "itl_p50_ms": percentile(itl_ms, 50),
        "itl_p99_ms": percentile(itl_ms, 99),
        "tpot_p50_ms": percentile(tpot_ms, 50),
        "latencies_ms": np.sort(latency_ms).tolist(),
        "acceptance_length": acceptance_length(int(server.output_tokens), int(server.accepted_draft_tokens)),
        "draft_tokens": int(server.draft_tokens),
        "accepted_draft_tokens": int(server.accepted_draft_tokens),
        "acceptance_by_position": server.acceptance_by_position,
        "windows": [_window_record(window) for window in windows],
        "server": {
            "requests": int(server.requests),
            "failed": int(server.failed),
            "output_tokens": int(server.output_tokens),
            "cached_tokens": int(server.cached_tokens),
            "ttft_mean_ms": server.ttft_mean_ms,
            "request_mean_ms": server.request_mean_ms,
        },
        "stated": [dict(run.stated) for run in runs],
    }
    return rounded(figures | {"differences": find_differences(figures)})


def _window_record(window: ToolWindow) -> dict[str, Any]:
    run = window.measured
    return {
        "tokens_per_second": run.tokens_per_second,
        "duration_s": run.duration_s,
        "requests": run.requests,
        "failed": run.failed,
        "output_tokens": run.output_tokens,
    }


def find_differences(record: Mapping[str, Any]) -> list[str]:
    """Where a tool and the server's counters do not agree, or its figures do not mean what they seem to."""
    server, found = record["server"], []
    if server["requests"] != record["requests"]:
        found.append(f"sent {record['requests']} requests, the server ended {server['requests']}")
    if (hidden := server["failed"] - record["failed"]) > 0:
        found.append(f"counts {hidden} requests as successes that failed by the server's counters")
    if hidden < 0:
        found.append(f"counts {-hidden} requests as failed that ended well by the server's counters")
    tokens, counted = record["output_tokens"], server["output_tokens"]
    if abs(tokens - counted) > TOKENS_TOLERANCE * counted:
        share = f" ({tokens / counted - 1:+.1%})" if counted else ""
        found.append(f"counts {tokens} output tokens, the server {counted}{share}")
    if server["cached_tokens"]:
        found.append(
            f"{server['cached_tokens']} prompt tokens came from the prefix cache, so later runs had less to "
            "do; serve with prefix_caching: false"
        )
    return found


def make_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The cells for people, as a Markdown table.

    by server: the server's output tokens over the tool's time.  ITL: time per token after the first chunk,
    the median of the requests' means.  TTFT mean: the tool's / the server's.  to load: the ratio of the
    tool's tokens/s to those of our own load over the same protocol.
    """
    table = Table(box=MARKDOWN)
    headers = ("C", "mode", "tool", "tokens/s", "by server", "to load", "TTFT p50", "ITL", "p50 ms", "p99 ms")
    for header in (*headers, "TTFT mean", "failed"):
        table.add_column(header, justify="left" if header in ("mode", "tool") else "right", no_wrap=True)
    loads = {(r["tool"], r["drafter"], r["concurrency"]): r["tokens_per_second"] for r in records}
    for record in records:
        tool, server = record["tool"], record["server"]
        load = loads.get((LOADS.get(tool), record["drafter"], record["concurrency"]))
        times = ("ttft_p50_ms", "tpot_p50_ms", "p50_ms", "p99_ms")
        table.add_row(
            str(record["concurrency"]),
            mode_name(record["drafter"]),
            tool,
            show(record["tokens_per_second"]),
            show(server["output_tokens"] / record["duration_s"]),
            f"{record['tokens_per_second'] / load:.3f}" if load else "",
            *(show(record[name]) for name in times),
            f"{show(record['ttft_mean_ms'])} / {show(server['ttft_mean_ms'])}",
            f"{record['failed']} / {server['failed']}",
        )
    return table


def show(value: float | None) -> str:
    """One decimal; nothing for None."""
    return "" if value is None else f"{value:.1f}"
