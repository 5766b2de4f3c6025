"""A table of text cells, for the terminal and the page alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class TableData:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    names: int = 1  # so many columns at the left are names, the others numbers


def to_markdown(data: TableData) -> str:
    """For the terminal, and to paste into a README."""
    table = Table(box=MARKDOWN)
    for index, column in enumerate(data.columns):
        left = index < data.names and column != "in flight"
        table.add_column(Text(column), justify="left" if left else "right", no_wrap=True)
    for row in data.rows:
        table.add_row(*(Text(cell.replace("|", "\\|")) for cell in row))
    # As wide as it needs to be, also in a pipe: a cut figure would be a wrong one.
    console = Console(file=StringIO(), width=1000)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def without_empty_columns(data: TableData) -> TableData:
    """The same table; lines with the basic fields leave many figures out."""
    kept = [index for index, _ in enumerate(data.columns) if any(row[index] for row in data.rows)]
    rows = tuple(tuple(row[index] for index in kept) for row in data.rows)
    return replace(data, columns=tuple(data.columns[index] for index in kept), rows=rows)


def show_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def show_length(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def number(value: float | None) -> str:
    """One decimal below 100, thousands separated above; empty for None."""
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
