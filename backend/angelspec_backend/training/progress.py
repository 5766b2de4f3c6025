"""Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Between two lines when the output is not a terminal."""


class ProgressBar:
    """Counts steps of known number; extra text (losses, rates) is shown behind the bar."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self._title, self._total, self._start, self._done = title, total, done, done
        self._console = Console()
        self._begin = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=done, text="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begin

    def update(self, done: int, text: str = "") -> None:
        """Show that ``done`` steps are done."""
        self._done = done
        self._bar.update(self._task, completed=done, text=text)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line >= LINE_SECONDS or done >= self._total):
            self._last_line = now
            rate = (done - self._start) / max(self.seconds, 1e-9)
            left = (self._total - done) / rate if rate > 0 else float("inf")
            eta = f"{left / 3600:.1f} h" if left >= 3600 else f"{left / 60:.1f} min"
            print(f"{self._title} {done}/{self._total}, {eta} left, {text}", flush=True)
