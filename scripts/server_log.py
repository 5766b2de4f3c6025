"""Why a server stopped, in plain words, out of its log."""

from __future__ import annotations

import re
import signal

_LOAD_FAILED = re.compile(
    r"load failed for model '(?P<model>[^']+)': version \d+ is at UNAVAILABLE state: "
    r"(?:Internal: |Invalid argument: )?(?P<reason>.*?)(?=\n\nAt:|;?\n(?:error|load failed)|;\s*\Z|\Z)",
    re.DOTALL,
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): ")
_ERROR_LINE = re.compile(r"^(?:E\d{4} .*?\] |error: )(?P<text>.+)$", re.MULTILINE)

_NOISE = re.compile(r"CUDA|Cuda|NVML|DCGM")  # what a machine without a GPU always logs


def explain_failure(log: str, returncode: int) -> str:
    """Why tritonserver exited: the models that failed and why, the signal, or its last error lines.

    returncode: as of ``subprocess``, negative for a signal.
    """
    failures = {
        match["model"]: _EXCEPTION.sub("", " ".join(match["reason"].split()))
        for match in _LOAD_FAILED.finditer(log)
    }
    if failures:
        return "\n".join(f"model '{model}' cannot be loaded: {reason}" for model, reason in failures.items())
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; was the memory exhausted?" if name == "SIGKILL" else ""
        return f"tritonserver was ended by {name}{hint}"
    lines = [match["text"].strip('" ') for match in _ERROR_LINE.finditer(log)]
    lines = [line for line in lines if not _NOISE.search(line)]
    lines = lines or [line for line in log.splitlines() if line.strip()]
    return "tritonserver stopped: " + ("; ".join(lines[-3:]) or "it said nothing")
