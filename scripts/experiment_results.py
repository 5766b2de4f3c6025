"""results.jsonl: one line per cell, which a run that was stopped goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark_report import to_line
from experiment_cells import mode_name
from experiment_config import Experiment, differing_keys


class ResultsError(ValueError):
    """The file cannot be gone on with; the message says why."""


class Results:
    """The cells of one experiment in a file.

    The cells of a concurrency are written together when all of them are measured, since their windows
    belong together.  What a kill left of a line is removed.
    """

    def __init__(self, path: Path, experiment: Experiment, settings: dict[str, Any]) -> None:
        """Raises ResultsError: the file holds something else, or results of other settings."""
        self.path = path
        self._experiment = experiment
        self._settings = settings
        self.cells: list[dict[str, Any]] = []
        if path.exists():
            self._read()

    def missing(self, concurrency: int) -> list[str]:
        """The modes, as drafters, that are not measured yet at a concurrency."""
        there = {cell["mode"] for cell in self.cells if cell["concurrency"] == concurrency}
        return [mode for mode in self._experiment.modes if mode_name(mode) not in there]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be measured."""
        return not any(self.missing(concurrency) for concurrency in self._experiment.concurrency)

    def append(self, cells: Sequence[dict[str, Any]]) -> None:
        """Add cells, safely on the disk before it returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(to_line(cell | {"settings": self._settings}) + "\n" for cell in cells))
            file.flush()
            os.fsync(file.fileno())
        self.cells += cells

    def _read(self) -> None:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ResultsError(f"cannot read {self.path}: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self.cells.append(self._check(line, f"{self.path}:{number}"))
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))

    def _check(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            cell = json.loads(line)
            settings = cell["settings"]
            _ = cell["mode"], cell["concurrency"], cell["windows"]
        except (ValueError, TypeError, KeyError):
            raise ResultsError(f"{where} is no line of results; name another file with --out") from None
        if differing := differing_keys(settings, self._settings):
            key = differing[0]
            raise ResultsError(
                f"{where} was measured with other settings: {key} was {settings.get(key)!r}, now "
                f"{self._settings.get(key)!r}; name another file with --out"
            )
        return cell
