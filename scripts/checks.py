"""Checks of the machine, made before anything is installed or started.

Standard library only, and plain syntax: ``setup.py`` runs them with whatever Python the user has.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PYTHON_MIN, PYTHON_MAX = (3, 10), (3, 13)
SHM_NEEDED = 64 << 20
"""Bytes of free shared memory: each model process starts with 1 MB and grows with its batches."""


class CheckError(RuntimeError):
    """The machine cannot do what was asked; the message is one line that says why and what helps."""


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Refuse a Python the server has no stub process for."""
    if not PYTHON_MIN <= version <= PYTHON_MAX:
        raise CheckError(
            f"Python {version[0]}.{version[1]} is not supported: 3.10 to 3.13 are; "
            "name another one with PYTHON=, as in 'make serve PYTHON=python3.11'"
        )


def check_platform(system: str = sys.platform, machine: str = platform.machine()) -> None:
    """Refuse systems for which there is no server binary."""
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        raise CheckError(f"the server runs on Linux x86_64 and aarch64 only, this is {system} {machine}")


def check_disk(folder: Path, needed: int) -> None:
    """Refuse when the file system of ``folder`` has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckError(
            f"the disk of {folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed: make room"
        )


def check_shm(needed: int = SHM_NEEDED, folder: Path = Path("/dev/shm")) -> None:
    """Refuse when shared memory, through which the server talks to its models, is too small."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        raise CheckError(f"{folder} is missing: the server needs shared memory") from None
    if free < needed:
        raise CheckError(
            f"{folder} has {free >> 20} MB free and {needed >> 20} MB are needed: remove old files there, "
            "enlarge it with 'mount -o remount,size=1g /dev/shm', or start the container with --shm-size=1g"
        )


def check_ports(address: str, ports: Mapping[str, int]) -> None:
    """Refuse ports that are taken, equal, or none.  ports: name of the variable -> port."""
    seen: dict[int, str] = {}
    for name, port in ports.items():
        if not 1 <= port <= 65535:
            raise CheckError(f"{name}: {port} is not a port; allowed: 1 to 65535")
        if port in seen:
            raise CheckError(f"{name} and {seen[port]} are both {port}: give each a port of its own")
        seen[port] = name
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a just closed port counts as free
            try:
                probe.bind((address, port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                reason = "is in use" if taken else f"cannot be bound ({error.strerror})"
                raise CheckError(
                    f"port {port} on {address} {reason}: choose another, as in '{name}={port + 10}'"
                ) from None


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that are free now, for tests and for servers side by side."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind((address, 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def find_libpython() -> Path | None:
    """The folder of the shared libpython the server's stub process needs, None if the linker knows it.

    Raises:
        CheckError: it is not installed; Debian's and Ubuntu's python3 come without it.
    """
    major, minor = sys.version_info[:2]
    name = f"libpython{major}.{minor}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")):
        if folder and Path(folder, name).exists():
            return Path(folder)
    try:
        ctypes.CDLL(name)
    except OSError:
        raise CheckError(
            f"{name} is missing: run 'apt install libpython{major}.{minor}' "
            "(or build your Python with --enable-shared)"
        ) from None
    return None
