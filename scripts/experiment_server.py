"""The server under test: started for the experiment or found running; its counters, memory and versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import angelspec_backend
from benchmark_report import describe_machine
from checks import free_ports
from experiment_config import Experiment, engine_options
from server import TritonServer
from server_counters import Counters, read_counters
from server_options import ROOT, ServerOptions
from server_processes import stub_pid
from serving_memory import MB, PROCESSES

_RESET_PEAK = "5"  # what /proc/PID/clear_refs calls it


class Subject:
    """A server that is measured."""

    def __init__(
        self, address: str, metrics_server: str, pids: dict[str, int], own: TritonServer | None = None
    ) -> None:
        self.address = address  # host:port of the protocol in use
        self._metrics_url = f"http://{metrics_server}/metrics" if metrics_server else ""
        self._pids = pids
        self._own = own

    def check_alive(self) -> None:
        """Raises ServerError when a server that the experiment started is gone."""
        if self._own is not None:
            self._own.check_alive()

    def counters(self) -> Counters | None:
        """The server's counters once it has nothing to do; None: they are not read.

        Raises:
            CountersError: they cannot be read.
        """
        return read_counters(self._metrics_url) if self._metrics_url else None

    def reset_peaks(self) -> None:
        """Let peaks of memory begin anew."""
        for pid in self._pids.values():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)

    def peaks_mb(self) -> dict[str, float]:
        """Peak resident memory of each process since the last reset, pages that they share included."""
        peaks = {}
        for name, pid in self._pids.items():
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if match := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
                    peaks[name] = 1024 * int(match[1]) / MB
        return peaks


@contextmanager
def open_subject(experiment: Experiment) -> Iterator[Subject]:
    """The running server that the experiment names, or one started for it.

    Raises:
        CheckError, PrepareError: the server would refuse its options.
        ServerError: it does not start.
    """
    if experiment.server:
        yield Subject(experiment.server, experiment.metrics_server, _local_pids(experiment.server))
        return
    config, checked = engine_options(experiment)
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        http_port,
        grpc_port,
        metrics_port,
        config=config,
        run_dir=ROOT / "run" / f"experiment-{experiment.name}",
        drain_timeout=checked.drain_timeout,
    )
    with TritonServer(options) as server:
        server.wait_until_ready()
        port = http_port if experiment.protocol == "http" else grpc_port
        yield Subject(f"127.0.0.1:{port}", f"127.0.0.1:{metrics_port}", _model_pids(server.pid), server)


def describe_subject(subject: Subject, protocol: str) -> dict[str, Any]:
    """Hardware, versions and revision, which every line repeats."""
    machine = describe_machine()
    return {
        "hardware": {"cpu": machine["cpu"], "cores": machine["cores"], "gpu": _gpu()},
        "versions": {
            "angelspec": angelspec_backend.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers")},
            "tritonserver": _triton_version(subject.address, protocol),
        },
        "git": _revision(),
    }


def _local_pids(address: str) -> dict[str, int]:
    """The processes of a server on this machine, by its address; none where it is elsewhere."""
    port = address.rpartition(":")[2].encode()
    wanted = {b"--http-port=" + port, b"--grpc-port=" + port}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(b"tritonserver") and wanted & set(command):
                return _model_pids(int(folder.name))
    return {}


def _model_pids(tritonserver: int) -> dict[str, int]:
    pids = {"tritonserver": tritonserver}
    for name in PROCESSES:
        with suppress(LookupError):
            pids[name] = stub_pid(tritonserver, name)
    return pids


def _triton_version(address: str, protocol: str) -> str | None:
    if protocol == "grpc":
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        with suppress(InferenceServerException), InferenceServerClient(address) as client:
            return client.get_server_metadata().version
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://{address}/v2", timeout=10) as reply:
        return json.load(reply)["version"]
    return None


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _gpu() -> str | None:
    """The name of the first GPU."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        if match := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return match[1]
    return None


def _revision() -> str | None:
    """The git revision of this code, marked when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None
