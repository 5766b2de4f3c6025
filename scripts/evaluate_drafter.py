"""Measure drafters on prompts, through the server's own loop in this process.

    python scripts/evaluate_drafter.py --drafters ngram,dfly=runs/dfly/best --prompts prompts/ --out FILE

Prints for each temperature the acceptance length by task, how far drafts get, what they cost beside the
target's step, and the perplexity of the answers under the target.  Every answer is compared with that of
plain decoding: its tokens must be the same.  --out gets one JSON line per drafter, temperature and task.

Drafts have a fixed length unless --adaptive is given, so that acceptance is a property of the drafter.  Times
are of --rows answers at a time; --wall also times one answer at a time, plain decoding and drafters in turns.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

# As the server sets them.  Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

import torch
from rich.console import Console

from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.training.progress import ProgressBar
from benchmark_report import describe_machine, to_line
from evaluation_figures import Cost, Wall, cost, same_perplexity, wall, warning
from evaluation_measure import Answer, ScoringRunner
from evaluation_models import LoadedDrafter, Tasks, load_drafter, load_target, load_tasks
from evaluation_options import parse_arguments
from evaluation_report import AR, Result, drafter_table, records, task_table, wall_table
from evaluation_serving import EvaluationError, Served, make_requests, serve
from loadtest.task_sets import PromptError


class Evaluation:
    """A target, drafters and prompts, served at one temperature after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load all of it.  Raises EvaluationError, LoadError, PromptError."""
        self.options = options
        self.tasks: Tasks = load_tasks(
            options.prompts, options.target, options.per_set, options.seed, options.max_tokens
        )
        # The tasks take turns, so that no task's answers are computed beside their like alone.
        self.order = [(task, n) for n in range(self.per_task) for task in self.tasks]
        longest = max(len(prompt) for prompts in self.tasks.values() for prompt in prompts)
        dtype = getattr(torch, options.dtype)
        self.runner: ScoringRunner = load_target(
            options.target, dtype, options.device, options.rows, longest + options.max_tokens
        )
        self.drafters: list[LoadedDrafter] = [
            load_drafter(choice, options.target, self.runner, options.rows, options.draft_tokens)
            for choice in options.drafters
        ]

    @property
    def per_task(self) -> int:
        """Prompts of each task."""
        return min(len(prompts) for prompts in self.tasks.values())

    def results(self, temperature: float) -> list[Result]:
        """Plain decoding, then each drafter."""
        requests = self._requests(temperature)
        found = [Result(AR, temperature, *self._answers(AR, requests, None))]
        for each in self.drafters:
            label = each.choice.label
            found.append(
                Result(
                    label,
                    temperature,
                    *self._answers(label, requests, each),
                    num_draft_tokens=each.num_draft_tokens,
                    checkpoint=each.choice.path,
                    spec=each.spec,
                )
            )
        return found

    def walls(self, temperature: float) -> dict[str, Wall]:
        """Times of one answer at a time, by label; every prompt is answered by all in turns."""
        served: dict[str, list[Served]] = {}
        for request in self._requests(temperature)[: self.options.wall]:
            for each in (None, *self.drafters):
                label = each.choice.label if each else AR
                served.setdefault(label, []).append(self._run([request], each, rows=1, scores=False))
        return {label: wall(runs, served[AR]) for label, runs in served.items()}

    def _requests(self, temperature: float) -> list[GenerationRequest]:
        prompts = [self.tasks[task][n] for task, n in self.order]
        return make_requests(prompts, temperature, self.options.seed, self.options.max_tokens)

    def _answers(
        self, label: str, requests: list[GenerationRequest], drafter: LoadedDrafter | None
    ) -> tuple[dict[str, list[Answer]], Cost | None]:
        temperature = requests[0].sampling.temperature
        with ProgressBar(f"{label}, temperature {temperature:g}", len(requests)) as bar:
            served = self._run(requests, drafter, self.options.rows, on_done=bar.update)
        by_task: dict[str, list[Answer]] = {task: [] for task in self.tasks}
        for (task, _), answer in zip(self.order, served.answers, strict=True):
            by_task[task].append(answer)
        return by_task, cost(served.times)

    def _run(
        self, requests: list[GenerationRequest], drafter: LoadedDrafter | None, rows: int, **more: Any
    ) -> Served:
        if drafter is None:
            return serve(self.runner, requests, rows, **more)
        drafted = [replace(each, drafter=0, num_draft_tokens=drafter.num_draft_tokens) for each in requests]
        return serve(self.runner, drafted, rows, drafter.drafter, adaptive=self.options.adaptive, **more)


def report(evaluation: Evaluation, temperature: float) -> list[str]:
    """Evaluate at one temperature: print, append to --out.  Returns what is wrong with the answers."""
    options, console = evaluation.options, Console(width=160)
    results = evaluation.results(temperature)
    walls = evaluation.walls(temperature) if options.wall else {}
    about = {
        "target": Path(options.target).name,
        **{name: getattr(options, name) for name in ("max_tokens", "rows", "adaptive", "seed", "dtype")},
        **describe_machine(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as out:
            for result in results:
                for line in records(result, results[0], walls.get(result.label), about):
                    out.write(to_line(line) + "\n")
    console.print(task_table(results), drafter_table(results), *([wall_table(walls)] if walls else []))
    problems = []
    for result in results[1:]:
        if text := warning(result.label, temperature, result.overall, result.spec):
            print(text)
        identical, compared = result.identical(results[0])
        if identical < compared:
            problems.append(f"{result.label} changed {compared - identical} of {compared} answers")
        elif not same_perplexity(result.overall, results[0].overall, evaluation.runner.batch_invariant):
            problems.append(f"{result.label} changed the target's probabilities of the same tokens")
    if not problems:
        print(f"temperature {temperature:g}: all tokens and perplexities are those of plain decoding")
    return [f"temperature {temperature:g}: {problem}" for problem in problems]


def main() -> None:
    options = parse_arguments(__doc__)
    torch.set_num_threads(options.threads)
    problems: list[str] = []
    try:
        evaluation = Evaluation(options)
        print(
            f"{len(evaluation.tasks)} tasks of {evaluation.per_task} prompts: {', '.join(evaluation.tasks)}; "
            f"up to {options.max_tokens} tokens, {options.rows} answers at a time"
        )
        for temperature in options.temperatures:
            problems += report(evaluation, temperature)
    except (EvaluationError, LoadError, OSError, PromptError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
    if problems:
        raise SystemExit("NOT LOSSLESS: " + "; ".join(problems))


if __name__ == "__main__":
    main()
