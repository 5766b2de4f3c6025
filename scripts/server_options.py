"""What is fixed when a server starts: its options, and what they mean for tritonserver."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton_install import TritonInstall

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("target", "drafter", "speculate", "angelspec")
_EXIT_TIMEOUT = 10  # seconds tritonserver waits for its models at exit; drained ones need none


@dataclass(frozen=True)
class ServerOptions:
    """Everything that is fixed when a server starts."""

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = "127.0.0.1"
    config: Mapping[str, Any] = field(default_factory=dict)  # engine options that differ from the defaults
    run_dir: Path | None = None  # log and state of this run; default: run/<http_port>
    model_repository: Path = ROOT / "model_repository"
    triton_root: Path | None = None  # an installation folder; default: the server in the wheel
    start_timeout: float = 900.0  # seconds until the first generated token
    drain_timeout: float = 30.0  # seconds running generations get when the server stops

    @property
    def folder(self) -> Path:
        """Where this run keeps its log and its state."""
        return self.run_dir or ROOT / "run" / str(self.http_port)

    def url(self, port: int, path: str) -> str:
        """The address of a path of the server, as seen from this machine."""
        host = "127.0.0.1" if self.address == "0.0.0.0" else self.address
        return f"http://{host}:{port}/{path}"


def environment(install: TritonInstall, folder: Path) -> dict[str, str]:
    """Environment variables of the server and its models."""
    return {
        **install.environment(os.environ),
        "ANGELSPEC_CONFIG": str(folder / "config.yaml"),
        "ANGELSPEC_RUN_DIR": str(folder),
        # Waking a thread takes as long as a small matrix product, and a step has hundreds of them, so a
        # thread that waits spins for a while, about 0.3 ms; not longer, since all models share the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "8000",
    }


def command(options: ServerOptions, install: TritonInstall, shm_prefix: str) -> list[str]:
    """The command line of tritonserver.  shm_prefix: how its shared memory segments are called."""
    # Nobody is told the secret: clients may infer and look, but neither load models, nor register
    # shared memory (a known way into the server), nor switch tracing or logging to a file.
    secret = secrets.token_hex(16)
    closed = f"shared-memory,model-repository,trace,logging:x-angelspec-admin={secret}"
    return [
        str(install.binary),
        f"--model-repository={options.model_repository}",
        f"--backend-directory={install.backends}",
        "--model-control-mode=explicit",  # so that angelspec can reload a model whose process died
        *(f"--load-model={name}" for name in MODELS),
        f"--http-address={options.address}",
        f"--grpc-address={options.address}",
        f"--metrics-address={options.address}",
        f"--http-port={options.http_port}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={options.start_timeout:.0f}",
        f"--exit-timeout-secs={_EXIT_TIMEOUT}",
    ]
