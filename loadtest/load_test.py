"""The running load test, as far as one process of Locust knows it: settings, prompts, records."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from loadtest.records import Record
from loadtest.settings import Settings, SettingsError
from loadtest.task_sets import Prompt, PromptError, load_prompts
from loadtest.tiers import Window, make_cell, schedule, to_line

LOGGER = logging.getLogger(__name__)
FIRST_NUMBERS_APART = 1_000_000  # so that no two workers send the same requests
ENOUGH_IN_FLIGHT = 0.95  # of the users, else the figures are of fewer


class LoadTest:
    """State of a test.  Users add records; workers send them to the master, which makes the figures."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.prompts: Sequence[Prompt] = ()
        self.records: list[Record] = []
        self._numbers: Iterator[int] = itertools.count()

    def prepare(self, options: Mapping[str, Any]) -> bool:
        """Read options and prompts; whether that worked, else it is logged why not."""
        try:
            self.settings = Settings.from_options(options)
            self.prompts = _cached_prompts(self.settings.prompts, self.settings.seed)
        except (SettingsError, PromptError) as error:
            LOGGER.error(error)
            return False
        return True

    def begin(self, worker_index: int) -> None:
        """Forget the requests of an earlier test and start with the first prompt again."""
        self.records = []
        self._numbers = itertools.count(worker_index * FIRST_NUMBERS_APART)

    def next_request(self) -> tuple[int, Prompt]:
        """The number of a request, and its prompt: they take turns."""
        number = next(self._numbers)
        return number, self.prompts[number % len(self.prompts)]

    def report(self, data: dict[str, Any]) -> None:
        """On a worker: move the records into what is sent to the master."""
        data["records"] = [record.to_message() for record in self.records]
        self.records = []

    def receive(self, data: Mapping[str, Any]) -> None:
        """On the master: take the records out of what a worker has sent."""
        self.records += [Record.from_message(message) for message in data.get("records", ())]

    def finish(self, began: float, ended: float) -> list[dict[str, Any]]:
        """Log the figures of every tier that was complete, and append them to the file of results.

        Times are in seconds since the epoch.
        """
        assert self.settings is not None
        cells = []
        for tier in schedule(self.settings):
            window = Window.of(tier, began)
            if window.end <= ended:
                cells.append(make_cell(window, self.records, self.settings))
                LOGGER.info(_line_for_people(cells[-1]))
                if cells[-1]["in_flight"] < ENOUGH_IN_FLIGHT * tier.users:
                    LOGGER.warning(
                        f"on average only {cells[-1]['in_flight']:.1f} requests of these users were in "
                        "flight: they failed, or this machine is too slow for them (add workers)"
                    )
        if self.settings.results is not None:
            conditions = _conditions(self.settings, began)
            with self.settings.results.open("a", encoding="utf-8") as file:
                file.writelines(to_line({**cell, **conditions}) + "\n" for cell in cells)
        return cells


def _conditions(settings: Settings, began: float) -> dict[str, Any]:
    return {
        "experiment": "locust",
        "versions": {"locust": version("locust")},
        "settings": asdict(settings) | {"results": str(settings.results)},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
    }


def _line_for_people(cell: Mapping[str, Any]) -> str:
    line = (
        f"{cell['concurrency']} users: {cell['tokens_per_second']:.1f} tokens/s, "
        f"{cell['requests']} requests, {cell['failed']} failed"
    )
    if cell["requests"]:
        line += (
            f", p50 {cell['p50_ms']:.0f} ms, p99 {cell['p99_ms']:.0f} ms, TTFT {cell['ttft_p50_ms']:.0f} ms, "
            f"ITL {cell['itl_p50_ms']:.1f} ms, acceptance length {cell['acceptance_length']:.2f}"
        )
    return line


@functools.cache
def _cached_prompts(sources: tuple[str, ...], seed: int) -> list[Prompt]:
    return load_prompts(*sources, seed=seed)
