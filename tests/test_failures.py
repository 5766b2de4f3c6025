"""Servers that are full, drain, die, or run beside each other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from angelspec_client import GrpcClient, HttpClient, ServerBusy
from checks import free_ports
from server import ROOT, ServerOptions, TritonServer
from serving import PROMPT, Endpoint, read_while_killing, wait_until

LONG = {"max_tokens": 300, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(target_dir, tmp_path_factory, server):
    """A second server, beside the first: two sequences at a time, one waiting."""
    options = ServerOptions(
        *free_ports(3),
        config={"target": str(target_dir), "max_num_seqs": 2, "max_queue_size": 1, "num_blocks": 256},
        run_dir=tmp_path_factory.mktemp("small"),
    )
    with TritonServer(options) as running:
        running.wait_until_ready()
        yield running


def test_two_servers_side_by_side_give_the_same_text(small, server):
    texts = []
    for one in (small, server):
        with GrpcClient(Endpoint(one.options).grpc) as client:
            texts.append(client.generate(PROMPT, max_tokens=40, ignore_eos=True).text)
    assert texts[0] == texts[1]


def test_a_full_queue_is_answered_at_once(small):
    endpoint = Endpoint(small.options)
    with GrpcClient(endpoint.grpc) as client, HttpClient(endpoint.http) as http:
        streams = [client.stream(PROMPT, max_tokens=1500, ignore_eos=True) for _ in range(3)]
        pool = ThreadPoolExecutor(3)
        for stream in streams:
            pool.submit(next, stream)
        wait_until(lambda: endpoint.metric("angelspec_requests_waiting") == 1)
        begin = time.monotonic()
        with pytest.raises(ServerBusy, match="full"):
            http.generate(PROMPT, max_tokens=1)
        status, reply = endpoint.generate(text_input=PROMPT, max_tokens=1)
        # This tritonserver answers 400 to every error of a decoupled model, so the text carries the code.
        assert status >= 400
        assert reply["error"].startswith("UNAVAILABLE: ")
        assert time.monotonic() - begin < 5
        for stream in streams:
            stream.close()
        pool.shutdown()
        for name in ("angelspec_requests_running", "angelspec_requests_waiting"):
            wait_until(lambda name=name: endpoint.metric(name) == 0)
        assert client.generate(PROMPT, max_tokens=3).num_output_tokens <= 3


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_streams_go_on_with_the_same_tokens_when_a_model_process_is_killed(small, model):
    endpoint = Endpoint(small.options)
    with GrpcClient(endpoint.grpc) as client:
        expected = [client.generate(PROMPT, drafter="none", **(LONG | {"seed": seed})) for seed in (1, 2)]
        streams = [client.stream(PROMPT, drafter="ngram", **(LONG | {"seed": seed})) for seed in (1, 2)]
        results = read_while_killing(small, model, streams)
        assert [r.token_ids for r in results] == [e.token_ids for e in expected]
        assert client.generate(PROMPT, max_tokens=8, ignore_eos=True).num_output_tokens == 8


def run_launcher(target_dir: Path, run_dir: Path) -> tuple[subprocess.Popen[str], ServerOptions]:
    http, grpc, metrics = free_ports(3)
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--target", str(target_dir)]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command += ["--run-dir", str(run_dir)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    return process, ServerOptions(http, grpc, metrics, run_dir=run_dir)


def leftovers(http_port: int) -> list[str]:
    """Processes and shared memory of a server that should be gone."""
    found = [str(path) for path in Path("/dev/shm").glob(f"angelspec-{http_port}-*")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if f"angelspec-{http_port}-".encode() in command or f"--http-port={http_port}".encode() in command:
            found.append(command.decode(errors="replace"))
    return found


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_behind(target_dir, tmp_path):
    process, options = run_launcher(target_dir, tmp_path)
    endpoint = Endpoint(options)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        wait_until(lambda: process.poll() is not None or any("curl" in line for line in lines), 120)
        assert process.poll() is None, "".join(lines)
        with GrpcClient(endpoint.grpc) as client, ThreadPoolExecutor(4) as pool:
            streams = [client.stream(PROMPT, **(LONG | {"seed": seed})) for seed in range(4)]
            running = [pool.submit(stream.read) for stream in streams]
            wait_until(lambda: all(s._progress and len(s._progress.chunks) > 2 for s in streams))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: (tmp_path / "drain").exists() or process.poll() is not None)
            with pytest.raises(ServerBusy, match="draining"):
                client.generate(PROMPT, max_tokens=1)
            results = [future.result(timeout=60) for future in running]
        assert [(r.finish_reason, r.num_output_tokens) for r in results] == [("length", 300)] * 4
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert leftovers(options.http_port) == []


def test_a_taken_port_is_named(target_dir, tmp_path, server):
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--target", str(target_dir)]
    command += ["--http-port", str(server.options.http_port), "--run-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    output = result.stdout + result.stderr
    assert str(server.options.http_port) in output
    assert "HTTP_PORT=" in output
    assert "Traceback" not in output
