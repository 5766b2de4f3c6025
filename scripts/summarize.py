"""What a measured run says: a verdict, tables to paste, and a page with pictures.

    python scripts/summarize.py results.jsonl --price-per-hour 1.20 --html report.html

Reads result lines of run_experiment, and files of others that have the basic fields only (see
report_cell); of several files the lines are put together.  Plain decoding (AR) is the mode that
--baseline names.  Lines that do not fit are refused with their number, and nothing is reported then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from report_checks import summary
from report_compare import collect
from report_page import write_page
from report_records import ResultsError, read_lines
from report_table import to_markdown
from report_tables import make_tables
from report_verdict import judge


@dataclass(frozen=True)
class Options:
    """The command line."""

    results: tuple[Path, ...]
    price_per_hour: float | None
    html: Path | None
    baseline: str


def read_options(arguments: Sequence[str]) -> Options:
    """Raises ResultsError for a price that is none; exits for other mistakes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("results", nargs="+", type=Path, help="files of result lines")
    add("--price-per-hour", help="of the machine, in any currency, for costs (default: the settings')")
    add("--html", type=Path, help="also write a page with pictures, in one file")
    add("--baseline", default="ar", help="the mode that is plain decoding (default: ar)")
    values = parser.parse_args(arguments)
    price = None if values.price_per_hour is None else check_price(values.price_per_hour)
    return Options(tuple(values.results), price, values.html, values.baseline)


def check_price(text: str) -> float:
    """A price per hour from the command line.  Raises ResultsError."""
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise ResultsError(f"--price-per-hour must be a positive number, not '{text}'")
    return price


def run(options: Options, console: Console) -> None:
    """Raises ResultsError."""
    results = collect(read_lines(options.results), options.baseline)
    verdict = judge(results, options.baseline)
    tables = make_tables(results, options.price_per_hour)
    if options.html is not None:
        write_page(options.html, results, verdict, tables)
    console.print(verdict.headline, style="bold", markup=False)
    for reason in verdict.reasons:
        console.print(f"- {reason.text}", style="yellow" if reason.kind == "warning" else None, markup=False)
    console.print(f"- Checked: {'; '.join(summary(results))}.", markup=False)
    for table in tables:
        console.print(f"\n{table.title}. {table.note}\n", markup=False)
        console.print(to_markdown(table), markup=False)


def main() -> int:
    """Returns the exit status."""
    try:
        run(read_options(sys.argv[1:]), Console(highlight=False, soft_wrap=True))
    except ResultsError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"summarize: {error}", style="red", markup=False
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
