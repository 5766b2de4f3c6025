"""Locust itself with our users, against the real server: headless, with workers, in the web UI."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from checks import free_ports
from serving import Endpoint, wait_until

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--tier-seconds", "2", "--settle-seconds", "1", "--max-tokens", "8", "--ignore-eos"]


class Run:
    """One run of Locust, in its own process."""

    def __init__(self, folder, name, *arguments):
        self.results = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")}
        path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--results", str(self.results), "--only-summary", *arguments],
                env=environment | {"PYTHONPATH": path},
                stdout=log,
                stderr=log,
            )

    def cells(self):
        """Wait for it, and read what it has written."""
        code = self.process.wait(timeout=120)
        assert code == 0, self.log.read_text()
        return self.lines()

    def lines(self):
        return [json.loads(line) for line in self.results.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """Locust in every way it can be run, all at once: the server has room for them."""
    endpoint, folder = Endpoint(server.options), tmp_path_factory.mktemp("locust")
    grpc, http = ["-H", endpoint.grpc], ["-H", endpoint.http]
    master_port, web_port = free_ports(2)
    master = ["--master-bind-port", str(master_port), "--master-port", str(master_port)]
    web = ["--web-host", "127.0.0.1", "--web-port", str(web_port), "--exit-code-on-error", "0"]
    runs = {
        "grpc": Run(folder, "grpc", "--headless", *grpc, *SMALL, "--tiers", "1,3", "--drafter", "ngram"),
        "http": Run(folder, "http", "HttpStreamUser", "--headless", *http, *SMALL, "--tiers", "2,1"),
        "workers": Run(
            folder, "workers", "--processes", "2", "--headless", *master, *grpc, *SMALL, "--tiers", "2"
        ),
        "web": Run(folder, "web", *web, *grpc, *SMALL),
    }
    runs["web"].port = web_port
    yield runs
    for run in runs.values():
        run.process.terminate()
        run.process.wait(timeout=60)


def check(cells, mode, users):
    assert [(cell["mode"], cell["concurrency"]) for cell in cells] == [(mode, count) for count in users]
    for cell in cells:
        assert cell["failed"] == 0
        assert cell["output_tokens"] > 0
        assert cell["in_flight"] == pytest.approx(cell["concurrency"], rel=0.2)
        assert cell["settings"]["max_tokens"] == 8
        assert len(cell["latencies_ms"]) == cell["requests"]


def test_headless_over_grpc(runs):
    cells = runs["grpc"].cells()
    check(cells, "ngram", [1, 3])
    assert {"chat", "chinese", "code"} <= set().union(*(cell["by_task"] for cell in cells))
    log = runs["grpc"].log.read_text()
    for name in ("GRPC     total", "GRPC     time to first token", "GRPC     inter-token latency"):
        assert name in log


def test_headless_over_http_with_a_user_class_by_name_and_fewer_users_in_the_end(runs):
    cells = runs["http"].cells()
    check(cells, "default", [2, 1])
    assert {cell["settings"]["protocol"] for cell in cells} == {"http"}
    assert "HTTP     total" in runs["http"].log.read_text()


def test_a_master_adds_up_what_its_workers_measure(runs):
    check(runs["workers"].cells(), "default", [2])


def test_the_web_ui_takes_the_options(runs):
    web = runs["web"]
    url = f"http://127.0.0.1:{web.port}/swarm"

    def started():
        body = b"user_count=1&spawn_rate=1&tiers=2&drafter=none"
        try:
            with urllib.request.urlopen(url, body) as reply:
                return json.load(reply)["success"]
        except OSError:
            return False

    wait_until(started, 60)
    wait_until(web.results.is_file, 60)
    check(web.lines(), "ar", [2])
    web.process.send_signal(signal.SIGTERM)
    assert web.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers", "4,x"], "tiers must be positive numbers between commas, got 'x'"),
        (["--prompts", "absent.jsonl"], "cannot read absent.jsonl"),
    ],
)
def test_wrong_options_end_locust_at_once_and_without_a_traceback(tmp_path, arguments, message):
    run = Run(tmp_path, "wrong", "--headless", *arguments)
    assert run.process.wait(timeout=60) == 1
    log = run.log.read_text()
    assert message in log
    assert "Traceback" not in log
