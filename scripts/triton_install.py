"""Where the tritonserver binary, its backends and its libraries are.

Two places are known: the wheel ``nvidia-pytriton`` in this environment, and an installation folder
such as ``/opt/tritonserver`` of NVIDIA's container.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checks import CheckError, find_libpython

_WHEEL, _PACKAGE = "nvidia-pytriton", "pytriton"


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver that can be started."""

    binary: Path
    backends: Path
    libraries: tuple[Path, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` plus what the server and its stub processes need to find libraries and Python."""
        # The stub looks for "python3" on PATH to find its packages: that must be this environment's.
        env = {**base, "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", "")])}
        env.pop("PYTHONHOME", None)
        paths = [str(path) for path in self.libraries]
        if known := base.get("LD_LIBRARY_PATH"):
            paths.append(known)
        if paths:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        return env


def installed_folder(root: Path) -> TritonInstall:
    """The installation under ``root``, as in NVIDIA's container.

    Raises:
        CheckError: there is none.
    """
    install = TritonInstall(root / "bin" / "tritonserver", root / "backends")
    if not install.binary.is_file():
        raise CheckError(f"no tritonserver in {root}: {install.binary} is missing")
    return install


def installed_wheel(backends: Path) -> TritonInstall:
    """The server inside the wheel, with a backend folder for the running Python linked into ``backends``.

    Raises:
        CheckError: the wheel is not installed, or has no stub for this Python.
    """
    # Found without importing the package: only the files in it are used, none of its Python code.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckError(f"{_WHEEL}, which carries the server, is not installed: run 'make setup'")
    package = Path(spec.submodule_search_locations[0])
    server = package / "tritonserver"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise CheckError(f"{_WHEEL} has no stub process for Python {version}")
    backend = backends / "python"
    backend.mkdir(parents=True)
    for path in (*(server / "backends" / "python").iterdir(), stub):
        if path.is_file():
            (backend / path.name).symlink_to(path)
    libpython = find_libpython()
    libraries = [package.parent / "nvidia_pytriton.libs", *([libpython] if libpython else [])]
    return TritonInstall(server / "bin" / "tritonserver", backends, tuple(libraries))
