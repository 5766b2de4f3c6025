"""The sweep over draft lengths: the best one under a latency limit, flags, arithmetic, a small run."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sweep_cells
import sweep_draft_length
import sweep_options
import sweep_plot
import sweep_report
from angelspec_client.results import Chunk, Usage, assemble
from load import Request, Window
from loadtest.task_sets import Prompt
from serving import Endpoint
from sweep_report import Limit


def cell(length, rate=100.0, p99=1000.0, ttft=50.0, concurrency=4, failed=0, **more):
    """A cell as the sweep writes it, of one window."""
    return {
        "mode": "ar" if length == 0 else f"ngram k={length}",
        "drafter": "none" if length == 0 else "ngram",
        "num_draft_tokens": length,
        "concurrency": concurrency,
        "requests": 16,
        "failed": failed,
        "tokens_per_second": rate,
        "acceptance_length": 1.5,
        "p50_ms": p99 / 2,
        "p99_ms": p99,
        "ttft_p50_ms": ttft,
        "tpot_p50_ms": 10.0,
        "windows": [{"tokens_per_second": rate, "by_task": {}}],
        "by_task": {},
        **more,
    }


# The choice


def test_the_best_length_has_most_tokens_per_second():
    cells = [cell(0), cell(2, 130), cell(4, 120), cell(None, 125)]
    assert sweep_report.choose_best(cells, Limit()) is cells[1]


def test_a_faster_length_over_the_p99_limit_is_not_chosen():
    cells = [cell(0), cell(2, 120, p99=1099), cell(4, 150, p99=1101)]
    assert sweep_report.choose_best(cells, Limit(max_p99_ratio=1.1)) is cells[1]
    assert sweep_report.choose_best(cells, Limit(max_p99_ratio=1.2)) is cells[2]


def test_a_limit_in_ms_wins_over_the_ratio_and_may_leave_nothing():
    cells = [cell(0), cell(2, 120, p99=900), cell(4, 150, p99=1050)]
    assert sweep_report.choose_best(cells, Limit(max_p99_ms=950)) is cells[1]
    assert sweep_report.choose_best(cells, Limit(max_p99_ms=100)) is None


def test_without_plain_decoding_there_is_no_ratio_and_no_limit():
    cells = [cell(2, 120, p99=1e6), cell(4, 110)]
    assert Limit().p99_ms(cells) is None
    assert sweep_report.choose_best(cells, Limit()) is cells[0]


def test_a_length_with_failed_requests_is_not_chosen():
    cells = [cell(0), cell(2, 150, failed=1), cell(4, 120)]
    assert sweep_report.choose_best(cells, Limit()) is cells[2]
    assert "1 of 16 failed" in sweep_report.remarks(cells[1], cells[0], None, None)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e5)), min_size=1, max_size=9), st.floats(0.5, 3.0))
def test_the_choice_is_the_maximum_over_all_allowed_lengths(figures, ratio):
    cells = [cell(length, rate, p99) for length, (rate, p99) in enumerate(figures)]
    allowed = [c for c in cells if c["p99_ms"] <= ratio * cells[0]["p99_ms"]]
    best = sweep_report.choose_best(cells, Limit(max_p99_ratio=ratio))
    if not allowed:
        assert best is None
    else:
        assert best["tokens_per_second"] == max(c["tokens_per_second"] for c in allowed)
        assert best in allowed


# The flags


@pytest.mark.parametrize(
    ("figures", "flags"),
    [
        ({"rate": 120.0, "p99": 1200.0}, {"P99": 0.2}),
        ({"rate": 120.0, "ttft": 60.0}, {"TTFT": 0.2}),
        ({"rate": 120.0, "ttft": 60.0, "p99": 1500.0}, {"TTFT": 0.2, "P99": 0.5}),
        ({"rate": 120.0}, {}),
        ({"rate": 120.0, "p99": 1020.0, "ttft": 51.0}, {}),  # within the noise
        ({"rate": 90.0, "p99": 1200.0}, {}),  # slower anyway
        ({"rate": 102.0, "p99": 1200.0}, {}),  # not faster beyond the noise
    ],
)
def test_flags_say_what_more_tokens_per_second_cost(figures, flags):
    costs = sweep_report.find_costs(cell(4, **figures), cell(0))
    assert costs == {name: pytest.approx(share) for name, share in flags.items()}


def test_remarks_name_the_best_the_limit_and_the_flags():
    plain, slow = cell(0), cell(4, 150, p99=1500)
    said = sweep_report.remarks(slow, plain, plain, 1100.0)
    assert said == ["P99 over the limit", "faster, but P99 +50%"]
    assert sweep_report.remarks(plain, plain, plain, 1100.0) == ["best"]


# Arithmetic


def test_speedups_are_per_window():
    plain = cell(0, windows=[{"tokens_per_second": 10.0}, {"tokens_per_second": 20.0}])
    drafted = cell(4, windows=[{"tokens_per_second": 20.0}, {"tokens_per_second": 30.0}])
    assert sweep_report.speedups(drafted, plain) == [2.0, 1.5]
    assert sweep_report.speedups(drafted, None) == []


def generation(num_tokens, seconds, accepted=0):
    """Half of the tokens at once, the others at the end."""
    ids = tuple(range(num_tokens))
    half = num_tokens // 2
    usage = Usage("length", 3, num_tokens, 0, 2 * accepted, accepted)
    chunks = (Chunk("a", ids[:half], seconds / 2), Chunk("b", ids[half:], seconds, usage))
    return assemble(chunks)


def window(seconds_by_task, duration=10.0, errors=()):
    """A window with one request of 8 tokens per task and given seconds."""
    made = Window(duration_s=duration, errors=list(errors))
    for number, (task, seconds) in enumerate(seconds_by_task.items()):
        made.requests[number] = Request(number, [], task)
        made.generations[number] = generation(8, seconds, accepted=4)
    return made


def test_a_task_gains_by_its_own_time_per_token():
    plain = sweep_cells.make_cell("ngram", 0, 4, [window({"chat": 4.0, "code": 4.0})])
    drafted = sweep_cells.make_cell("ngram", 4, 4, [window({"chat": 4.0, "code": 1.0})])
    assert sweep_report.task_speedup(drafted, plain, "code") == pytest.approx(4.0)
    assert sweep_report.task_speedup(drafted, plain, "chat") == pytest.approx(1.0)
    assert sweep_report.task_speedup(drafted, plain, "maths") is None
    assert sweep_report.make_task_table([plain, drafted]).row_count == 2


def test_a_cell_sums_windows_and_tells_tasks_apart():
    windows = [window({"chat": 2.0, "code": 1.0}), window({"chat": 4.0}, errors=[ValueError("x")])]
    windows[1].requests[7] = Request(7, [], "code")  # the one that failed
    made = sweep_cells.make_cell("ngram", 4, 16, windows)
    assert (made["mode"], made["num_draft_tokens"], made["concurrency"]) == ("ngram k=4", 4, 16)
    assert (made["requests"], made["failed"], made["error_rate"]) == (4, 1, 0.25)
    assert made["output_tokens"] == 24
    assert made["tokens_per_second"] == pytest.approx(np.median([1.6, 0.8]))
    assert made["by_task"]["chat"]["output_tokens"] == 16
    assert made["by_task"]["chat"]["p50_ms"] == pytest.approx(3000)
    assert made["acceptance_length"] == pytest.approx(24 / (24 - 12))
    assert made["windows"][0]["by_task"]["code"] == {"output_tokens": 8, "request_seconds": 1.0}
    assert set(made["windows"][1]["by_task"]) == {"chat"}
    json.dumps(made, allow_nan=False)


def test_modes_of_lengths():
    names = [sweep_cells.make_cell("dfly", k, 1, [window({"a": 1.0})])["mode"] for k in (0, 3, None)]
    assert names == ["ar", "dfly k=3", "dfly"]


# Files and options


def test_cells_are_read_as_written_and_the_last_of_equal_ones_counts(tmp_path):
    file = tmp_path / "sweep.jsonl"
    cells = [cell(0), cell(4, 110), cell(None, 120), cell(4, 130)]
    file.write_text("\n".join(map(json.dumps, cells)) + "\n")
    assert sweep_cells.read_cells(file) == [cells[0], cells[3], cells[2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no lines"),
        ("{", "is not JSON"),
        ('{"mode": "ar"}', "it lacks"),
        ("[]", "it lacks everything"),
        (json.dumps(cell(2)) + "\n" + json.dumps(cell(3, drafter="dfly")), "sweeps of dfly, ngram"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    file = tmp_path / "sweep.jsonl"
    file.write_text(content)
    with pytest.raises(sweep_cells.SweepError, match=message):
        sweep_cells.read_cells(file)
    with pytest.raises(sweep_cells.SweepError, match="cannot read"):
        sweep_cells.read_cells(tmp_path / "absent")


def test_lengths_are_numbers_ranges_and_auto():
    assert sweep_options.draft_lengths("0-3,8,auto,2") == (0, 1, 2, 3, 8, None)
    plan = sweep_options.read_plan(["--lengths", "0,auto,5,3"], "")
    assert plan.longest == 5
    assert sweep_options.read_plan(["--lengths", "auto,0"], "").longest is None


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "33", "2-40", "1-2-3"])
def test_senseless_lengths_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        sweep_options.read_plan([f"--lengths={text}"], "")
    assert "must be numbers up to 32" in capsys.readouterr().err


def test_only_drafter_and_length_differ_between_lengths():
    plan = sweep_options.read_plan(["--lengths", "0,6,auto", "--drafter", "dfly", "--seed", "7"], "")
    prompts = [Prompt("chat", [{"role": "user", "content": "Hi"}])]
    made = {k: sweep_draft_length.make_requests(plan, prompts, k, range(5, 6))[0] for k in plan.lengths}
    drafts = {k: (r.options["drafter"], r.options["num_draft_tokens"]) for k, r in made.items()}
    assert drafts == {0: ("none", 0), 6: ("dfly", 6), None: ("dfly", 6)}
    assert all((r.number, r.task, r.options["seed"]) == (5, "chat", 12) for r in made.values())


def test_the_picture_shows_every_case(tmp_path):
    def by_task(seconds):
        return [
            {
                "tokens_per_second": 8.0,
                "by_task": {"chat": {"output_tokens": 8, "request_seconds": seconds}},
            }
        ]

    cells = [
        cell(0, windows=by_task(2.0), by_task={"chat": {}}),
        cell(2, 150, p99=2000, windows=by_task(1.0), by_task={"chat": {}}),
        cell(None, 120, windows=by_task(1.5), by_task={"chat": {}}),
        cell(4, concurrency=16),
        cell(2, concurrency=16, p99_ms=None),
    ]
    file = tmp_path / "sweep.svg"
    sweep_plot.draw(cells, Limit(), file)
    assert file.stat().st_size > 10_000
    assert sweep_report.make_table(cells, Limit()).row_count == 5


# The real server


def test_a_small_sweep_of_the_real_server(server, tmp_path, capfd):
    http = Endpoint(server.options).http
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Count to ten.", "task": "a"}\n{"prompt": "Say yes.", "task": "b"}\n')
    plan = sweep_options.read_plan(
        [
            *("--server", http, "--auto-server", http, "--lengths", "0,2,auto", "--concurrency", "2"),
            *("--prompts", str(prompts), "--requests", "4", "--windows", "2", "--max-tokens", "8"),
            *("--out", str(out), "--picture", str(tmp_path / "sweep.png")),
        ],
        "",
    )
    cells = asyncio.run(sweep_draft_length.run(plan))
    sweep_draft_length.show(plan, cells)
    assert [(c["num_draft_tokens"], c["requests"], c["failed"]) for c in cells] == [
        (0, 8, 0),
        (2, 8, 0),
        (None, 8, 0),
    ]
    assert all(c["identical"] == c["compared"] for c in cells)
    assert cells[1]["compared"] == 8
    assert cells[0]["acceptance_length"] == 1.0
    assert set(cells[2]["by_task"]) == {"a", "b"}
    read = sweep_cells.read_cells(out)
    assert [c["tokens_per_second"] for c in read] == [c["tokens_per_second"] for c in cells]
    assert (tmp_path / "sweep.png").exists()
    assert "best at 2 in flight" in capfd.readouterr().err
    sweep_draft_length.show(replace(plan, picture=None), read)
