"""One tritonserver: start it, wait until it really answers, drain it, stop it, leave nothing behind.

``serve.py`` is the command line over this; tests use it directly::

    with TritonServer(ServerOptions(*free_ports(3), run_dir=tmp_path)) as server:
        server.wait_until_ready()
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import yaml

from checks import check_ports, check_shm
from server_log import explain_failure
from server_options import ROOT, ServerOptions, command, environment
from server_processes import SHM_PREFIX_FILE, clean_run, die_with_parent, end_session
from triton_install import installed_folder, installed_wheel

_KILL_TIMEOUT = 20  # seconds after which a server that hangs at exit is killed
_GENERATE_TIMEOUT = 120  # seconds one token may take, the first on a slow disk included
_FAILING_TIMEOUT = 30  # seconds a loaded server may answer with errors only
_NOT_LISTENING = "not listening yet"
_UNFINISHED = re.compile(r"^angelspec_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


class ServerError(RuntimeError):
    """The server did not start, or died; the message says why in plain words."""


def _ignore(seconds: float) -> None:
    pass


class TritonServer:
    """A running tritonserver with its own session of processes; one object is one run.

    It dies with the thread that started it, so start it from a thread that lives as long.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.log_path = options.folder / "server.log"
        self.ready = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of tritonserver, and the id of its session."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether tritonserver runs; its models may still be loading, or dead."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the processes; returns at once.

        Raises:
            CheckError: a port is taken, shared memory is too small, or there is no server binary.
        """
        options, folder = self.options, self.options.folder
        ports = {
            "HTTP_PORT": options.http_port,
            "GRPC_PORT": options.grpc_port,
            "METRICS_PORT": options.metrics_port,
        }
        check_ports(options.address, ports)
        check_shm()
        clean_run(folder)  # what a killed run left: its port is free, so it is gone
        folder.mkdir(parents=True, exist_ok=True)
        if options.triton_root:
            install = installed_folder(options.triton_root)
        else:
            install = installed_wheel(folder / "backends")
        prefix = f"angelspec-{options.http_port}-{secrets.token_hex(4)}-"
        (folder / SHM_PREFIX_FILE).write_text(prefix)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(options.config)))
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command(options, install, prefix),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(install, folder),
                start_new_session=True,  # Ctrl-C in the terminal must reach the launcher only
                preexec_fn=die_with_parent(os.getpid()),
            )

    def wait_until_ready(self, tick: Callable[[float], None] = _ignore) -> None:
        """Wait until one token has been generated.  ``tick(seconds)`` is called often and may raise.

        Raises:
            ServerError: a model cannot be loaded or cannot generate, or ``start_timeout`` is over.
        """
        begin = time.monotonic()
        failing_since = None
        while (now := time.monotonic()) < begin + self.options.start_timeout:
            tick(now - begin)
            self.check_alive()
            problem = self.try_generate()
            if problem is None:
                self.ready = True
                return
            if problem != _NOT_LISTENING:  # all models are loaded by now, so this does not heal
                failing_since = failing_since or now
                if now > failing_since + _FAILING_TIMEOUT:
                    raise ServerError(f"it cannot generate: {problem}\nthe log is in {self.log_path}")
            time.sleep(0.2)
        raise ServerError(f"no token came within {now - begin:.0f} s\nthe log is in {self.log_path}")

    def check_alive(self) -> None:
        """Raise ServerError with the reason from the log when tritonserver has exited."""
        if self._process is not None and (code := self._process.poll()) is not None:
            reason = explain_failure(self.log_path.read_text(errors="replace"), code)
            raise ServerError(f"{reason}\nthe log is in {self.log_path}")

    def try_generate(self) -> str | None:
        """Generate one token: the only health check that sees a dead model process.  None: it worked."""
        body = json.dumps({"text_input": "Hello", "max_tokens": 1}).encode()
        url = self.options.url(self.options.http_port, "v2/models/angelspec/generate")
        try:
            with urllib.request.urlopen(url, body, timeout=_GENERATE_TIMEOUT) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            return error.read(500).decode(errors="replace")
        except urllib.error.URLError:
            return _NOT_LISTENING
        except (OSError, ValueError) as error:
            return str(error)
        return None if "text_output" in answer else str(answer.get("error", answer))

    def unfinished(self) -> float:
        """Requests that run or wait, from the metrics; 0 when there are no such metrics."""
        url = self.options.url(self.options.metrics_port, "metrics")
        with urllib.request.urlopen(url, timeout=10) as reply:
            return sum(map(float, _UNFINISHED.findall(reply.read().decode())))

    def drain(self, tick: Callable[[float], None] = _ignore) -> bool:
        """Refuse new requests and let the running ones finish; False: some were cut at the deadline.

        It must happen before the server gets its signal: from then on no model can call another.
        """
        (self.options.folder / "drain").touch()
        begin = time.monotonic()
        while self.alive and (seconds := time.monotonic() - begin) < self.options.drain_timeout:
            tick(seconds)
            try:
                if self.unfinished() == 0:
                    return True
            except OSError:
                pass  # busy; the deadline bounds this
            time.sleep(0.1)
        return not self.alive

    def stop(self) -> None:
        """Stop all processes, killing what hangs, and remove their shared memory.  Safe to repeat."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_TIMEOUT)
            end_session(self._process.pid)
            self._process.wait()
        clean_run(self.options.folder)
