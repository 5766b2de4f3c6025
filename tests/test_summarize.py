"""Reports of measured runs: every figure against hand-made lines, the verdicts, the page."""

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import report_charts
import report_compare
import report_svg
import summarize
from report_records import ResultsError, parse_cell, read_lines
from report_rollback import read_limits
from report_tables import make_tables
from report_verdict import judge

ROOT = Path(__file__).resolve().parent.parent
BASIC = {
    "mode": "ar",
    "concurrency": 4,
    "requests": 10,
    "output_tokens": 1000,
    "duration_s": 10.0,
    "p50_ms": 400.0,
    "p99_ms": 900.0,
}


def cell(mode="ar", concurrency=4, rates=(100.0, 100.0, 100.0), **fields):
    """A line with windows of 10 s at the given rates; any field can be replaced."""
    windows = [{"tokens_per_second": r, "duration_s": 10.0, "output_tokens": int(10 * r)} for r in rates]
    return {
        **BASIC,
        "mode": mode,
        "concurrency": concurrency,
        "output_tokens": sum(window["output_tokens"] for window in windows),
        "duration_s": 10.0 * len(rates),
        "tokens_per_second": sorted(rates)[len(rates) // 2],
        "windows": windows,
        "failed": 0,
        **fields,
    }


def pair(concurrency, ratios, mode="dfly", **fields):
    """Plain decoding at 100 tokens/s, and a drafter that is so many times as fast in each window."""
    rates = [100.0 * ratio for ratio in ratios]
    return [
        cell(concurrency=concurrency, rates=(100.0,) * len(rates)),
        cell(mode, concurrency, rates, **{"num_draft_tokens": 4, **fields}),
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def collect(tmp_path):
    """Lines to results, by way of a file."""

    def make(lines, baseline="ar"):
        path = write(tmp_path / "results.jsonl", lines)
        return report_compare.collect(read_lines([path]), baseline)

    return make


@pytest.fixture
def report(tmp_path):
    """What the command prints, and the page's text."""

    def make(lines, **options):
        path, page = write(tmp_path / "results.jsonl", lines), tmp_path / "report.html"
        output = io.StringIO()
        chosen = {"price_per_hour": None, "html": page, "baseline": "ar", **options}
        console = Console(file=output, highlight=False, soft_wrap=True, width=80)
        summarize.run(summarize.Options((path,), **chosen), console)
        return output.getvalue(), page.read_text()

    return make


def table(results, title, price=None):
    """A table as a list of dicts by column."""
    found = next(one for one in make_tables(results, price) if one.title == title)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


# Reading lines


def test_a_line_with_the_basic_fields_is_read_and_unknown_fields_are_ignored():
    read = parse_cell(json.dumps({**BASIC, "vendor": {"x": [1]}}))
    assert read.rate == 100.0  # 1000 tokens in 10 s
    assert read.rates == (100.0,)
    assert read.user_rate == 25.0  # of each of 4
    assert read.failed_share is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is expected"),
        ({**BASIC, "p50_ms": float("nan")}, "NaN is not JSON; null is allowed"),
        ({k: v for k, v in BASIC.items() if k != "requests"}, "the field requests is missing"),
        ({**BASIC, "concurrency": 0}, "concurrency: input should be greater than or equal to 1, found '0'"),
        ({**BASIC, "duration_s": 0}, "duration_s: input should be greater than 0"),
        ({**BASIC, "p99_ms": 1.0}, "p99_ms 1.0 is below p50_ms 400.0"),
        ({**BASIC, "error_rate": 1.5}, "error_rate"),
        ({**BASIC, "ttft_p50_ms": "fast"}, "ttft_p50_ms"),
        ({**BASIC, "windows": [{"output_tokens": -1, "duration_s": 1}]}, "windows.0.output_tokens"),
    ],
)
def test_a_broken_line_is_refused_with_its_number_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", [BASIC])
    path.write_text(path.read_text() + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ResultsError, match=re.escape(f"{path}, line 3: ") + f".*{re.escape(reason)}"):
        read_lines([path])


def test_files_without_lines_and_missing_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ResultsError, match="no result lines"):
        read_lines([tmp_path / "empty.jsonl"])
    with pytest.raises(ResultsError, match="cannot be read: No such file"):
        read_lines([tmp_path / "none.jsonl"])


def test_nulls_are_missing_figures():
    read = parse_cell(json.dumps(cell(p50_ms=None, p99_ms=None, memory_mb={"target": 5, "drafter": None})))
    assert read.p50_ms is None
    assert read.memory_mb == {"target": 5.0}


def test_lines_of_the_benchmark_are_read_with_the_rates_of_their_windows():
    line = {**BASIC, "windows": 2, "tokens_per_second_windows": [90.0, 110.0], "errors": 1}
    read = parse_cell(json.dumps(line))
    assert read.rates == (90.0, 110.0)
    assert read.rate == 100.0
    assert read.failed_share == 0.1


def test_files_are_put_together_and_the_last_line_of_a_cell_counts(tmp_path):
    first = write(tmp_path / "a.jsonl", [BASIC, cell("dfly", rates=(110.0,))])
    second = write(tmp_path / "b.jsonl", [{**BASIC, "mode": "vllm"}, cell("dfly", rates=(120.0,))])
    results = report_compare.collect(read_lines([first, second]), "ar")
    assert results.series == ["ar", "dfly", "vllm"]
    assert results.cells["dfly", 4].rate == 120.0
    assert results.notes == ("dfly at 4 was measured again: b.jsonl line 2 counts, not a.jsonl line 2",)


def test_modes_of_two_experiments_are_compared_with_plain_decoding_of_their_own(collect):
    lines = [cell("ar", experiment="x"), cell("dfly", rates=(150.0,) * 3, experiment="x")]
    lines += [cell("ar", rates=(200.0,) * 3, experiment="y")]
    lines += [cell("dfly", rates=(220.0,) * 3, experiment="y"), cell("mtp", experiment="y")]
    results = collect(lines)
    assert results.series == ["ar (x)", "ar (y)", "dfly (x)", "dfly (y)", "mtp"]
    assert [str(results.compare(s)[0].speedup) for s in results.drafters] == [
        "1.50x (1.50-1.50)",
        "1.10x (1.10-1.10)",
        "0.50x (0.50-0.50)",
    ]


def test_windows_of_different_experiments_did_not_run_in_turns_and_have_no_spread(collect):
    results = collect([cell("ar", experiment="x"), cell("vllm", rates=(150.0,) * 3)])
    assert str(results.compare("vllm")[0].speedup) == "1.50x"
    assert judge(results, "ar").kind == "open"


# Figures


def test_speedup_is_the_median_of_paired_windows_with_their_smallest_and_largest(collect):
    results = collect([cell(rates=(100.0, 110.0, 90.0)), cell("dfly", rates=(150.0, 154.0, 117.0))])
    row = table(results, "Throughput")[0]
    # 150/100, 154/110, 117/90
    assert row == {
        "in flight": "4",
        "ar tok/s": "100",
        "dfly tok/s": "150",
        "dfly speed-up": "1.40x (1.30-1.50)",
    }


def test_latency_table_shows_what_the_lines_say(collect):
    fields = {"ttft_p50_ms": 50.25, "ttft_p99_ms": 1234.4, "tpot_p50_ms": 8.0, "itl_p99_ms": 31.0}
    fields |= {"error_rate": 0.005, "acceptance_length": 2.346, "identical": 9, "compared": 10}
    fields |= {"draft_tokens": 3900}  # in 3000 / 2.346 steps
    rows = table(collect([BASIC, cell("dfly", **fields)]), "Latency, errors, acceptance")
    assert rows[1] == {
        "in flight": "4",
        "mode": "dfly",
        "p50 ms": "400",
        "p99 ms": "900",
        "TTFT p50 / p99 ms": "50.2 / 1,234",
        "TPOT p50 ms": "8.0",
        "ITL p99 ms": "31.0",
        "errors": "0.5%",
        "acceptance": "2.35",
        "drafted": "3.05",
        "identical": "9/10",
    }
    assert rows[0]["errors"] == ""  # unknown is not zero


def tasked(mode, seconds, concurrency=4, lengths=(2.0, 4.0), **fields):
    """Two windows in which gsm8k and mbpp made 100 tokens each, in so many request seconds."""
    line = cell(mode, concurrency, rates=(100.0, 100.0), **fields)
    for window, (gsm8k, mbpp) in zip(line["windows"], seconds, strict=True):
        window["by_task"] = {
            "gsm8k": {"output_tokens": 100, "request_seconds": gsm8k},
            "mbpp": {"output_tokens": 100, "request_seconds": mbpp},
        }
    line["by_task"] = {
        task: {"output_tokens": 200, "acceptance_length": length}
        for task, length in zip(("gsm8k", "mbpp"), lengths, strict=True)
    }
    return line


def test_a_task_is_as_much_faster_as_its_time_per_token_is_shorter(collect):
    # gsm8k: 12/6 and 12/8, the median 1.75; mbpp: 10/10 and 10/8, 1.125
    lines = [tasked("ar", [(12, 10), (12, 10)]), tasked("dfly", [(6, 10), (8, 8)], acceptance_length=3.0)]
    # at 8 in flight twice the time for gsm8k: 0.5
    lines += [tasked("ar", [(6, 10), (6, 10)], 8), tasked("dfly", [(12, 10), (12, 10)], 8, (1.0, 4.0))]
    results = collect(lines)
    assert str(results.compare("dfly")[0].by_task["gsm8k"]) == "1.75x (1.50-2.00)"
    rows = table(results, "By task set")
    # acceptance of gsm8k: 400 tokens in 200/2 + 200/1 steps; the mean of 1.75 and 0.5 is 1.125
    assert rows[0] == {
        "task": "gsm8k",
        "dfly speed-up": "1.12x (0.50-1.75)",
        "dfly acceptance": "1.33",
    }
    assert rows[1]["dfly acceptance"] == "4.00"
    # all: the mean of (1.75 + 1.125) / 2 and (0.5 + 1) / 2
    assert rows[2]["dfly speed-up"] == "1.09x"


def test_published_speedups_stand_beside_ours_over_the_same_concurrencies(collect):
    lines = [
        *pair(1, (3.0, 3.0)),
        *pair(4, (1.5, 1.5)),
        *pair(8, (1.3, 1.3)),
        *pair(4, (1.2, 1.2), "mtp")[1:],
    ]
    rows = table(collect(lines), "Next to the published speed-up")
    assert [row["in flight"] for row in rows] == ["1", "4", "8", "mean of 4-8"]
    assert [row["dfly"] for row in rows] == ["3.00x", "1.50x", "1.30x", "1.40x"]
    assert [row["published DFly-8"] for row in rows] == ["", "1.98x", "2.02x", "2.00x"]
    assert [row["mtp"] for row in rows] == ["", "1.20x", "", ""]  # no mean of a part
    assert [row["published MTP-3"] for row in rows] == ["", "1.60x", "1.66x", "1.63x"]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("dfly", "DFly-8"),
        ("dfly-4", "DFly-8"),
        ("mtp_k3", "MTP-3"),
        ("dflash (full)", "DFlash-8"),
        ("ngram", None),
    ],
)
def test_the_published_drafter_is_found_by_the_modes_name(mode, name):
    assert report_compare.published_for(mode) == name


def test_cost_is_the_price_of_the_time_for_a_million_tokens(collect):
    # 100 tokens/s are 360,000 an hour
    row = table(collect(pair(4, (2.0, 2.0))), "Cost per million output tokens", price=0.9)[0]
    assert row == {"in flight": "4", "ar": "2.50", "dfly": "1.25"}


def test_the_price_in_the_settings_counts_where_none_is_given(collect):
    rows = table(collect([cell(settings={"price_per_hour": 0.72})]), "Cost per million output tokens")
    assert rows == [{"in flight": "4", "ar": "2.00"}]


def tooled(tool, rates, concurrency=4, mode="ar", **fields):
    """A line of run_standard_tools."""
    name = mode if tool == "load" else f"{mode} ({tool})"
    return cell(name, concurrency, rates, tool=tool, experiment="standard tools", **fields)


def test_standard_tools_stand_beside_our_load_over_their_protocol(collect):
    lines = [
        tooled("load", (100.0, 110.0, 120.0)),
        tooled("perf_analyzer", (101.0, 110.0, 114.0), p50_ms=410.0, ttft_p50_ms=31.0),
        tooled("load-http", (200.0, 200.0, 200.0), p50_ms=300.0, ttft_p50_ms=30.0),
        tooled("aiperf", (190.0, 180.0, 200.0), p50_ms=310.0),
        tooled("aiperf", (190.0, 180.0, 200.0), concurrency=8),  # nothing of ours beside it
    ]
    first, second = table(collect(lines), "Standard tools")
    assert first == {
        "in flight": "4",
        "tool": "ar (perf_analyzer)",
        "tok/s": "110",
        "our load tok/s": "110",
        "tool / ours": "1.00x (0.95-1.01)",
        "p50 ms: tool / ours": "410 / 400",
        "TTFT p50 ms: tool / ours": "31.0 / ",
    }
    assert (second["tool"], second["tool / ours"]) == ("ar (aiperf)", "0.95x (0.90-1.00)")
    assert second["p50 ms: tool / ours"] == "310 / 300"


def test_a_tool_is_never_named_best_and_enters_no_mean(collect):
    lines = [
        *pair(4, (1.2, 1.2, 1.2)),
        *(tooled(tool, (300.0,) * 3) for tool in ("load-http", "perf_analyzer", "aiperf")),
        cell("dfly (aiperf)", 4, (400.0,) * 3),  # of another file, which does not say its tool
    ]
    results = collect(lines)
    assert results.drafters == ["dfly"]
    found = judge(results, "ar")
    assert found.series == "dfly"
    assert not any("aiperf" in reason.text or "perf_analyzer" in reason.text for reason in found.reasons)
    assert set(table(results, "Next to the published speed-up")[0]) == {
        "in flight",
        "dfly",
        "published DFly-8",
    }
    (shown,) = table(results, "Throughput")
    assert shown["ar (aiperf) tok/s"] == "300"
    assert not any("(" in name for name in shown if name.endswith("speed-up"))


def test_a_run_of_tools_alone_has_no_verdict(collect):
    found = judge(collect([tooled("load", (100.0,) * 3), tooled("aiperf", (130.0,) * 3)]), "ar")
    assert found.headline.startswith("No verdict")


def test_memory_is_the_peak_of_each_process_over_all_concurrencies(collect):
    lines = [
        cell(memory_mb={"target": 500, "angelspec": 90}),
        cell(concurrency=8, memory_mb={"target": 620.5}),
    ]
    rows = table(collect(lines), "Memory")
    assert rows == [{"mode": "ar", "target": "620", "angelspec": "90", "sum": "620"}]


def test_tables_are_markdown_of_full_width(report):
    text, _ = report([*pair(4, (1.2, 1.3)), *pair(4, (1.2, 1.3), "a|b")[1:]])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\|(-+\|)+", rows[1])
    assert "a\\|b" in text
    assert all(line.endswith("|") for line in rows)


# Checks


def test_counts_that_differ_from_the_servers_are_flagged(collect):
    lines = pair(4, (1.2, 1.2), server={"requests": 10, "failed": 3, "output_tokens": 2410})
    texts = [reason.text for reason in judge(collect(lines), "ar").reasons if reason.kind == "warning"]
    assert texts == [
        "dfly at 4: the client counted 0 failed requests, the server 3.",
        "dfly at 4: the client counted 2,400 output tokens, the server 2,410.",
    ]


def test_equal_counts_and_answers_are_summed_up(report):
    counts = {"server": {"requests": 10, "failed": 0, "output_tokens": 2400}, "identical": 10, "compared": 10}
    text, page = report(pair(4, (1.2, 1.2), **counts, harness_cpu_s=0.048))  # 20 us a token
    summary = (
        "0 of 20 requests failed; client and server counted the same in 1 of 1 cells; 10 of 10 repeated "
        "answers are identical; the load generator took 2.0% of a core per 1,000 tokens/s"
    )
    assert summary in text
    assert summary in page


def test_differing_answers_mixed_conditions_and_missing_partners_are_flagged(collect):
    lines = [*pair(4, (1.2, 1.2, 1.2), identical=8, compared=10, git="a"), cell("dfly", 8, git="b")]
    lines[0] = cell(rates=(100.0, 100.0))
    texts = [reason.text for reason in judge(collect(lines), "ar").reasons if reason.kind == "warning"]
    assert texts == [
        "dfly at 4: 2 of 10 answers differ from the first to their request.",
        "dfly: no plain decoding at 8 to compare with.",
        "dfly at 4: 3 windows, plain decoding 2; the first 2 are compared.",
        "The lines differ in git: a | b.",
    ]


# Verdicts


def verdict(collect, lines):
    return judge(collect(lines), "ar")


def test_verdict_pays_everywhere(collect):
    found = verdict(collect, [*pair(4, (1.4, 1.5, 1.6)), *pair(64, (1.1, 1.2, 1.3))])
    assert found.headline == (
        "Use dfly with 4 draft tokens: at every concurrency measured (4 and 64) it is 1.20x to 1.50x "
        "as fast as plain decoding, ahead in every window."
    )
    assert (found.kind, found.series, found.tiers, found.stops_at) == ("pro", "dfly", (4, 64), None)


def test_verdict_names_the_concurrency_from_which_on_speculation_stops_paying(collect):
    lines = [*pair(4, (1.4, 1.5)), *pair(16, (0.96, 1.3)), *pair(32, (1.1, 1.2)), *pair(64, (0.9, 1.1))]
    found = verdict(collect, [*lines, *pair(128, (0.7, 0.8))])
    assert found.headline == (
        "Use dfly with 4 draft tokens at 4 and 32 in flight, where it is 1.15x to 1.45x as fast as plain "
        "decoding, ahead in every window. No gain shows at 16. From 64 in flight on speculation stops paying."
    )
    assert found.stops_at == 64
    assert found.reasons[0].text == (
        "dfly with 4 draft tokens: gain at 4 and 32 (1.15x to 1.45x); undecided at 16 and 64: "
        "1.13x (0.96-1.30), 1.00x (0.90-1.10); loss at 128: 0.75x (0.70-0.80)."
    )


def test_verdict_never_pays(collect):
    found = verdict(collect, [*pair(4, (0.9, 0.94)), *pair(8, (0.7, 0.8))])
    assert found.kind == "con"
    assert found.headline == (
        "Do not speculate: plain decoding is faster at every concurrency measured; "
        "the best is dfly with 0.92x (0.90-0.94) at 4 in flight."
    )


def test_verdict_claims_no_gain_where_the_spread_includes_one(collect):
    found = verdict(collect, [*pair(4, (0.98, 1.3, 1.4)), *pair(8, (1.001, 1.2, 1.3))])  # 1.00 is 1
    assert (found.kind, found.series) == ("open", None)
    assert found.headline.startswith("No gain shows: no spread over windows lies above 1;")
    mixed = verdict(collect, [*pair(4, (0.98, 1.3)), *pair(8, (0.7, 0.8))])
    assert mixed.headline.startswith("Do not speculate: no drafter beats plain decoding in every window")


def test_verdict_claims_no_gain_from_one_window(collect):
    basic = [BASIC, {**BASIC, "mode": "vllm", "output_tokens": 2000}]
    found = verdict(collect, basic)
    assert found.kind == "open"
    assert found.headline == (
        "No gain can be claimed: of one window no spread is known; "
        "the best is vllm with 2.00x at 4 in flight."
    )


def test_verdict_does_not_count_cells_in_which_too_many_requests_failed(collect):
    lines = [*pair(4, (1.4, 1.5)), *pair(8, (1.4, 1.5), requests=100, failed=2)]
    found = verdict(collect, lines)
    assert (found.tiers, found.stops_at) == ((4,), 8)
    assert "too many requests failed at 8" in found.reasons[0].text
    assert "dfly at 8: 2.0% of the requests failed (2 requests)." in [reason.text for reason in found.reasons]
    all_failed = verdict(
        collect, pair(4, (0.0, 0.0), output_tokens=0, p50_ms=None, p99_ms=None, error_rate=1.0)
    )
    assert all_failed.headline == "No verdict: too many requests failed, or nothing was generated."


def test_verdict_without_a_baseline_says_so(collect):
    found = judge(collect(pair(4, (1.4, 1.5)), "plain"), "plain")
    assert found.headline == (
        "No verdict: no drafter was measured next to plain decoding, mode 'plain' (modes: ar, dfly)."
    )


def test_verdict_picks_the_drafter_with_the_largest_gain_where_it_pays_and_says_where_another_is_better(
    collect,
):
    lines = [*pair(4, (1.8, 1.9)), *pair(64, (0.5, 0.6))]
    lines += [*pair(4, (1.3, 1.4), "mtp")[1:], *pair(64, (1.2, 1.3), "mtp")[1:]]
    found = verdict(collect, lines)
    assert (found.series, found.tiers) == ("dfly", (4,))  # 1.85 and 1 against 1.35 and 1.25
    assert "mtp is better than dfly at 64 in flight: 1.25x (1.20-1.30)." in [r.text for r in found.reasons]


def test_verdict_tells_what_the_gain_costs_in_waiting(collect):
    lines = pair(4, (1.4, 1.5), p99_ms=1080.0, ttft_p50_ms=52.0)
    lines[0]["ttft_p50_ms"] = 50.0  # 4% more: not worth a word
    assert "Where dfly gains it lengthens P99 by 20% at 4." in [
        r.text for r in verdict(collect, lines).reasons
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft_tokens": {"dfly": 7}, "engine": {}}, "Use dfly with up to 7 draft tokens:"),
        (
            {"draft_tokens": {"dfly": 7}, "engine": {"adaptive_drafts": False}},
            "Use dfly with 7 draft tokens:",
        ),
        ({"draft_tokens": {}, "engine": {"num_draft_tokens": 3}}, "Use dfly with up to 3 draft tokens:"),
        ({"draft_tokens": {}}, "Use dfly (draft length not recorded):"),
        (None, "Use dfly (draft length not recorded):"),
    ],
)
def test_verdict_names_the_draft_length_of_the_settings(collect, settings, said):
    found = verdict(collect, pair(4, (1.4, 1.5), num_draft_tokens=None, settings=settings))
    assert found.headline.startswith(said)


# Rollback limits


@pytest.mark.parametrize(
    ("name", "bound", "found"),
    [
        ("p99_ms_ratio", 1.1, "1.2"),
        ("p99_ms_ratio", 1.2, None),
        ("ttft_p50_ms_ratio", 1.25, "1.5"),
        ("ttft_p99_ms_ratio", 1.25, "not measured"),
        ("tokens_per_second_ratio", 0.95, "0.9"),
        ("tokens_per_second_ratio", 0.9, None),
        ("error_rate", 0.01, "0.02"),
        ("error_rate", 0.02, None),
        ("different_rate", 0.0, "0.2"),
        ("acceptance_length", 1.5, "1.4"),
        ("acceptance_length", 1.4, None),
    ],
)
def test_a_rollback_limit_is_compared_with_its_figure(collect, name, bound, found):
    fields = {"p99_ms": 1080.0, "ttft_p50_ms": 60.0, "error_rate": 0.02, "acceptance_length": 1.4}
    lines = pair(4, (0.9, 0.9), **fields, compared=10, identical=8)
    lines[0]["ttft_p50_ms"] = 40.0
    limits, unknown = read_limits({"rollout": {"rollback_on": {name: bound}}})
    assert [str(limit) for limit in limits] == [f"{name} {bound:g}"]
    assert limits[0].broken_by(collect(lines).compare("dfly")[0]) == found
    assert unknown == []


def test_limits_that_cannot_be_checked_are_named():
    written = {"gpu_heat": 80, "error_rate": 0.01, "p99_ms_ratio": None, "p50_ms_ratio": "low"}
    limits, unknown = read_limits({"rollout": {"rollback_on": written}})
    assert [str(limit) for limit in limits] == ["error_rate 0.01"]
    assert unknown == ["gpu_heat", "p50_ms_ratio"]
    assert read_limits({"rollout": {"rollback_on": ["p99"]}}) == ([], ["p99"])
    assert read_limits({"rollout": None}) == read_limits(None) == ([], [])


def test_verdict_says_whether_rollback_limits_would_be_triggered(collect):
    settings = {"rollout": {"rollback_on": {"p99_ms_ratio": 1.15}}}
    lines = [*pair(4, (1.4, 1.5), settings=settings), *pair(8, (1.2, 1.3), settings=settings)]
    calm = verdict(collect, lines)
    assert "No rollback limit would be triggered by dfly (p99_ms_ratio 1.15)." in [
        r.text for r in calm.reasons
    ]
    lines[3]["p99_ms"] = 1080.0
    found = verdict(collect, lines)
    assert found.headline.endswith("But a rollback limit would be triggered at 8.")
    assert found.kind == "open"
    assert "Rollback limit p99_ms_ratio 1.15 would be triggered by dfly: 1.2 at 8." in [
        r.text for r in found.reasons
    ]


# The page


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps what matters."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.text, self.titles = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.loads += [
            v for k, v in attributes if k in ("src", "href", "xlink:href", "data", "srcset", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        self.text += data


FULL = [
    tasked("ar", [(12, 10), (12, 10)], latencies_ms=[300, 400, 900], settings={"name": "full"}),
    tasked(
        "dfly",
        [(6, 10), (8, 8)],
        num_draft_tokens=4,
        latencies_ms=[200, 300, 800],
        acceptance_by_position=[0.5, 0.25, None],
        memory_mb={"target": 500},
        hardware={"cpu": "A CPU", "cores": 2, "gpu": None},
        versions={"torch": "2"},
        git="abc",
        started="2026-11-29T12:00:00Z",
    ),
]


def test_the_page_parses_loads_nothing_and_knows_both_colour_schemes(report):
    _, text = report(FULL, price_per_hour=1.0)
    page = Page(text)
    assert page.open == []
    assert page.loads == ["data:,"]  # the empty icon
    for load in ("http:", "https:", "//", "@import", "url(", "<script", "@font-face"):
        assert load not in text.replace("'none'", ""), load
    assert '<meta name="color-scheme" content="light dark">' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'name="viewport" content="width=device-width' in text
    variables = {name: re.findall(rf"--{name}: (#\w+)", text) for name in ("page", "ink", "s0", "s1", "s6")}
    assert all(len(set(values)) == 2 for values in variables.values())  # one for each scheme


def test_terminal_and_page_say_the_same(report):
    output, text = report(FULL, price_per_hour=1.0)
    said = " ".join(Page(text).text.split())
    lines = output.splitlines()
    for line in lines[: lines.index("")]:
        assert line.removeprefix("- ").removeprefix("Checked: ").rstrip(".") in said, line
    for title in ("Throughput", "By task set", "Memory", "Cost per million output tokens"):
        assert f"<h2>{title}</h2>" in text
    for condition in ("cpu A CPU, cores 2", "torch 2", "abc", "2026-11-29T12:00:00Z", "name: full"):
        assert condition in said


def test_pictures_are_well_formed_and_drawn_for_what_is_there(report):
    _, text = report(FULL)
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    labels = [picture.get("aria-label") for picture in pictures if picture.get("role") == "img"]
    assert labels == [
        "Tokens per second by concurrency",
        "Speed-up over plain decoding by concurrency",
        "P99 of whole requests by concurrency",
        "Throughput against speed per user",
        "Acceptance by draft position",
        "Acceptance length by task set",
        "Latency at 4 in flight",
    ]
    _, basic = report([BASIC])
    assert len(re.findall('role="img"', basic)) == 3  # rates, P99 and speed per user
    Page(basic)


def test_names_from_files_are_text_not_markup(report):
    output, text = report(pair(4, (1.2, 1.3), "<script>[red]x"))
    assert "<script>" not in text
    assert "&lt;script&gt;[red]x" in text
    assert "<script>[red]x" in output
    Page(text)


def test_modes_differ_in_marker_or_line_not_only_in_colour():
    names = ["ar", "ngram", "mtp", "dfly", *(f"mode{number}" for number in range(9))]
    styles = report_svg.assign_styles(names, ["ar"])
    assert styles["dfly"] == report_svg.assign_styles(["ar", "dfly"], ["ar"])["dfly"]
    assert len({(style.marker, style.dash, style.hollow) for style in styles.values()}) == len(names)
    assert len(report_svg.assign_styles([str(number) for number in range(40)], [])) == 40


def test_points_are_where_the_axes_say(collect):
    results = collect(pair(4, (1.5, 1.5)) + pair(16, (1.25, 1.25)))
    styles = report_svg.assign_styles(results.series, ["ar"])
    svg = ElementTree.fromstring(report_charts.speedup(results, styles))
    heights = {
        text.text: float(text.get("y")) for text in svg.iter("text") if text.get("text-anchor") == "end"
    }
    points = [
        float(re.search(r",([\d.]+)\)", path.get("transform")).group(1))
        for path in svg.iter("path")
        if path.get("transform")
    ]
    per_tenth = (heights["1"] - heights["1.5"]) / 5
    assert points[0] == pytest.approx(heights["1.5"] - 3.5, abs=0.2)
    assert points[1] == pytest.approx(points[0] + 2.5 * per_tenth, abs=0.2)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 97, [0, 25, 50, 75, 100]),
        (0.9, 1.9, [0.75, 1, 1.25, 1.5, 1.75, 2]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, ticks):
    assert report_svg.nice_ticks(low, high) == ticks


def test_ticks_of_a_log_axis_lie_inside_it():
    assert report_svg.log_ticks(40, 600) == [50, 100, 200, 500]
    assert report_svg.log_ticks(0.9, 20000) == [1, 10, 100, 1000, 10000]


# The command


def test_the_command_reports(tmp_path):
    lines = write(tmp_path / "good.jsonl", pair(4, (1.4, 1.5)))
    command = [sys.executable, str(ROOT / "scripts" / "summarize.py"), str(lines)]
    command += ["--price-per-hour", "2", "--html", str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Use dfly with 4 draft tokens")
    assert "1.45x (1.40-1.50)" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("good", "bad"), "bad, line 1: the field mode is missing"),
        (("good", "--price-per-hour", "free"), "--price-per-hour must be a positive number, not 'free'"),
        (("good", "--html", "nowhere/report.html"), "nowhere/report.html cannot be written: No such file"),
    ],
)
def test_the_command_refuses_in_words(tmp_path, monkeypatch, capsys, arguments, error):
    write(tmp_path / "good", pair(4, (1.4, 1.5)))
    write(tmp_path / "bad", [{}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["summarize.py", *arguments])
    assert summarize.main() == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("summarize: ")
    assert error in written.err
