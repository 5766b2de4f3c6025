"""Plain decoding (AR) against each drafter over tiers of concurrency, as an experiment file says.

    python scripts/run_experiment.py scripts/experiments/smoke.yaml [key=value …] [--out results.jsonl]

It starts the server with the options in the file, or measures the one named by its key server.  The
modes take turns window by window, in an order that turns round with every window, so that a slow phase
of the machine hits them alike; all get the same prompts and seeds.  results.jsonl gets a line per cell,
a mode at a concurrency.  Run again after it was stopped, it keeps what is complete and measures the rest.

After the last cell it shows a table and holds every mode against the rollout limits.  Exit status: 0 all
limits are kept, 1 an error, 3 a limit is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from angelspec_backend.core.yaml_options import OptionsError
from angelspec_client import AngelSpecError
from benchmark_report import Answers
from checks import CheckError
from experiment_cells import Measured, add_derived, make_cell
from experiment_config import AR, Experiment, load_experiment, target_folder
from experiment_limits import check_limits
from experiment_report import limit_lines, make_table, progress_line
from experiment_results import Results, ResultsError
from experiment_server import Subject, describe_subject, open_subject
from load import Request, Sender, connect, run_loop, run_window, warm_up
from loadtest.task_sets import DEFAULT_PROMPTS, Prompt, PromptError, fits, load_prompts
from prepare_target import PrepareError
from server import ServerError
from server_counters import CountersError

OWN_PROMPTS = "own"
BROKEN_LIMIT = 3
CONSOLE = Console(stderr=True, highlight=False)


class Runner:
    """Measures what is missing in the results."""

    def __init__(
        self, experiment: Experiment, prompts: Sequence[Prompt], subject: Subject, sender: Sender
    ) -> None:
        self._experiment = experiment
        self._prompts = prompts
        self._subject = subject
        self._sender = sender
        self._answers = Answers()

    async def run(self, results: Results) -> None:
        """Measure tier by tier.  Raises AngelSpecError, CountersError, ServerError."""
        about = describe_subject(self._subject, self._experiment.protocol)
        for concurrency in self._experiment.concurrency:
            if modes := results.missing(concurrency):
                started = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
                tier = await self._tier(concurrency, modes)
                cells = [make_cell(mode, concurrency, tier[mode]) for mode in modes]
                name, started_at = {"experiment": self._experiment.name}, {"started": started}
                results.append([name | cell | about | started_at for cell in cells])

    async def _tier(self, concurrency: int, modes: Sequence[str]) -> dict[str, list[Measured]]:
        """All windows at a concurrency, by mode."""
        experiment, size = self._experiment, self._experiment.window_size(concurrency)
        limit, beyond = experiment.warm_up_requests or concurrency, experiment.windows * size
        for mode in modes:  # with prompts that are not measured
            requests = make_requests(experiment, self._prompts, mode, range(beyond, beyond + limit))
            tokens = experiment.warm_up_tokens
            await warm_up(self._sender, requests, concurrency, limit=limit, max_tokens=tokens)
        measured: dict[str, list[Measured]] = {mode: [] for mode in modes}
        for index in range(experiment.windows):
            numbers = range(index * size, (index + 1) * size)
            for mode in modes if index % 2 == 0 else modes[::-1]:
                requests = make_requests(experiment, self._prompts, mode, numbers)
                measured[mode].append(await self._window(requests, concurrency))
                what = f"c={concurrency} {mode} {index + 1}/{experiment.windows}"
                CONSOLE.print(progress_line(what, measured[mode][-1]), markup=False)
        return measured

    async def _window(self, requests: Sequence[Request], concurrency: int) -> Measured:
        before = self._subject.counters()
        self._subject.reset_peaks()
        window = await run_window(self._sender, requests, concurrency)
        peaks = self._subject.peaks_mb()
        if not window.generations:
            self._subject.check_alive()
            raise window.errors[0]
        after = self._subject.counters()
        self._answers.compare(window)
        return Measured(window, after - before if before and after else None, peaks)


def make_requests(
    experiment: Experiment, prompts: Sequence[Prompt], mode: str, numbers: range
) -> list[Request]:
    """The requests of the given numbers: all but the drafter depends on the number alone."""
    sampling, lengths = experiment.sampling, experiment.lengths
    requests = []
    for number in numbers:
        prompt = prompts[number % len(prompts)]
        options = {
            "max_tokens": lengths.max_tokens,
            "ignore_eos": lengths.ignore_eos,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed + number,
            "drafter": mode,
            "num_draft_tokens": 0 if mode == AR else experiment.draft_tokens.get(mode),
        }
        requests.append(Request(number, prompt.messages, prompt.task, options))
    return requests


def read_prompts(experiment: Experiment) -> list[Prompt]:
    """The prompts an experiment uses.

    Raises:
        PromptError: there are none.
        CheckError, OptionsError, PrepareError: there is no tokenizer that could count their tokens.
    """
    sources = [DEFAULT_PROMPTS if source == OWN_PROMPTS else source for source in experiment.prompts]
    limit, seed = experiment.lengths.max_prompt_tokens, experiment.sampling.seed
    if not limit:
        return load_prompts(*sources, seed=seed)
    return load_prompts(*sources, keep=fits(target_folder(experiment), limit), seed=seed)


def resolved_settings(experiment: Experiment, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The settings that results record: also a digest of the prompts, whose files may change."""
    text = json.dumps([[prompt.task, prompt.messages] for prompt in prompts], ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return experiment.settings() | {"prompts_digest": digest}


async def measure(experiment: Experiment, prompts: Sequence[Prompt], results: Results) -> None:
    """Measure what is missing, on a server that runs or is started for it."""
    CONSOLE.print(f"measuring {experiment.server}" if experiment.server else "starting the server")
    with open_subject(experiment) as subject:
        sender = connect(subject.address, experiment.protocol, timeout=experiment.timeout)
        try:
            await Runner(experiment, prompts, subject, sender).run(results)
        finally:
            await sender.close()


def run(options: argparse.Namespace) -> int:
    """Measure, show, judge; returns the exit status."""
    experiment = load_experiment(options.experiment, options.overrides)
    path = options.out or Path("run") / f"experiment-{experiment.name}" / "results.jsonl"
    prompts = read_prompts(experiment)
    results = Results(path, experiment, resolved_settings(experiment, prompts))
    if results.complete:
        CONSOLE.print(f"{path} is complete", markup=False)
    else:
        run_loop(measure(experiment, prompts, results))
    output = Console(highlight=False, width=160)
    output.print(make_table(add_derived(results.cells, experiment), experiment.metrics))
    findings = check_limits(results.cells, experiment.rollout.rollback_on)
    for line in limit_lines(findings, experiment.rollout.canary_traffic_percent):
        output.print(line, markup=False)
    CONSOLE.print(f"results are in {path}", markup=False)
    return 0 if all(finding.kept for finding in findings) else BROKEN_LIMIT


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path, help="YAML file; scripts/experiment_config.py has its keys")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the file's values")
    parser.add_argument("--out", type=Path, help="default: run/experiment-NAME/results.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the server too
    try:
        return run(parser.parse_intermixed_args())
    except (
        *(OptionsError, PromptError, ResultsError),
        *(AngelSpecError, CheckError, CountersError, PrepareError, ServerError),
    ) as error:
        CONSOLE.print(f"experiment: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        CONSOLE.print("stopped; run it again to go on", markup=False)
        return 130


if __name__ == "__main__":
    sys.exit(main())
