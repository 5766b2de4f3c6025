"""Serve a model: start tritonserver in the foreground, drain and stop it on Ctrl-C or SIGTERM.

    python scripts/serve.py [--target ID_OR_FOLDER] [--drafter NAME_OR_MODEL] [--config FILE] ...

Most options can be given as environment variables instead: TARGET, DRAFTER, CONFIG, HTTP_PORT,
GRPC_PORT, METRICS_PORT, ADDRESS, TRITON_ROOT.  The container's entrypoint is this file too.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from angelspec_backend.core.config import CONFIG_ENV
from checks import CheckError, check_ports, check_shm
from prepare_target import PrepareError
from server import ServerError, TritonServer
from server_config import build_config
from server_options import ROOT, ServerOptions


class StopRequested(Exception):
    """A signal asked the server to stop."""


class Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP, so that the steps below end at points of their own choice."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def check(self, allowed: int = 0) -> None:
        """Raise StopRequested once more than ``allowed`` signals have come."""
        if self.count > allowed:
            raise StopRequested


class Progress:
    """One line that shows how long a step takes: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.terminal = sys.stdout.isatty()
        self.next = 0.0

    def __call__(self, seconds: float) -> None:
        if seconds >= self.next:
            start, end = ("\r\033[K", "") if self.terminal else ("", "\n")
            print(f"{start}{self.text} {seconds:.0f} s", end=end, flush=True)
            self.next = seconds + (1.0 if self.terminal else 30.0)

    def done(self) -> None:
        """Leave the line; what is printed next starts on its own."""
        if self.terminal and self.next:
            print(flush=True)


def parse_arguments(arguments: list[str], env: Mapping[str, str]) -> argparse.Namespace:
    """Options of the command line; their defaults come from the environment, where empty means unset."""
    parser = argparse.ArgumentParser(description="Serve a model with lossless speculative decoding.")

    def option(flag: str, fallback: str, text: str, kind: type = str) -> None:
        name = flag.lstrip("-").replace("-", "_").upper()
        parser.add_argument(flag, type=kind, default=env.get(name) or fallback, help=f"{text} ({name})")

    option("--target", "", "Hugging Face id or local folder; default: SmolLM2-135M-Instruct")
    option("--drafter", "", "'dfly', 'mtp', 'ngram', 'none', or the id or folder of a drafter or draft model")
    option("--config", env.get(CONFIG_ENV, ""), "YAML file with engine options")
    option("--http-port", "8000", "HTTP port", int)
    option("--grpc-port", "8001", "gRPC port", int)
    option("--metrics-port", "8002", "port of the Prometheus metrics", int)
    option("--address", "127.0.0.1", "IP address to listen on")
    option("--triton-root", "", "folder of a tritonserver; default: the one in the environment")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--run-dir", type=Path, help="log and state of this run; default: run/HTTP_PORT")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until the first token")
    return parser.parse_args(arguments)


def make_options(arguments: argparse.Namespace) -> ServerOptions:
    """Check everything that can be checked before anything is started."""
    ports = {name: getattr(arguments, name.lower()) for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")}
    check_ports(arguments.address, ports)
    check_shm()
    config, checked = build_config(arguments.config, arguments.target, arguments.drafter)
    return ServerOptions(
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        address=arguments.address,
        config=config,
        run_dir=arguments.run_dir and arguments.run_dir.resolve(),
        model_repository=arguments.model_repository.resolve(),
        triton_root=Path(arguments.triton_root) if arguments.triton_root else None,
        start_timeout=arguments.start_timeout,
        drain_timeout=checked.drain_timeout,
    )


def serve(options: ServerOptions, signals: Signals) -> None:
    """Run a server until a signal comes.

    Raises:
        CheckError, ServerError: it did not start, or died.
    """
    server = TritonServer(options)
    loading = Progress(f"loading {shown(options.config['target'])}, log in {shown(server.log_path)}:")

    def tick(seconds: float) -> None:
        signals.check()
        loading(seconds)

    try:
        server.start()
        try:
            server.wait_until_ready(tick)
        finally:
            loading.done()
        print(welcome(options), flush=True)
        while True:
            signals.check()
            server.check_alive()
            time.sleep(0.2)
    except StopRequested:
        if server.ready:
            drain(server, signals)
    finally:
        server.stop()
    print("stopped", flush=True)


def drain(server: TritonServer, signals: Signals) -> None:
    """Let running generations finish, until the deadline or another signal."""
    seconds = server.options.drain_timeout
    print(f"draining: running requests get up to {seconds:.0f} s; Ctrl-C again stops now", flush=True)
    allowed = signals.count
    try:
        if not server.drain(lambda _: signals.check(allowed)):
            print(f"some requests had not finished after {seconds:.0f} s and were cut", flush=True)
    except StopRequested:
        print("stopping now", flush=True)


def welcome(options: ServerOptions) -> str:
    """What to try first, printed when the server is ready."""
    client = shown(Path(sys.executable).with_name("angelspec"))
    url = options.url(options.http_port, "v2/models/angelspec/generate")
    return f"""ready; try:
  curl -s {url} -d '{{"text_input": "The capital of France is", "max_tokens": 32}}'
  {client} generate "What is the capital of France?" --server 127.0.0.1:{options.grpc_port} --stream
metrics: {options.url(options.metrics_port, "metrics")}   stop: Ctrl-C"""


def shown(path: Path | str) -> str:
    """A path as short as it can be said here; a model id as it is."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)


def main() -> int:
    """Command line: serve until a signal; exit code 0 after a clean stop, 1 with one line when not."""
    signals = Signals()
    try:
        serve(make_options(parse_arguments(sys.argv[1:], os.environ)), signals)
    except (CheckError, PrepareError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
