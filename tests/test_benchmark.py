"""The figures of the benchmark against brute force, and its options."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmark
import benchmark_report
from angelspec_client import Chunk, Generation, Usage
from angelspec_client.metrics import percentile, summarize, token_gaps
from angelspec_client.results import acceptance_length, assemble

chunk_lists = st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 2.0)), min_size=1, max_size=20)


def generation(counts_and_gaps, accepted=0, token=0):
    """A generation of chunks with the given token counts, each so long after the one before."""
    time_s, chunks, tokens = 0.0, [], 0
    for count, gap in counts_and_gaps:
        time_s += gap
        chunks.append(Chunk("x", (token,) * count, time_s))
        tokens += count
    usage = Usage("length", 5, tokens, 1, 0, accepted)
    return assemble((*chunks[:-1], dataclasses.replace(chunks[-1], usage=usage)))


def brute_force_gaps(chunks):
    """One gap per token after the first chunk with tokens."""
    gaps, before = [], None
    for chunk in chunks:
        if not chunk.token_ids:
            continue
        if before is not None:
            for _ in chunk.token_ids:
                gaps.append((chunk.time_s - before) / len(chunk.token_ids))
        before = chunk.time_s
    return gaps


# Metrics


@given(chunk_lists)
def test_token_gaps_match_brute_force_and_add_up_to_the_time_after_the_first(counts_and_gaps):
    chunks = generation(counts_and_gaps).chunks
    gaps = token_gaps(chunks)
    np.testing.assert_allclose(gaps, brute_force_gaps(chunks), rtol=1e-9, atol=1e-12)
    with_tokens = [chunk for chunk in chunks if chunk.token_ids]
    if with_tokens:
        assert sum(gaps) == pytest.approx(with_tokens[-1].time_s - with_tokens[0].time_s)


@given(st.lists(chunk_lists, min_size=1, max_size=8))
def test_summary_matches_numpy_over_all_generations(many):
    generations = [generation(one) for one in many]
    summary = summarize(generations)
    latencies = [1000 * g.chunks[-1].time_s for g in generations]
    assert summary.p50_ms == pytest.approx(np.percentile(latencies, 50))
    assert summary.p99_ms == pytest.approx(np.percentile(latencies, 99))
    gaps = [1000 * gap for g in generations for gap in brute_force_gaps(g.chunks)]
    if gaps:
        assert summary.itl_p50_ms == pytest.approx(np.median(gaps))
        tpot = [1000 * np.mean(brute_force_gaps(g.chunks)) for g in generations if brute_force_gaps(g.chunks)]
        assert summary.tpot_p50_ms == pytest.approx(np.median(tpot))
    assert summary.output_tokens == sum(g.num_output_tokens for g in generations)


def test_time_to_first_token_skips_chunks_without_tokens():
    assert generation([(0, 1.0), (2, 0.5), (1, 0.5)]).ttft_s == pytest.approx(1.5)
    assert generation([(0, 1.0), (0, 0.5)]).ttft_s == pytest.approx(1.5)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_acceptance_length_is_the_mean_of_accepted_plus_bonus(accepted_per_step):
    emitted = sum(accepted + 1 for accepted in accepted_per_step)
    expected = np.mean([accepted + 1 for accepted in accepted_per_step])
    assert acceptance_length(emitted, sum(accepted_per_step)) == pytest.approx(expected)


def test_acceptance_length_is_one_without_speculation_and_zero_without_output():
    assert acceptance_length(17, 0) == 1.0
    assert acceptance_length(0, 0) == 0.0


def test_nothing_measured_is_nan_and_null_in_json():
    assert np.isnan(percentile(np.zeros(0), 50))
    window = benchmark_report.Window(duration_s=1.0)
    cell = benchmark_report.make_cell("ngram", 4, [window], [])
    assert cell["p50_ms"] is None
    assert json.loads(benchmark_report.to_line(cell))["speedup"] is None


# Cells


def window(rate, token=0, errors=0):
    """A window of one second with rate tokens per second."""
    return benchmark_report.Window({0: generation([(rate, 0.5)], token=token)}, [ValueError()] * errors, 1.0)


def test_a_cell_takes_medians_of_windows_and_of_their_ratios():
    windows, baseline = [window(30), window(20), window(90)], [window(10), window(10), window(10)]
    cell = benchmark_report.make_cell("ngram", 4, windows, baseline)
    assert (cell["tokens_per_second"], cell["speedup"]) == (30.0, 3.0)
    assert (cell["requests"], cell["output_tokens"], cell["duration_s"]) == (3, 140, 3.0)
    required = "mode concurrency requests output_tokens duration_s p50_ms p99_ms ttft_p50_ms itl_p50_ms"
    assert {*required.split(), "acceptance_length", "errors"} <= cell.keys()
    assert benchmark_report.make_table([cell]).row_count == 1


def test_answers_are_compared_with_the_first_to_the_same_request():
    answers = benchmark_report.Answers()
    first, same, other = window(3, token=1), window(3, token=1), window(3, token=2)
    for each in (first, same, other):
        answers.compare(each)
    assert [(w.identical, w.compared) for w in (first, same, other)] == [(0, 0), (1, 1), (0, 1)]


# Options


def test_only_the_drafter_differs_between_modes():
    plan = benchmark.read_plan(["--num-draft-tokens", "3", "--seed", "7"])
    ar, ngram = (benchmark.request_options(plan, mode, 5) for mode in ("none", "ngram"))
    assert ar["seed"] == ngram["seed"] == 12
    assert {key for key in ar if ar[key] != ngram[key]} == {"drafter", "num_draft_tokens"}


@pytest.mark.parametrize("arguments", [["--concurrency", "0"], ["--concurrency", "a"], ["--windows", "0"]])
def test_senseless_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        benchmark.read_plan(arguments)
    assert "must be" in capsys.readouterr().err


def test_a_generation_is_a_usage_with_text():
    assert isinstance(generation([(1, 0.1)]), Generation)
    assert generation([(1, 0.1)]).finish_reason == "length"


def test_a_window_has_as_many_requests_as_its_concurrency_was_given():
    def given(*arguments):
        return dict(benchmark.read_plan(["--concurrency", "1,4,64", *arguments]).requests)

    assert given() == {1: 16, 4: 16, 64: 128}
    assert given("--requests", "5") == {1: 5, 4: 5, 64: 5}
    assert given("--requests", "8,8,64") == {1: 8, 4: 8, 64: 64}


@pytest.mark.parametrize("requests", ["4,8", "0", "4,x,8", "-1"])
def test_wrong_numbers_of_requests_are_refused(requests, capsys):
    with pytest.raises(SystemExit):
        benchmark.read_plan(["--concurrency", "1,4,64", f"--requests={requests}"])
    assert "--requests" in capsys.readouterr().err
