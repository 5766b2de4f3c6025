"""The processes of a server and what they leave in the system: sessions, shared memory, run folders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SHM = Path("/dev/shm")
SHM_PREFIX_FILE = "shm-prefix"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> Callable[[], None]:
    """A function for the child between fork and exec: SIGTERM reaches it when its parent is killed."""
    libc = ctypes.CDLL(None)  # loaded before the fork, when it is safe

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare


def end_session(session: int, grace: float = 5.0) -> None:
    """Wait up to ``grace`` seconds for all processes of a session to end, then kill those that remain."""
    deadline = time.monotonic() + grace
    while any(session_pids(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def clean_run(folder: Path) -> None:
    """Remove a stopped run's shared memory and state; its log stays for reading."""
    prefix_file = folder / SHM_PREFIX_FILE
    if prefix_file.is_file() and (prefix := prefix_file.read_text()):
        for segment in SHM.glob(f"{prefix}*"):
            segment.unlink(missing_ok=True)
    for name in ("config.yaml", "drain", SHM_PREFIX_FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "backends", ignore_errors=True)


def session_pids(session: int) -> Iterator[int]:
    """The processes of a session that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before ")" may hold anything
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session and fields[0] != "Z":
            yield int(stat.parent.name)


def stub_pid(server: int, model: str) -> int:
    """The process of a model, by the process id of its tritonserver.

    Raises:
        LookupError: there is none.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = re.search(r"^PPid:\t(\d+)", (folder / "status").read_text(), re.MULTILINE)
        except OSError:
            continue  # it ended meanwhile
        is_stub = b"python_backend_stub" in command[0] and parent and int(parent[1]) == server
        if is_stub and any(f"/{model}/".encode() in part for part in command):
            return int(folder.name)
    raise LookupError(f"no process of {model}")
