"""Checkpoints of a training run: complete or absent, so that a run can be killed at any moment."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_NAME = "step_{:07d}.pt"


class CheckpointError(RuntimeError):
    """A run cannot be continued; the message says why."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder.  The data of step n is a function of n, so that no more need be kept."""

    folder: Path
    keep: int = 2

    def steps(self) -> list[int]:
        """Of the checkpoints there are, ascending."""
        names = (re.fullmatch(r"step_(\d+)\.pt", path.name) for path in self.folder.glob("step_*.pt"))
        return sorted(int(match[1]) for match in names if match)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, then delete old ones but the best."""
        write_durably(self.folder / _NAME.format(step), lambda file: torch.save(state, file))
        best = (self.best() or {}).get("step")
        for old in self.steps()[: -self.keep]:
            if old != best:
                (self.folder / _NAME.format(old)).unlink()

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """The newest checkpoint, or that of a step; None if there is none.

        Raises:
            CheckpointError: the file is broken.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            return None
        path = self.folder / _NAME.format(steps[-1] if step is None else step)
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch meets in a broken file
            raise CheckpointError(
                f"{path} cannot be read ({error}); delete it to go on from the one before"
            ) from None
        return state

    def best(self) -> dict[str, Any] | None:
        """{"step", "accepted_length"} of the best evaluation of a checkpoint."""
        path = self.folder / "best.json"
        return json.loads(path.read_text()) if path.exists() else None

    def offer(self, step: int, accepted_length: float) -> bool:
        """Note an evaluation; whether it is the best so far."""
        best = self.best()
        if best is not None and best["accepted_length"] >= accepted_length:
            return False
        text = json.dumps({"step": step, "accepted_length": accepted_length})
        write_durably(self.folder / "best.json", lambda file: file.write(text.encode()))
        return True


def write_durably(path: Path, write: Any) -> None:
    """Write a file under another name first, so that ``path`` is complete.  write: gets the open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
