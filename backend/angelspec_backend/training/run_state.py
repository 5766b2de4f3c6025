"""What must be the same, and what is kept, when a run goes on where it was stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from angelspec_backend.drafters.checkpoint import DrafterNetwork, export_drafter
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.training.checkpoint import CheckpointError
from angelspec_backend.training.config import TrainConfig, dump_config
from angelspec_backend.training.log import versions
from angelspec_backend.training.optim import MasterOptimizer

CHANGEABLE = frozenset(
    [
        "out",
        "device",
        "threads",
        "chunk",
        "recompute",
        "log_every",
        "eval_every",
        "eval_documents",
        "save_every",
        "keep",
        "tensorboard",
    ]
)
"""Options of section run that a continued run may change."""


def identity(config: TrainConfig, fingerprint: str) -> dict[str, Any]:
    """What decides a run's weights: its options, and the data by fingerprint."""
    values = config.model_dump(mode="json")
    values["run"] = {name: value for name, value in values["run"].items() if name not in CHANGEABLE}
    values["data"].pop("feature_cache")
    return {**values, "documents": fingerprint}


def check_identity(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue another run.  Raises CheckpointError naming the first difference."""
    before, now = _flat(saved), _flat(wanted)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise CheckpointError(
                f"{folder} holds a run with {key} {before.get(key)!r}, not {now.get(key)!r}: "
                f"continue it with the same, or give another run.out"
            )


def capture(step: nn.Module, optimizer: MasterOptimizer) -> dict[str, Any]:
    """Weights and optimiser state, whole wherever their shards lie."""
    weights = {name: whole(value).detach() for name, value in step.named_parameters()}
    return {"weights": weights, "optimizer": _map(optimizer.state_dict(), whole)}


@torch.no_grad()
def restore(step: nn.Module, optimizer: MasterOptimizer, state: dict[str, Any]) -> None:
    """Undo ``capture``."""
    mesh = None
    for name, parameter in step.named_parameters():
        value = state["weights"][name]
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value.to(parameter.device), mesh, placements)
        parameter.copy_(value)

    def placed(value: Tensor) -> Tensor:
        return value if mesh is None or value.dim() == 0 else distribute_tensor(value, mesh, placements)

    optimizer.load_state_dict(_map(state["optimizer"], placed))


def whole(value: Tensor) -> Tensor:
    """A parameter as one tensor, wherever its shards lie."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def export(network: DrafterNetwork, weights: dict[str, Tensor], folder: Path, config: TrainConfig) -> None:
    """Write the drafter in bf16, and beside it what made it.  weights: of ``capture``."""
    own = dict(network.own_tensors())
    for name, value in weights.items():
        own[name.removeprefix("network.")] = value.to(torch.bfloat16)
    export_drafter(_Exported(network.spec, own), folder)  # type: ignore[arg-type]
    (folder / "training.yaml").write_text(dump_config(config), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Exported:
    """A network as the exporter sees it."""

    spec: DrafterSpec
    tensors: dict[str, Tensor]

    def own_tensors(self) -> dict[str, Tensor]:
        return self.tensors


class Window:
    """Means over the steps since the last line of the log."""

    def __init__(self) -> None:
        self._begin, self._tokens = time.perf_counter(), 0
        self._values: list[dict[str, float]] = []

    def add(self, values: dict[str, float], tokens: int) -> None:
        """Values of one step, and the tokens of its documents."""
        self._values.append(values)
        self._tokens += tokens

    def means(self) -> dict[str, float]:
        """By name; the rate in tokens per second of this process."""
        seconds = time.perf_counter() - self._begin
        names = self._values[0]
        found = {name: sum(each[name] for each in self._values) / len(self._values) for name in names}
        return found | {"train/tokens_per_second": self._tokens / max(seconds, 1e-9)}

    def text(self) -> str:
        """For the progress bar."""
        means = self.means()
        return (
            f"loss {means['train/loss']:.3f}, accepted {means['train/accepted_length']:.2f}, "
            f"{means['train/tokens_per_second']:.0f} tokens/s"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A nested structure with the function applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    return value
