"""How an evaluation is written down: JSON lines and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from angelspec_backend.drafters.spec import DrafterSpec
from evaluation_figures import Acceptance, Cost, Wall, acceptance
from evaluation_measure import Answer

AR = "ar"
"""How plain autoregressive decoding is called."""


@dataclass(frozen=True)
class Result:
    """One drafter at one temperature, on all tasks."""

    label: str  # AR, or how the drafter was called
    temperature: float
    answers: Mapping[str, Sequence[Answer]]  # by task
    cost: Cost | None
    num_draft_tokens: int = 0
    checkpoint: str = ""
    spec: DrafterSpec | None = None  # of a trained drafter

    def by_task(self) -> dict[str, Acceptance]:
        """Figures of each task."""
        return {task: acceptance(answers) for task, answers in self.answers.items()}

    @property
    def overall(self) -> Acceptance:
        """Figures of all answers together."""
        return acceptance([answer for answers in self.answers.values() for answer in answers])

    @property
    def mean_length(self) -> float:
        """Acceptance length, averaged over the tasks: each counts alike, however long its answers are."""
        found = [each.acceptance_length for each in self.by_task().values()]
        lengths = [length for length in found if length is not None]
        return sum(lengths) / len(lengths) if lengths else math.nan

    def identical(self, plain: Result, task: str | None = None) -> tuple[int, int]:
        """(answers whose tokens are those of plain decoding, answers)."""
        tasks = [task] if task else list(self.answers)
        pairs = [pair for name in tasks for pair in zip(self.answers[name], plain.answers[name], strict=True)]
        return sum(mine.token_ids == other.token_ids for mine, other in pairs), len(pairs)


def records(
    result: Result, plain: Result, timed: Wall | None, about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One record per task.  timed: one answer at a time; about: what all records of the evaluation share."""
    spent, timed = result.cost, timed or Wall(None, None, None, None)
    lines = []
    for task, figures in result.by_task().items():
        identical, compared = result.identical(plain, task)
        lines.append(
            {
                "drafter": result.label,
                "checkpoint": result.checkpoint,
                "temperature": result.temperature,
                "task": task,
                "num_draft_tokens": result.num_draft_tokens,
                **asdict(figures),
                "identical": identical,
                "compared": compared,
                "cost_rows": spent.num_rows if spent else None,
                "draft_ms": spent.draft_ms if spent else None,
                "target_ms": spent.target_ms if spent else None,
                "draft_share": spent.share if spent else None,
                "ar_target_ms": plain.cost.target_ms if plain.cost else None,
                **{f"wall_{name}": value for name, value in asdict(timed).items()},
                **about,
            }
        )
    return [{name: _rounded(value) for name, value in line.items()} for line in lines]


def task_table(results: Sequence[Result]) -> Table:
    """Acceptance lengths by task, for one temperature.  The first result is that of plain decoding."""
    plain = results[0]
    table = Table(
        box=MARKDOWN, title=f"Acceptance length at temperature {plain.temperature:g}", title_justify="left"
    )
    for header in ("task", "answers", "tokens", *(each.label for each in results)):
        table.add_column(header, justify="left" if header == "task" else "right", no_wrap=True)
    columns = [each.by_task() for each in results]
    for task, figures in columns[0].items():
        lengths = [_show(column[task].acceptance_length, ".2f") for column in columns]
        table.add_row(task, str(figures.requests), str(figures.output_tokens), *lengths)
    all_of = plain.overall
    means = [_show(each.mean_length, ".2f") for each in results]
    table.add_row("mean over tasks", str(all_of.requests), str(all_of.output_tokens), *means)
    return table


def drafter_table(results: Sequence[Result]) -> Table:
    """What each drafter costs and how far its drafts get, all tasks together, for one temperature."""
    plain = results[0]
    table = Table(box=MARKDOWN, title=f"Drafters at temperature {plain.temperature:g}", title_justify="left")
    headers = ("drafter", "drafts", "length", "first", "survival by position", "draft ms", "target ms")
    for header in (*headers, "share", "of AR step", "perplexity", "identical"):
        table.add_column(header, justify="left" if header in ("drafter", headers[4]) else "right")
    for result in results:
        figures, spent = result.overall, result.cost
        identical, compared = result.identical(plain)
        of_plain = spent.draft_ms / plain.cost.target_ms if spent and plain.cost else None
        table.add_row(
            result.label,
            str(result.num_draft_tokens),
            _show(result.mean_length, ".2f"),
            _show(figures.first_acceptance, ".0%"),
            " ".join(f"{100 * each:.0f}" for each in figures.acceptance_by_position),
            _show(spent.draft_ms if spent else None, ".2f"),
            _show(spent.target_ms if spent else None, ".2f"),
            _show(spent.share if spent else None, ".0%"),
            _show(of_plain, ".0%"),
            _show(figures.perplexity, ".4f"),
            f"{identical}/{compared}",
        )
    return table


def wall_table(walls: Mapping[str, Wall]) -> Table:
    """One answer at a time, by label; that of plain decoding is among them."""
    table = Table(box=MARKDOWN, title="One answer at a time", title_justify="left")
    for header in ("drafter", "ms per token", "speed-up", "draft ms", "target ms", "share", "of AR step"):
        table.add_column(header, justify="left" if header == "drafter" else "right")
    plain = walls[AR].target_ms
    for label, each in walls.items():
        times = (each.ms_per_token, each.speedup, each.draft_ms, each.target_ms)
        shares = [
            each.draft_ms / ms if each.draft_ms is not None and ms else None for ms in (each.target_ms, plain)
        ]
        table.add_row(
            label, *(_show(time, ".2f") for time in times), *(_show(share, ".0%") for share in shares)
        )
    return table


def _show(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def _rounded(value: Any) -> Any:
    """Six decimals are enough, and JSON has no NaN."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
