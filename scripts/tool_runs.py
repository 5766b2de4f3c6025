"""What every measuring tool has in common: running its command, and the figures of one run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from angelspec_client import Generation
from angelspec_client.metrics import token_gaps

_SHOWN = 5  # last lines of a failed tool's output


class ToolError(RuntimeError):
    """A tool cannot be run, or its output not be read; the message says which and why."""


@dataclass(frozen=True)
class Measured:
    """What a tool says of one run.  Times are the tool's own, of requests that it counts as successes."""

    requests: int  # sent
    failed: int
    output_tokens: int
    duration_s: float  # from the first request to the last answer
    latency_ms: NDArray[np.float64]  # [num_good] whole requests
    ttft_ms: NDArray[np.float64]  # [num_good]
    tpot_ms: NDArray[np.float64]  # [up to num_good] time per token after the first chunk
    itl_ms: NDArray[np.float64] | None = None  # [num_gaps] before each token; None: the tool does not say
    first_error: str | None = None
    stated: Mapping[str, float] = field(default_factory=dict)  # figures as the tool itself prints them

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.duration_s


def from_generations(
    generations: Sequence[Generation],
    errors: Sequence[Exception],
    duration_s: float,
    stated: Mapping[str, float] | None = None,
) -> Measured:
    """The figures of generations that ended well, as angelspec_client.metrics defines them."""
    gaps_ms = [1000.0 * token_gaps(generation.chunks) for generation in generations]
    return Measured(
        requests=len(generations) + len(errors),
        failed=len(errors),
        output_tokens=sum(generation.num_output_tokens for generation in generations),
        duration_s=duration_s,
        latency_ms=np.array([1000.0 * generation.duration_s for generation in generations]),
        ttft_ms=np.array([1000.0 * generation.ttft_s for generation in generations]),
        tpot_ms=np.array([gaps.mean() for gaps in gaps_ms if len(gaps)]),
        itl_ms=np.concatenate(gaps_ms) if gaps_ms else np.zeros(0),
        first_error=str(errors[0]) if errors else None,
        stated=stated or {},
    )


def run_tool(
    command: Sequence[str], log: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Run a command to its end, its output in a file; nothing of it is left, whatever happens.

    Raises:
        ToolError: it cannot be run, fails, or takes longer than timeout_s.
    """
    name = Path(command[0]).name
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"cannot run {command[0]}: {error.strerror}") from None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ToolError(f"{name} has not finished within {timeout_s:g} s, log in {log}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        shown = "\n".join(f"  {line}" for line in lines[-_SHOWN:])
        raise ToolError(f"{name} ended with status {status}, log in {log}\n{shown}")
