"""What a run reports: JSON lines, TensorBoard, and a picture of its curves."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


class RunLog:
    """Values by step.  Lines that a killed run wrote behind its last checkpoint are dropped on resuming."""

    def __init__(self, folder: Path, start: int, tensorboard: bool) -> None:
        """start: the step that comes next."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        kept = [line for line in read_log(self.path) if line["step"] <= start]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            try:
                module = importlib.import_module("torch.utils.tensorboard")
            except ImportError:
                print("tensorboard is not installed: values go to log.jsonl only")
            else:
                self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step, after which ``step`` steps are done."""
        self._file.write(json.dumps({"step": step} | {name: float(v) for name, v in values.items()}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_log(path: Path) -> list[dict[str, float]]:
    """The complete lines of a log; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_curves(log: Path, picture: Path) -> None:
    """Loss, accepted lengths and learning rate over the steps, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(log)
    names = {name for line in lines for name in line}
    panels = {
        "loss": ["train/loss", "eval/loss"],
        "accepted length": sorted(name for name in names if "accepted_length" in name),
        "learning rate": ["train/lr"],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4))
    for axis, (title, wanted) in zip(axes, panels.items(), strict=True):
        for name in wanted:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axis.plot(*zip(*points, strict=True), label=name)
        axis.set(title=title, xlabel="step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)


def versions() -> dict[str, str]:
    """What computed a run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
