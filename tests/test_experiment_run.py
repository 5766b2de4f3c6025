"""run_experiment on the real server: a tiny run, and one that is killed in the middle and goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import run_experiment
from serving import Endpoint, wait_until

SCRIPT = Path(run_experiment.__file__)
TINY = """
name: tiny
modes: [none, ngram]
lengths: {max_prompt_tokens: 64, max_tokens: 6}
concurrency: [1, 2]
requests: {1: 2, 2: 4}
warm_up_requests: 1
warm_up_tokens: 1
windows: 2
metrics: [tokens_per_second, speedup, identical]
rollout: {rollback_on: {error_rate: 0.0, different_rate: 0.0}}
"""
CELLS = [("ar", 1), ("ngram", 1), ("ar", 2), ("ngram", 2)]


@pytest.fixture(scope="module")
def endpoint(server) -> Endpoint:
    return Endpoint(server.options)


@pytest.fixture
def experiment(endpoint, target_dir, tmp_path):
    """The file, and the arguments that name the running server."""
    file = tmp_path / "tiny.yaml"
    prompts = tmp_path / "counting.jsonl"
    texts = [f"Count from {number} to {number + 5}." for number in range(8)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    file.write_text(TINY)
    metrics = f"metrics_server=127.0.0.1:{endpoint.options.metrics_port}"
    arguments = [f"server={endpoint.http}", metrics, f"target={target_dir}", f"prompts={prompts}"]
    return [str(file), *arguments, "--out", str(tmp_path / "results.jsonl")]


def start(arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(arguments):
    process = start(arguments)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def finished_requests(endpoint):
    return endpoint.metric("angelspec_requests_total")


def test_a_tiny_run_measures_every_cell_and_judges(endpoint, experiment, tmp_path):
    status, out, errors = finish(experiment)
    assert status == 0, errors
    assert "ngram: may take 5% of the traffic" in out
    cells = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(cell["mode"], cell["concurrency"]) for cell in cells] == CELLS
    for cell in cells:
        size = 2 * {1: 2, 2: 4}[cell["concurrency"]]
        assert (cell["requests"], cell["failed"], cell["output_tokens"]) == (size, 0, 6 * size)
        assert cell["server"]["requests"] == size
        assert cell["server"]["output_tokens"] == 6 * size
        assert cell["server"]["accepted_draft_tokens"] == cell["accepted_draft_tokens"]
        assert cell["identical"] == cell["compared"]
        assert 0 < cell["ttft_p50_ms"] < cell["p50_ms"] <= cell["p99_ms"]
        assert set(cell["memory_mb"]) == {"tritonserver", "angelspec", "drafter", "target"}
        assert cell["memory_mb"]["target"] > 200
        assert len(cell["windows"]) == 2
        assert all(window["harness_cpu_s"] > 0 for window in cell["windows"])
        assert cell["experiment"] == cell["settings"]["name"] == "tiny"
        assert cell["versions"]["tritonserver"]
        assert cell["hardware"]["cores"] >= 1
    # Every answer but the first to each of the 8 different requests.
    assert sum(cell["compared"] for cell in cells) == 2 * (4 + 8) - 8

    before = finished_requests(endpoint)
    status, out, errors = finish([*experiment, "rollout.rollback_on.acceptance_length=30"])
    assert status == run_experiment.BROKEN_LIMIT
    assert "acceptance_length" in out
    assert "ngram: roll back" in out
    assert finished_requests(endpoint) == before  # complete: nothing is measured again

    status, _, errors = finish([*experiment, "lengths.max_tokens=7"])
    assert status == 1
    assert "other settings: lengths was" in errors


def test_a_killed_run_goes_on_without_measuring_anything_twice(endpoint, experiment, tmp_path):
    results = tmp_path / "results.jsonl"
    process = start(experiment)
    wait_until(lambda: results.exists() and results.read_text().count("\n") == 2, 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = results.read_text()
    assert kept.count("\n") == 2
    wait_until(lambda: endpoint.metric("angelspec_requests_running") == 0)

    before = finished_requests(endpoint)
    status, _, errors = finish(experiment)
    assert status == 0, errors
    assert results.read_text().startswith(kept)
    cells = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(cell["mode"], cell["concurrency"]) for cell in cells] == CELLS
    second_tier = 2 * 2 * 4 + 2  # modes, windows, requests; and a warm-up of each mode
    assert finished_requests(endpoint) - before == second_tier


def test_errors_are_one_line(experiment, tmp_path):
    experiment[1] = "server=127.0.0.1:9"
    status, _, errors = finish(experiment)
    assert status == 1
    assert "no metrics at" in errors or "no connection" in errors
    assert "Traceback" not in errors
    status, _, errors = finish(["absent.yaml"])
    assert (status, errors.count("\n")) == (1, 1)
    assert "cannot read absent.yaml" in errors
