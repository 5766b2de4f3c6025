"""Builds the CPU kernels with g++, once per machine; the library lies beside the package or in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

SOURCES = (
    "native.cpp",
    "native_attend.h",
    "native_attention.h",
    "native_amx.h",
    "native_fma.h",
    "native_heads.h",
    "native_layers.h",
    "native_linear.h",
    "native_linear_parts.h",
    "native_program.h",
    "native_rows.h",
    "native_sampling.h",
    "native_tails.h",
    "native_tile.h",
    "native_simd.h",
)
# No contraction: whether a*b+c is fused must not depend on how the compiler unrolled a loop.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-exceptions", "-fPIC", "-fopenmp")


class NativeBuildError(RuntimeError):
    """The kernels could not be built or loaded; the message is one line."""


def build() -> Path:
    """The path of the shared library for this CPU and compiler, compiled if it is not there yet.

    Raises:
        NativeBuildError: no compiler, no writable cache folder, or the compiler's first error.
    """
    compiler = os.environ.get("CXX", "g++")
    here = Path(__file__).parent
    version = _run([compiler, "--version"])
    content = "\0".join([*((here / name).read_text() for name in SOURCES), *_COMPILE, version, _cpu()])
    name = f"native-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    folders = (
        here / "_native",
        Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))) / "angelspec",
    )
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _compile(compiler, here / "native.cpp", Path(scratch))
                # Processes that build at the same time each rename a complete file into place.
                os.replace(Path(scratch) / "native.so", folder / name)
            return folder / name
        except OSError:
            continue
    raise NativeBuildError(f"no writable folder to keep the library: tried {' and '.join(map(str, folders))}")


def _compile(compiler: str, source: Path, folder: Path) -> None:
    # Two steps, because linking with -fopenmp would bring in a second OpenMP runtime.
    _run([compiler, *_COMPILE, "-c", str(source), "-o", str(folder / "native.o")])
    _run([compiler, "-shared", "-Wl,--as-needed", str(folder / "native.o"), "-o", str(folder / "native.so")])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"cannot run {command[0]}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NativeBuildError(
            f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}"
        )
    return done.stdout


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0] in wanted}))
