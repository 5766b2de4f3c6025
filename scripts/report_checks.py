"""What is wrong with the measurement itself: failures, counts that disagree, texts that differ, a mixture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from report_cell import Cell
from report_compare import Results

MAX_FAILED_SHARE = 0.01
"""A cell in which more requests fail shows no gain, whatever its speed."""


def check(results: Results) -> list[str]:
    """One sentence per finding; none when all is well."""
    found: list[str] = []
    for (series, concurrency), cell in results.cells.items():
        place = f"{series} at {concurrency}"
        found += [
            f"{place}: {text}" for text in (*check_failures(cell), *check_counts(cell), *check_texts(cell))
        ]
    return [*found, *check_windows(results), *check_conditions(results.cells.values()), *results.notes]


def summary(results: Results) -> list[str]:
    """How much was checked, for the conditions: one sentence per kind of check."""
    cells = list(results.cells.values())
    counted = [cell for cell in cells if cell.server is not None]
    compared = [cell for cell in cells if cell.compared]
    failed, sent = sum(cell.failed or 0 for cell in cells), sum(cell.requests for cell in cells)
    sentences = [f"{failed:,} of {sent:,} requests failed"]
    if counted:
        agree = sum(not check_counts(cell) for cell in counted)
        sentences.append(f"client and server counted the same in {agree} of {len(counted)} cells")
    if compared:
        same = sum(cell.identical or 0 for cell in compared)
        sentences.append(
            f"{same:,} of {sum(cell.compared or 0 for cell in compared):,} repeated answers are identical"
        )
    timed = [cell for cell in cells if cell.harness_cpu_s is not None]
    tokens = sum(cell.output_tokens for cell in timed)
    if tokens:
        share = sum(cell.harness_cpu_s or 0.0 for cell in timed) / tokens * 1e3
        sentences.append(f"the load generator took {100 * share:.1f}% of a core per 1,000 tokens/s")
    return sentences


def check_failures(cell: Cell) -> list[str]:
    """Requests that failed."""
    share = cell.failed_share
    if not share:
        return []
    count = f" ({cell.failed} requests)" if cell.failed else ""
    return [f"{100 * share:.1f}% of the requests failed{count}"]


def check_counts(cell: Cell) -> list[str]:
    """The client's counts against the server's own: they must be equal."""
    if cell.server is None:
        return []
    pairs = {
        "requests": (cell.requests, cell.server.requests),
        "failed requests": (cell.failed, cell.server.failed),
        "output tokens": (cell.output_tokens, cell.server.output_tokens),
    }
    return [
        f"the client counted {ours:,} {what}, the server {theirs:,}"
        for what, (ours, theirs) in pairs.items()
        if ours is not None and theirs is not None and ours != theirs
    ]


def check_texts(cell: Cell) -> list[str]:
    """Answers that differ from the first one to the same request; lossless decoding has none."""
    if cell.compared is None or cell.identical is None or cell.identical >= cell.compared:
        return []
    return [
        f"{cell.compared - cell.identical} of {cell.compared} answers differ from the first to their request"
    ]


def check_windows(results: Results) -> list[str]:
    """Cells without a partner, or with fewer windows than their partner."""
    found = []
    for series in results.drafters:
        compared = results.compare(series)
        alone = {cell.concurrency for cell in results.of(series)} - {c.concurrency for c in compared}
        if alone and series in results.baselines:
            found.append(f"{series}: no plain decoding at {_list(sorted(alone))} to compare with")
        for one in compared:
            ours, base = len(one.cell.windows or ()), len(one.base.windows or ())
            if one.windows and ours != base:
                found.append(
                    f"{series} at {one.concurrency}: {ours} windows, plain decoding {base}; "
                    f"the first {min(ours, base)} are compared"
                )
    return found


def check_conditions(cells: Iterable[Cell]) -> list[str]:
    """Lines that do not come from one machine, one version and one revision."""
    known = list(cells)
    found = []
    for what in ("hardware", "versions", "git"):
        values = distinct(getattr(cell, what) for cell in known)
        if len(values) > 1:
            found.append(f"The lines differ in {what}: {' | '.join(_short(value) for value in values)}")
    return found


def distinct(values: Iterable[Any]) -> list[Any]:
    """Different values in their order, without None."""
    by_text = {json.dumps(value, sort_keys=True, default=str): value for value in values if value is not None}
    return list(by_text.values())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items() if part is not None)
    return str(value)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
