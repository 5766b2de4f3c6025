"""Experiments without a server: their files, the arithmetic of cells and limits, the file of results."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import run_experiment
from angelspec_backend.core.yaml_options import OptionsError, check_options
from angelspec_client import Chunk, ServerError, Usage
from angelspec_client.results import assemble
from experiment_cells import Measured, add_derived, make_cell
from experiment_config import METRICS, Experiment, differing_keys, engine_options, load_experiment
from experiment_limits import Limits, check_limits
from experiment_report import limit_lines, make_table, progress_line
from experiment_results import Results, ResultsError
from load import Request, Window
from loadtest.task_sets import Prompt
from report_rollback import FIGURES
from server_counters import Counters, parse_counters

EXAMPLES = Path(run_experiment.__file__).parent / "experiments"


def experiment(**values):
    return check_options(Experiment, {"name": "x", **values})


# Experiment files


def test_the_examples_are_sound_and_small_enough():
    full, smoke = (load_experiment(EXAMPLES / name) for name in ("full.yaml", "smoke.yaml"))
    assert full.concurrency == (1, 4, 8, 16, 32, 64)
    # Equal shares of six sets, and about two requests for everybody in flight.
    assert all(full.window_size(c) % 6 == 0 and full.window_size(c) >= 1.9 * c for c in full.concurrency)
    # Plain decoding on two cores: what three modes take if no drafter gains anything.
    rates = {1: 82, 4: 248, 8: 341, 16: 459, 32: 528, 64: 666}  # tokens per second
    tokens = full.lengths.max_tokens
    seconds = {c: full.window_size(c) * tokens / rates[c] for c in full.concurrency}
    assert all(10 < value < 32 for value in seconds.values())
    warm_up = sum(c * full.warm_up_tokens / rates[c] for c in full.concurrency)
    assert 3 * (full.windows * sum(seconds.values()) + 2 * warm_up) < 40 * 60
    assert set(smoke.metrics) <= set(METRICS)
    smoke_tokens = sum(smoke.window_size(c) for c in smoke.concurrency) * smoke.lengths.max_tokens
    assert smoke_tokens * smoke.windows * len(smoke.modes) / 30 < 120


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concurency": [1]}, "unknown key concurency; did you mean concurrency"),
        ({"lengths": {"max_token": 3}}, r"unknown key lengths\.max_token; did you mean lengths\.max_tokens"),
        (
            {"rollout": {"rollback_on": {"p99_ratio": 2}}},
            r"unknown key rollout\.rollback_on\.p99_ratio; did you mean rollout\.rollback_on\.p99_ms_ratio",
        ),
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"modes": ["none", "eagle9"]}, "modes: unknown 'eagle9'; allowed: none, ngram"),
        ({"modes": ["none", "none"]}, "twice"),
        ({"modes": []}, "modes is"),
        ({"concurrency": [1, 0]}, "concurrency"),
        ({"concurrency": "1,x"}, "concurrency"),
        ({"requests": {2: 5}}, "requests: unknown '2'; allowed: 1, 4"),
        ({"draft_tokens": {"dfly": 3}}, "draft_tokens: unknown 'dfly'; allowed: ngram"),
        ({"draft_tokens": 99}, "less than or equal to 32"),
        ({"checkpoints": {"ngram": "x"}}, "checkpoints: unknown 'ngram'"),
        ({"metrics": ["p51_ms"]}, "metrics: unknown 'p51_ms'"),
        ({"engine": {"dtype": "float32"}}, "engine: dtype is an option of the experiment itself"),
        ({"sampling": {"temperature": -1}}, r"sampling\.temperature is -1"),
        ({"rollout": {"canary_traffic_percent": 0}}, "canary_traffic_percent is 0"),
        ({"windows": 0}, "windows is 0"),
        ({"protocol": "smtp"}, "protocol is 'smtp'"),
    ],
)
def test_wrong_experiments_are_refused_with_what_would_be_right(values, message):
    with pytest.raises(OptionsError, match=message):
        experiment(**values)


def test_the_command_line_changes_values(tmp_path):
    (tmp_path / "e.yaml").write_text("name: e\nmodes: [none, ngram]")
    changes = ["concurrency=2,8", "prompts=some/folder", "draft_tokens=3", "lengths.max_tokens=7"]
    found = load_experiment(tmp_path / "e.yaml", [*changes, "requests={2: 5}"])
    assert (found.concurrency, found.prompts, found.draft_tokens) == ((2, 8), ("some/folder",), {"ngram": 3})
    assert (found.lengths.max_tokens, found.window_size(2), found.window_size(8)) == (7, 5, 16)
    with pytest.raises(OptionsError, match="cannot read"):
        load_experiment(tmp_path / "absent.yaml")


def test_the_server_gets_the_drafters_of_the_modes(target_dir):
    options, checked = engine_options(
        experiment(target=str(target_dir), dtype="float32", engine={"prefix_caching": False})
    )
    assert (options["drafters"], checked.dtype, checked.prefix_caching) == ("ngram", "float32", False)
    options, checked = engine_options(
        experiment(
            target=str(target_dir),
            modes=["none", "draft_model", "ngram"],
            checkpoints={"draft_model": str(target_dir)},
        )
    )
    assert checked.drafter_names == ("draft_model", "ngram")


def test_only_the_drafter_differs_between_modes():
    config = experiment(draft_tokens={"ngram": 3}, sampling={"seed": 7, "top_p": 0.5})
    prompts = [Prompt("a", [{"role": "user", "content": "x"}]), Prompt("b", [])]
    ar, ngram = (run_experiment.make_requests(config, prompts, mode, range(4, 7)) for mode in config.modes)
    assert [request.task for request in ar] == ["a", "b", "a"]
    assert [request.options["seed"] for request in ngram] == [11, 12, 13]
    for one, other in zip(ar, ngram, strict=True):
        assert (one.number, one.prompt, one.task) == (other.number, other.prompt, other.task)
        differing = {key for key in one.options if one.options[key] != other.options[key]}
        assert differing == {"drafter", "num_draft_tokens"}


def test_settings_hold_no_paths_of_the_machine():
    config = experiment(
        target="/home/me/models/target", prompts=["/data/sets", "own"], checkpoints={"dfly": "~/runs/dfly"}
    )
    settings = run_experiment.resolved_settings(config, [Prompt("a", [])])
    assert (settings["target"], settings["prompts"]) == ("target", ["sets", "own"])
    assert settings["checkpoints"] == {"dfly": "dfly"}
    assert json.loads(json.dumps(settings)) == settings
    other = run_experiment.resolved_settings(config, [Prompt("b", [])])
    assert differing_keys(settings, other) == ["prompts_digest"]


# Cells


def generation(gaps, accepted=0, drafted=0, token=0):
    """A generation of one token after each of the gaps."""
    times = np.cumsum(gaps)
    chunks = [Chunk("x", (token,), float(time)) for time in times]
    usage = Usage("length", 5, len(gaps), 1, drafted, accepted)
    return assemble((*chunks[:-1], dataclasses.replace(chunks[-1], usage=usage)))


def window(generations, tasks="ab", errors=0, duration=1.0):
    """A window of the given generations, whose tasks take turns."""
    requests = {n: Request(n, [], tasks[n % len(tasks)]) for n in range(len(generations) + errors)}
    return Window(dict(enumerate(generations)), [ServerError("x")] * errors, duration, requests=requests)


def random_windows(seed):
    rng = np.random.default_rng(seed)
    return [
        window(
            [
                generation(rng.uniform(0.01, 1, rng.integers(2, 9)), accepted=1, drafted=2)
                for _ in range(rng.integers(1, 9))
            ],
            errors=int(rng.integers(0, 3)),
            duration=float(rng.uniform(1, 5)),
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_cell_is_what_numpy_says_of_its_windows(seed):
    windows = random_windows(seed)
    cell = make_cell("none", 4, [Measured(w, None, {}) for w in windows])
    generations = [g for w in windows for g in w.generations.values()]
    seconds = [g.duration_s for g in generations]
    assert (cell["mode"], cell["concurrency"]) == ("ar", 4)
    for percent in (50, 90, 99):
        assert cell[f"p{percent}_ms"] == pytest.approx(1000 * np.percentile(seconds, percent), abs=1e-3)
    ttft = [g.chunks[0].time_s for g in generations]
    assert cell["ttft_p99_ms"] == pytest.approx(1000 * np.percentile(ttft, 99), abs=1e-3)
    assert cell["latencies_ms"] == pytest.approx(sorted(1000 * s for s in seconds), abs=1e-3)
    failed = sum(len(w.errors) for w in windows)
    assert cell["failed"] == failed
    assert cell["requests"] == len(generations) + failed
    assert cell["error_rate"] == pytest.approx(failed / cell["requests"], abs=1e-4)
    tokens = [sum(len(g.token_ids) for g in w.generations.values()) for w in windows]
    assert cell["output_tokens"] == sum(tokens)
    rates = [n / w.duration_s for n, w in zip(tokens, windows, strict=True)]
    assert cell["tokens_per_second"] == pytest.approx(statistics.median(rates), abs=1e-3)
    assert [w["tokens_per_second"] for w in cell["windows"]] == pytest.approx(rates, abs=1e-3)
    assert cell["duration_s"] == pytest.approx(sum(w.duration_s for w in windows), abs=1e-3)
    assert (cell["accepted_draft_tokens"], cell["draft_tokens"]) == (len(generations), 2 * len(generations))
    steps = sum(tokens) - len(generations)
    assert cell["acceptance_length"] == pytest.approx(sum(tokens) / steps, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_the_tasks_add_up(seed):
    windows = random_windows(seed)
    cell = make_cell("ngram", 4, [Measured(w, None, {}) for w in windows])
    for task, figures in cell["by_task"].items():
        own = [g for w in windows for n, g in w.generations.items() if w.requests[n].task == task]
        assert figures["requests"] == len(own)
        assert figures["output_tokens"] == sum(g.num_output_tokens for g in own)
        assert figures["p50_ms"] == pytest.approx(1000 * np.median([g.duration_s for g in own]), abs=1e-3)
        tpot = [np.mean(np.diff([chunk.time_s for chunk in g.chunks])) for g in own]
        assert figures["tpot_p50_ms"] == pytest.approx(1000 * np.median(tpot), abs=1e-3)
        shares = [w["by_task"][task] for w in cell["windows"] if task in w["by_task"]]
        seconds = sum(share["request_seconds"] for share in shares)
        assert seconds == pytest.approx(sum(g.duration_s for g in own), abs=1e-3)
    for each, measured in zip(cell["windows"], windows, strict=True):
        assert sum(task["output_tokens"] for task in each["by_task"].values()) == measured.output_tokens


def test_memory_is_the_peak_and_counters_are_sums_over_windows():
    one = Counters(3, 1, 30, 0, 10, 40, 15, accepted_at=(8, 7, 0, 0))
    two = Counters(2, 0, 20, 0, 5, 20, 5, accepted_at=(4, 1, 1, 0))
    w = window([generation([0.1] * 3)])
    measured = [Measured(w, one, {"target": 900.0}), Measured(w, two, {"target": 800.0, "drafter": 3.0})]
    cell = make_cell("dfly", 1, measured)
    assert cell["memory_mb"] == {"target": 900.0, "drafter": 3.0}
    assert cell["server"] == {
        "requests": 5,
        "failed": 1,
        "output_tokens": 50,
        "draft_tokens": 60,
        "accepted_draft_tokens": 20,
    }
    # Of 15 drafts 12 had their first token accepted, 8 also the second, 1 also the third.
    assert cell["acceptance_by_position"] == pytest.approx([12 / 15, 8 / 15, 1 / 15], abs=1e-4)


def test_accepted_tokens_are_read_by_position():
    name = "angelspec_spec_decode_num_accepted_tokens_per_pos_total"
    lines = [f'{name}{{position="{i}"}} {max(4 - i, 0)}' for i in (10, 0, 2, 1, *range(3, 10))]
    page = "\n".join([*lines, "angelspec_output_tokens_total 9", 'angelspec_requests_total{reason="eos"} 1'])
    page += "\nangelspec_spec_decode_num_drafts_total 5\n"
    counters = parse_counters(page)
    assert counters.accepted_at == (4, 3, 2, 1, *[0] * 7)
    assert (counters + counters).acceptance_by_position == [0.8, 0.6, 0.4, 0.2]
    assert (counters - counters).acceptance_by_position is None
    assert parse_counters(page.replace(name, "other")).acceptance_by_position is None


def test_what_a_server_does_not_say_is_null():
    w = window([generation([0.1] * 3)])
    cell = make_cell("none", 1, [Measured(w, Counters(1, 0, 3), {}), Measured(w, None, {})])
    assert (cell["server"], cell["memory_mb"], cell["acceptance_by_position"]) == (None, None, None)
    nothing = make_cell("none", 1, [Measured(window([], errors=2), Counters(), {})])
    assert (nothing["p50_ms"], nothing["error_rate"], nothing["tokens_per_second"]) == (None, 1.0, 0.0)
    json.dumps(nothing, allow_nan=False)


def test_speedup_is_the_median_over_pairs_of_windows():
    def cell(mode, rates):
        windows = [window([generation([0.1] * rate)]) for rate in rates]
        return make_cell(mode, 8, [Measured(w, None, {}) for w in windows])

    cells = [cell("none", [10, 20, 30]), cell("ngram", [30, 30, 30])]
    ar, ngram = add_derived(cells, experiment(price_per_hour=3.6))
    assert (ar["speedup"], ngram["speedup"]) == (1.0, 1.5)
    assert ngram["cost_per_million"] == pytest.approx(1e6 * 3.6 / (3600 * 30))
    alone = add_derived(cells[1:], experiment())[0]
    assert (alone["speedup"], alone["cost_per_million"]) == (None, None)
    table = make_table([ar, ngram, alone], METRICS)
    assert table.row_count == 3
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table)
    assert "speed-up" in capture.get()


def test_a_line_of_progress_tells_errors_and_other_counts():
    measured = Measured(window([generation([0.1] * 3)], errors=1), Counters(2, 1, 4), {})
    line = progress_line("c=1 none 1/3", measured)
    expected = "c=1 none 1/3: 3.0 tokens/s in 1.0 s; 1 failed, the first: x; "
    assert line == expected + "the server counts 4 tokens, not 3"


# Limits


def cell_of(mode, concurrency, **figures):
    basic = {"requests": 10, "output_tokens": 100, "duration_s": 1.0, "p50_ms": 80.0, "p99_ms": None}
    return {"mode": mode, "concurrency": concurrency, "identical": 9, "compared": 10} | basic | figures


CELLS = [
    cell_of("ar", 1, p99_ms=100.0, tokens_per_second=50.0, error_rate=0.0),
    cell_of("ngram", 1, p99_ms=90.0, tokens_per_second=60.0, error_rate=0.0),
    cell_of("ar", 4, p99_ms=200.0, tokens_per_second=100.0, error_rate=0.0),
    cell_of("ngram", 4, p99_ms=260.0, tokens_per_second=80.0, error_rate=0.02),
]


@pytest.mark.parametrize(
    ("limit", "bound", "value", "kept"),
    [
        ("p99_ms_ratio", 1.3, 1.3, True),
        ("p99_ms_ratio", 1.29, 1.3, False),
        ("tokens_per_second_ratio", 0.8, 0.8, True),
        ("tokens_per_second_ratio", 0.9, 0.8, False),
        ("error_rate", 0.01, 0.02, False),
        ("different_rate", 0.2, 0.1, True),
    ],
)
def test_the_worst_tier_decides_about_a_limit(limit, bound, value, kept):
    (finding,) = check_limits(CELLS, Limits.model_validate({limit: bound}))
    assert finding.value == pytest.approx(value)
    assert (finding.mode, finding.kept) == ("ngram", kept)
    assert finding.concurrency == 4


def test_a_limit_that_was_not_measured_is_not_kept():
    (finding,) = check_limits(CELLS, Limits.model_validate({"itl_p99_ms_ratio": 2.0}))
    assert (finding.value, finding.kept) == (None, False)
    (finding,) = check_limits(CELLS[1:2], Limits.model_validate({"p99_ms_ratio": 2.0}))
    assert not finding.kept


def test_every_limit_of_the_file_bounds_a_figure_that_reports_know():
    assert set(Limits.model_fields) <= set(FIGURES)


def test_the_lines_say_value_limit_and_verdict():
    findings = check_limits(CELLS, Limits.model_validate({"error_rate": 0.0, "tokens_per_second_ratio": 0.5}))
    assert list(limit_lines(findings, 10.0)) == [
        "ngram error_rate: 0.02 at c=4, at most 0: rollback",
        "ngram tokens_per_second_ratio: 0.8 at c=4, at least 0.5: ok",
        "ngram: roll back",
    ]
    assert list(limit_lines(findings[1:], 10.0))[-1] == "ngram: may take 10% of the traffic"


# The file of results


def results_line(mode, concurrency):
    return {"mode": mode, "concurrency": concurrency, "windows": [], "value": math.pi}


def test_complete_cells_are_kept_and_the_rest_is_missing(tmp_path):
    config, path = experiment(concurrency=[1, 4]), tmp_path / "sub" / "results.jsonl"
    results = Results(path, config, {"a": 1})
    assert results.missing(1) == ["none", "ngram"]
    results.append([results_line("ar", 1), results_line("ngram", 1)])
    before = path.read_bytes()
    path.write_bytes(before + b'{"mode": "ar", "concur')  # what a kill leaves
    again = Results(path, config, {"a": 1})
    assert path.read_bytes() == before
    assert (again.missing(1), again.missing(4), again.complete) == ([], ["none", "ngram"], False)
    again.append([results_line("ar", 4), results_line("ngram", 4)])
    assert Results(path, config, {"a": 1}).complete
    assert path.read_bytes().startswith(before)
    assert [cell["settings"] for cell in map(json.loads, path.read_text().splitlines())] == [{"a": 1}] * 4


def test_other_settings_are_refused_but_other_limits_are_not(tmp_path):
    path = tmp_path / "results.jsonl"
    config = experiment()
    Results(path, config, config.settings()).append([results_line("ar", 1)])
    judged = experiment(price_per_hour=2, metrics=["p50_ms"], rollout={"canary_traffic_percent": 50})
    assert len(Results(path, judged, judged.settings()).cells) == 1
    other = experiment(windows=5)
    with pytest.raises(ResultsError, match="other settings: windows was 3, now 5"):
        Results(path, other, other.settings())


@pytest.mark.parametrize("line", ["not json", "[1]", '{"mode": "ar"}', '{"settings": 3}'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ResultsError, match=r"results\.jsonl:1 is no line of results"):
        Results(path, experiment(), {})
    assert path.read_text() == line + "\n"
