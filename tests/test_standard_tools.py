"""perf_analyzer and AIPerf beside our load: what is sent, what recorded outputs of real runs say, flags.

tests/recorded holds outputs of perf_analyzer 2.60 and AIPerf 0.13.0 against this server: four requests of
8 tokens, two in flight; the same with one of them refused; and with all ended by a timeout.  AIPerf's are cut
to what is read.
"""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

import run_standard_tools
import server_counters
import tool_aiperf
import tool_perf_analyzer
import tool_runs
import tools_options
import tools_report
from angelspec_client.options import Options
from angelspec_client.protocol import build_request, to_json
from load import Request
from server_counters import Counters, CountersError
from serving import Endpoint
from tool_runs import Measured, ToolError
from tools_report import ToolWindow

RECORDED = Path(__file__).parent / "recorded"
OPTIONS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "seed": 3, "drafter": "ngram"}
REQUEST = Request(3, [{"role": "user", "content": "Say 'yes'\n\"é\""}], "chat", OPTIONS)


def perf_analyzer(name, **options):
    """The figures of a recorded run."""
    export = json.loads((RECORDED / name / "export.json").read_text())
    report = (RECORDED / name / "report.csv").read_text()
    return tool_perf_analyzer.parse(export, report, Request(0, [], options=OPTIONS | options)), export


def aiperf(name):
    """The figures of a recorded run, its summary and records."""
    summary = json.loads((RECORDED / name / tool_aiperf.SUMMARY).read_text())
    records = [json.loads(line) for line in (RECORDED / name / tool_aiperf.RECORDS).read_text().splitlines()]
    return tool_aiperf.parse(summary, records), summary, records


# What is sent


def test_every_tool_sends_what_our_client_sends():
    body = json.loads(to_json(build_request(None, REQUEST.prompt, None, True, Options(**OPTIONS))))
    assert body["stream"] is True
    assert json.loads(body["messages"]) == REQUEST.prompt
    (entry,) = tool_perf_analyzer.make_inputs([REQUEST])["data"]
    assert entry == {name: [value] for name, value in body.items()}
    (session,) = tool_aiperf.make_inputs([REQUEST])["data"]
    assert session == {"session_id": "3", "payloads": [body]}


def test_commands_ask_for_the_same_requests_and_the_same_number_in_flight(tmp_path):
    command = tool_perf_analyzer.make_command("sh 'my pa'", "h:1", tmp_path, 32, 16)
    assert command[:2] == ["sh", "my pa"]
    assert command[command.index("--request-count") + 1] == "32"
    assert command[command.index("--concurrency-range") + 1] == "16:16"
    command = tool_aiperf.make_command("aiperf", "h:1", tmp_path, tmp_path, 32, 16)
    assert command[command.index("--request-count") + 1] == "32"
    assert command[command.index("--concurrency") + 1] == "16"


# perf_analyzer's export


def test_figures_of_perf_analyzer_come_from_the_times_of_its_responses():
    measured, export = perf_analyzer("perf_analyzer")
    requests = export["experiments"][0]["requests"]
    assert (measured.requests, measured.failed, measured.output_tokens) == (4, 0, 32)
    latency, ttft, tpot = [], [], []
    for request in requests:
        counts = []  # of new tokens in each response
        for outputs in request["response_outputs"]:
            ids = outputs["output_ids"]
            counts.append(len(ids) if isinstance(ids, list) else int(ids != ""))
        assert sum(counts) == 8
        times = [(t - request["timestamp"]) / 1e6 for t in request["response_timestamps"]]
        latency.append(times[-1])
        ttft.append(times[0])
        last = max(i for i, count in enumerate(counts) if count)
        tpot.append((times[last] - times[0]) / (8 - counts[0]))
    np.testing.assert_allclose(measured.latency_ms, latency)
    np.testing.assert_allclose(measured.ttft_ms, ttft)
    np.testing.assert_allclose(measured.tpot_ms, tpot)
    start = min(request["timestamp"] for request in requests)
    end = max(request["response_timestamps"][-1] for request in requests)
    assert measured.duration_s == pytest.approx((end - start) / 1e9)
    # Some response brings several tokens, whose time is divided among them.
    assert len(measured.itl_ms) > sum(len(request["response_timestamps"]) - 1 for request in requests)


def test_perf_analyzer_measures_whole_requests_and_ends_at_a_whole_second():
    measured, export = perf_analyzer("perf_analyzer")
    assert measured.stated["p99_ms"] == pytest.approx(max(measured.latency_ms), rel=0.01)
    begin, end = export["experiments"][0]["window_boundaries"]
    assert measured.stated["requests_per_second"] == pytest.approx(4 / ((end - begin) / 1e9), rel=0.01)
    assert measured.stated["requests_per_second"] < 4 / measured.duration_s


def test_generations_that_perf_analyzer_takes_for_successes_have_failed_when_cut():
    measured, _ = perf_analyzer("perf_analyzer_timeout", max_tokens=64)
    assert (measured.requests, measured.failed) == (4, 4)
    assert "timeout" in measured.first_error


@pytest.mark.parametrize("broken", [{}, {"experiments": []}, {"experiments": [{"requests": []}]}])
def test_another_export_of_perf_analyzer_is_refused(broken):
    with pytest.raises(ToolError, match="not as expected"):
        tool_perf_analyzer.parse(broken, "", REQUEST)


# AIPerf's exports


def test_figures_of_aiperf_are_those_it_prints():
    measured, _, records = aiperf("aiperf")
    assert (measured.requests, measured.failed) == (4, 0)
    assert measured.output_tokens == 31  # of 32: one has no text of its own
    # It divides by a slightly longer time than that from the first request to the last answer.
    assert measured.duration_s == pytest.approx(
        1e-9
        * (
            max(record["metadata"]["request_end_ns"] for record in records)
            - min(record["metadata"]["request_start_ns"] for record in records)
        ),
        rel=1e-3,
    )
    assert 0.97 < measured.stated["tokens_per_second"] / measured.tokens_per_second < 1
    assert np.percentile(measured.latency_ms, 50) == pytest.approx(measured.stated["p50_ms"])
    assert np.percentile(measured.latency_ms, 99) == pytest.approx(measured.stated["p99_ms"])
    assert np.percentile(measured.ttft_ms, 50) == pytest.approx(measured.stated["ttft_p50_ms"])
    assert np.median(measured.tpot_ms) == pytest.approx(measured.stated["itl_p50_ms"])
    assert sorted(record["metadata"]["conversation_id"] for record in records) == ["0", "1", "2", "3"]


def test_refused_requests_are_failures_of_aiperf():
    measured, _, _ = aiperf("aiperf_refused")
    assert (measured.requests, measured.failed, len(measured.latency_ms)) == (4, 1, 3)
    assert "is not loaded" in measured.first_error


def test_aiperf_hides_streams_that_were_cut_and_the_counters_show_it():
    measured, _, _ = aiperf("aiperf_timeout")
    assert (measured.requests, measured.failed) == (4, 0)  # although all four ended by a timeout
    counted = Counters(requests=4, failed=4, output_tokens=measured.output_tokens)
    record = tools_report.make_record("aiperf", "none", 2, [ToolWindow(measured, counted)])
    (difference,) = record["differences"]
    assert difference == "counts 4 requests as successes that failed by the server's counters"


@pytest.mark.parametrize("broken", [{}, {"total_output_tokens": None}])
def test_another_export_of_aiperf_is_refused(broken):
    with pytest.raises(ToolError, match="not as expected"):
        tool_aiperf.parse(broken, [])


# Records and differences


def measured_run(tokens=80, seconds=10.0, latency=(1000.0, 3000.0), failed=0):
    """A run of a tool by hand."""
    return Measured(
        requests=len(latency) + failed,
        failed=failed,
        output_tokens=tokens,
        duration_s=seconds,
        latency_ms=np.array(latency),
        ttft_ms=np.array(latency) / 10,
        tpot_ms=np.array(latency) / 100,
    )


def counted_run(**more):
    """What the server counts of that run."""
    counts = {"requests": 2, "output_tokens": 80, "ttft_s": 0.3, "ttft_count": 2}
    return Counters(**counts | more)


def test_a_record_sums_windows_and_takes_the_median_of_rates():
    windows = [
        ToolWindow(measured_run(80, 10.0), counted_run()),
        ToolWindow(measured_run(80, 5.0, (500.0, 700.0)), counted_run()),
        ToolWindow(measured_run(80, 2.0, (100.0, 200.0)), counted_run()),
    ]
    record = tools_report.make_record("perf_analyzer", "none", 4, windows)
    assert (record["mode"], record["tool"], record["concurrency"]) == (
        "ar (perf_analyzer)",
        "perf_analyzer",
        4,
    )
    assert (record["requests"], record["output_tokens"], record["duration_s"]) == (6, 240, 17.0)
    assert record["tokens_per_second"] == 16.0
    latencies = [100, 200, 500, 700, 1000, 3000]
    assert record["latencies_ms"] == latencies
    assert record["p50_ms"] == pytest.approx(np.percentile(latencies, 50), abs=1e-3)
    assert record["p99_ms"] == pytest.approx(np.percentile(latencies, 99), abs=1e-3)
    assert record["server"]["ttft_mean_ms"] == 150.0
    assert record["itl_p50_ms"] is None
    assert record["differences"] == []
    assert len(record["windows"]) == 3
    json.dumps(record, allow_nan=False)


def test_a_record_without_any_success_has_no_times():
    run = measured_run(0, 1.0, (), failed=3)
    record = tools_report.make_record("load", "ngram", 4, [ToolWindow(run, Counters(requests=3, failed=3))])
    assert (record["mode"], record["error_rate"], record["p99_ms"]) == ("ngram", 1.0, None)
    assert tools_report.make_table([record]).row_count == 1


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"requests": 3}, "sent 2 requests, the server ended 3"),
        ({"failed": 1}, "counts 1 requests as successes that failed"),
        ({"output_tokens": 100}, "counts 80 output tokens, the server 100 (-20.0%)"),
        ({"cached_tokens": 17}, "17 prompt tokens came from the prefix cache"),
    ],
)
def test_what_the_server_counts_otherwise_is_said(counts, message):
    window = ToolWindow(measured_run(), counted_run(**counts))
    (difference,) = tools_report.make_record("aiperf", "none", 4, [window])["differences"]
    assert difference.startswith(message)


def test_the_table_sets_each_tool_beside_our_load_over_the_same_protocol():
    rates = {"load": 10.0, "perf_analyzer": 8.0, "load-http": 20.0, "aiperf": 10.0}
    records = [
        tools_report.make_record(tool, "none", 4, [ToolWindow(measured_run(80, 80 / rate), counted_run())])
        for tool, rate in rates.items()
    ]
    table = tools_report.make_table(records)
    assert list(table.columns[5].cells) == ["", "0.800", "", "0.500"]


# The server's counters

PAGE = """# HELP angelspec_output_tokens_total Generated tokens
# TYPE angelspec_output_tokens_total counter
angelspec_output_tokens_total 784
angelspec_cached_tokens_total 5
angelspec_requests_total{reason="refused"} 8
angelspec_requests_total{reason="timeout"} 19
angelspec_requests_total{reason="length"} 51
angelspec_requests_total{reason="eos"} 2
angelspec_requests_running 1
angelspec_requests_waiting 2
angelspec_time_to_first_token_seconds_bucket{le="0.005"} 0
angelspec_time_to_first_token_seconds_count 70
angelspec_time_to_first_token_seconds_sum 14.0
nv_inference_count{model="target",version="1"} 3
"""


def test_counters_are_read_from_the_metrics_page():
    counters = server_counters.parse_counters(PAGE)
    assert (counters.requests, counters.failed, counters.output_tokens) == (80, 27, 784)
    assert (counters.cached_tokens, counters.unfinished) == (5, 3)
    assert counters.ttft_mean_ms == pytest.approx(200)
    assert counters.request_mean_ms is None
    assert (counters - counters) == Counters()
    assert (counters + counters).requests == 160


def test_another_page_is_refused():
    with pytest.raises(CountersError, match="no angelspec_ counters"):
        server_counters.parse_counters("nv_inference_count 3\n")
    with pytest.raises(CountersError, match="cannot read http://127"):
        server_counters.read_counters("http://127.0.0.1:9/metrics")


# Running a tool


def test_a_tool_that_fails_is_an_error_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    tool_runs.run_tool(["sh", "-c", "echo fine"], log, 10)
    assert log.read_text() == "fine\n"
    with pytest.raises(ToolError, match=r"sh ended with status 3(.|\n)*no such model"):
        tool_runs.run_tool(["sh", "-c", "echo no such model >&2; exit 3"], log, 10)
    with pytest.raises(ToolError, match="cannot run"):
        tool_runs.run_tool([str(tmp_path / "absent")], log, 10)


def test_a_tool_that_hangs_is_stopped_with_all_it_started(tmp_path):
    alive = tmp_path / "alive"
    script = f"(while :; do date +%N > {alive}; sleep 0.05; done) & wait"
    with pytest.raises(ToolError, match="not finished within"):
        tool_runs.run_tool(["sh", "-c", script], tmp_path / "log", 0.5)
    before = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == before


# Options and the real server


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tools", "wrk"], "unknown wrk"),
        (["--tools", "load", "--windows", "0"], "--windows must be"),
        (["--tools", "load", "--concurrency", "4,64", "--requests", "32"], "as many as are in flight"),
        (["--tools", "aiperf"], "needs --tokenizer"),
        (["--tools", "perf_analyzer", "--perf-analyzer", "no-such-program -v"], "no-such-program"),
    ],
)
def test_senseless_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        tools_options.read_plan(arguments, "")
    assert message in capsys.readouterr().err


def test_our_load_agrees_with_the_counters_of_the_real_server(server, tmp_path, capfd):
    options, out = server.options, tmp_path / "out.jsonl"
    endpoint = Endpoint(options)
    plan = tools_options.read_plan(
        [
            *("--grpc", endpoint.grpc, "--http", endpoint.http, "--tools", "load,load-http"),
            *("--metrics", options.url(options.metrics_port, "metrics"), "--modes", "none,ngram"),
            *("--concurrency", "2", "--requests", "4", "--max-tokens", "8", "--out", str(out)),
        ],
        "",
    )
    asyncio.run(run_standard_tools.run(plan))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    modes = [record["mode"] for record in records]
    assert modes == ["ar", "ar (load-http)", "ngram", "ngram (load-http)"]
    for record in records:
        assert (record["requests"], record["failed"], record["output_tokens"]) == (4, 0, 32)
        assert record["server"]["output_tokens"] == 32
        assert record["server"]["ttft_mean_ms"] < record["ttft_mean_ms"]
        # This server has a prefix cache and sees the same prompts again.
        assert all("prefix cache" in difference for difference in record["differences"])
    assert "load-http" in capfd.readouterr().err
