"""AdamW and Muon on float32 masters of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

ADAMW_NAMES = ("embed", "head", "fusion")  # 2-D parameters that are not maps between hidden states


@dataclass(frozen=True)
class OptimizerConfig:
    """muon: hidden matrices by Muon, everything else by AdamW."""

    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # of matrices; vectors such as norms' weights have none
    clip: float = 1.0  # of the gradient's global norm
    muon_momentum: float = 0.95
    muon_lr_ratio: float = 1.0  # Muon's learning rate over AdamW's


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon may train this parameter: a matrix that is no embedding, head or fusion weight."""
    return parameter.ndim == 2 and not any(part in name for part in ADAMW_NAMES)


class MasterOptimizer:
    """One optimiser for parameters of any floating type.

    float32 parameters are trained in place; others have a float32 master which collects updates too small for
    their own precision, and are its rounded copy after each step.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig) -> None:
        """Take the parameters that require gradients.

        Raises ValueError if there are none, or Muon is asked for and this torch has none.
        """
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not named:
            raise ValueError("no parameter requires a gradient")
        self.config = config
        self._parameters = [parameter for _, parameter in named]
        self._masters = [_master(parameter) for parameter in self._parameters]
        pairs = list(zip((name for name, _ in named), self._masters, strict=True))
        self._optimizers = _optimizers(pairs, config)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """One update at a learning rate; returns the gradient's global norm before clipping.

        A gradient that is not finite changes nothing; the norm returned tells.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self.config.clip)
        if not torch.isfinite(norm):
            return float(norm)
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lr * (self.config.muon_lr_ratio if name == "muon" else 1.0)
            optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the parameters."""
        states = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        pairs = zip(self._parameters, self._masters, strict=True)
        return {"optimizers": states, "masters": [None if m is p else m.detach().clone() for p, m in pairs]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of an optimiser with the same parameters and configuration.

        Raises ValueError if it has other optimisers or another number of parameters.
        """
        if set(state["optimizers"]) != set(self._optimizers) or len(state["masters"]) != len(self._masters):
            raise ValueError(
                f"the state is of {', '.join(sorted(state['optimizers']))} with {len(state['masters'])} "
                f"parameters, this is {', '.join(sorted(self._optimizers))} with {len(self._masters)}"
            )
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for master, saved in zip(self._masters, state["masters"], strict=True):
            if saved is not None:
                master.copy_(saved)


def _master(parameter: Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().clone().requires_grad_()


def _optimizers(named: list[tuple[str, Tensor]], config: OptimizerConfig) -> dict[str, torch.optim.Optimizer]:
    muon = [master for name, master in named if config.name == "muon" and is_hidden_matrix(name, master)]
    rest = [master for name, master in named if config.name != "muon" or not is_hidden_matrix(name, master)]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    found: dict[str, torch.optim.Optimizer] = {}
    if groups:
        found["adamw"] = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
    if muon:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"torch {torch.__version__} has no Muon: use adamw or torch 2.9 or later")
        found["muon"] = torch.optim.Muon(
            muon,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
    return found
