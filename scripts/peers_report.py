"""Figures of a comparison: one record per server, concurrency and window, and a table of ratios.

Times are the client's.  Only good requests count, except in ``failed`` and ``duration_s``.

TTFT   from sending the request to the first event with text
TPOT   time per output token after the first: (end - first event with text) / (tokens - 1), where end is
       the event that says the generation is finished; one value per request
ITL    gap between neighbouring events with text; an event may carry several tokens, so compare TPOT
       where a server speculates
tokens_per_second   output tokens of good requests / time from the first sending to the last answer
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich.box import MARKDOWN
from rich.table import Table

from angelspec_client.metrics import percentile
from peers_stream import Reply

FIGURES = ("tokens_per_second", "ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms")
Record = Mapping[str, Any]


def tpot_s(reply: Reply) -> float:
    """Seconds per output token after the first; NaN for a single token."""
    if reply.tokens < 2:
        return float("nan")
    end = max(reply.text_times[-1], reply.finish_time or 0.0)
    return (end - reply.text_times[0]) / (reply.tokens - 1)


def summarize(replies: Sequence[Reply]) -> dict[str, Any]:
    """The figures of one window; None where there is nothing to measure."""
    good = [reply for reply in replies if reply.error is None]
    errors = [reply.error for reply in replies if reply.error is not None]
    duration = max(reply.end for reply in replies) - min(reply.start for reply in replies)
    tokens = sum(reply.tokens for reply in good)
    prompts = [reply.prompt_tokens for reply in good]
    ttft = [reply.text_times[0] - reply.start for reply in good]
    tpot = [tpot_s(reply) for reply in good if reply.tokens > 1]
    itl = [after - before for reply in good for before, after in pairwise(reply.text_times)]
    events = sum(len(reply.text_times) for reply in good)
    return {
        "requests": len(replies),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "output_tokens": tokens,
        "counted_by": "server" if all(reply.output_tokens is not None for reply in good) else "events",
        "tokens_per_event": round(tokens / events, 3) if events else None,
        "prompt_tokens": None if None in prompts else sum(prompts),
        "duration_s": round(duration, 4),
        "tokens_per_second": round(tokens / duration, 3) if good else None,
        "ttft_p50_ms": _milliseconds(ttft, 50),
        "tpot_p50_ms": _milliseconds(tpot, 50),
        "itl_p99_ms": _milliseconds(itl, 99),
    }


def _milliseconds(seconds: Sequence[float], percent: float) -> float | None:
    return round(1000.0 * percentile(np.array(seconds), percent), 3) if seconds else None


def ratios(ours: Sequence[Record], peer: Sequence[Record], figure: str) -> list[float]:
    """Ours / the peer's in every window that both measured."""
    pairs = [(a[figure], b[figure]) for a, b in zip(ours, peer, strict=False)]
    return [a / b for a, b in pairs if a is not None and b]


def show_ratio(values: Sequence[float]) -> str:
    """Median and, of several windows, the smallest and largest: 1.21 (1.15-1.30)."""
    if not values:
        return ""
    spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def make_table(records: Sequence[Record]) -> Table:
    """Medians of the windows, and the first server's ratios to each other one: ours / peer."""
    servers = list(dict.fromkeys(record["server"] for record in records))
    table = Table(box=MARKDOWN)
    headers = ["C", "server", "tokens/s", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms", "failed"]
    for header in [*headers, f"tokens/s {servers[0]}/it", f"TPOT {servers[0]}/it"]:
        table.add_column(header, justify="left" if header == "server" else "right", no_wrap=True)
    for concurrency in dict.fromkeys(record["concurrency"] for record in records):
        cells = {
            server: [r for r in records if (r["server"], r["concurrency"]) == (server, concurrency)]
            for server in servers
        }
        for server, cell in cells.items():
            found = [[record[figure] for record in cell if record[figure] is not None] for figure in FIGURES]
            medians = (f"{statistics.median(values):.1f}" if values else "" for values in found)
            failed = f"{sum(r['failed'] for r in cell)}/{sum(r['requests'] for r in cell)}"
            compared = [
                "" if server == servers[0] else show_ratio(ratios(cells[servers[0]], cell, figure))
                for figure in ("tokens_per_second", "tpot_p50_ms")
            ]
            table.add_row(str(concurrency), server, *medians, failed, *compared)
    return table
