"""The mixture of experts of Hy3's decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec_backend.drafters.layers import SwiGLU


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate: int  # of one expert
    num_shared_experts: int  # always active, computed as one wide expert; 0: none
    scaling: float  # of the weights of the chosen experts, which sum to 1 before
    expert_bias: bool = True  # a bias per expert that takes part in the choice, not in the weights

    def __post_init__(self) -> None:
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, allowed: 1 to {self.num_experts}"
            )


class Router(nn.Module):
    """Scores of all experts, in fp32."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, num_experts] in (0, 1)"""
        return torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))


class MixtureOfExperts(nn.Module):
    """Each token's sum of its best experts, weighted, and of the shared expert."""

    def __init__(self, hidden: int, shape: MoeShape) -> None:
        super().__init__()
        self.shape = shape
        experts, inner = shape.num_experts, shape.intermediate
        self.router = Router(hidden, experts)
        if shape.expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.experts_gate_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.experts_up_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.experts_down_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        for weight in (self.experts_gate_proj, self.experts_up_proj, self.experts_down_proj):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        if shape.num_shared_experts:
            self.shared_mlp = SwiGLU(hidden, inner * shape.num_shared_experts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixtureOfExperts:
        """The bias stays in fp32 whatever the network is converted to: rounded, it would choose otherwise."""
        bias = self.expert_bias.data if self.shape.expert_bias else None
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias.data = bias.to(self.expert_bias.device)
        return self

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights.

        The bias (kept up to date in pre-training to spread the load) only decides who is chosen.
        x: [n, hidden] -> ids [n, experts_per_token], weights [n, experts_per_token] in fp32
        """
        scores = self.router(x)
        ranked = scores + self.expert_bias.float() if self.shape.expert_bias else scores
        chosen = ranked.topk(self.shape.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.shape.scaling

    def expert(self, index: int, x: Tensor) -> Tensor:
        """One expert.  x: [n, hidden] -> [n, hidden]"""
        inner = F.silu(x @ self.experts_gate_proj[index]) * (x @ self.experts_up_proj[index])
        return inner @ self.experts_down_proj[index]

    def forward(self, x: Tensor, experts: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        """x: [n, hidden] -> [n, hidden].  experts: instead of ``expert``."""
        chosen, weights = self.route(x)
        compute = experts or self.expert
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            out = compute(expert, x[token]).float()
            total = total.index_add(0, token, out * weights[token, choice, None])
        total = total.to(x.dtype)
        return total + self.shared_mlp(x) if self.shape.num_shared_experts else total
