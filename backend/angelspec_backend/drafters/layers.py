"""The building blocks of drafter networks: RMSNorm, rotary positions, attention, SwiGLU, decoder layer.

A network never knows whether it is trained or serves.  It hands queries, keys and values to an ``Attend``:
in training that is masked attention over packed sequences, in serving the paged KV pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerShape:
    """Sizes and conventions of a decoder layer."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of every RMSNorm
    rope_theta: float
    qk_norm: bool = True  # an RMSNorm on each query and key head before the rotation

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, which num_kv_heads {self.num_kv_heads} does not divide"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary positions need an even one")
        if not (self.eps > 0 and self.rope_theta > 0):
            raise ValueError(f"eps {self.eps} and rope_theta {self.rope_theta} must be positive")


class Attend(Protocol):
    """Attention of the tokens at hand over whatever they may see."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with scale 1 / sqrt(head_dim).

        layer: index of the layer within the drafter; query: [n, num_heads, head_dim]; key, value: [n,
        num_kv_heads, head_dim] of the same tokens, normed and rotated.  Returns [n, num_heads, head_dim].
        """
        ...


class RMSNorm(nn.Module):
    """weight * x / rms(x), the quotient in fp32 and then rounded to the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]"""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden: int, intermediate: int, input_size: int = 0) -> None:
        """input_size: width of the input where it is not ``hidden``, the width of the output."""
        super().__init__()
        self.gate_proj = nn.Linear(input_size or hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(input_size or hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., input_size] -> [..., hidden]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of some tokens: computed once, applied in every layer."""

    cos: Tensor  # [n, 1, head_dim]
    sin: Tensor  # [n, 1, head_dim]

    @staticmethod
    def at(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
        """positions: [n] integers; the angles are computed in fp32 and rounded to ``dtype`` at the end."""
        device = positions.device
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        angles = positions.float()[:, None, None] * theta**-exponent  # [n, 1, head_dim / 2]
        angles = torch.cat([angles, angles], -1)
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the two halves of each head against each other.  x: [n, heads, head_dim]"""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate queries or keys to their positions.  x: [n, heads, head_dim]; positions: [n]."""
    return Rotary.at(positions, x.shape[-1], theta, x.dtype)(x)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and no biases."""

    def __init__(self, shape: LayerShape, input_size: int = 0) -> None:
        """input_size: width of the input where it is not ``shape.hidden`` (EAGLE-3: twice that)."""
        super().__init__()
        width, query, kv = (
            input_size or shape.hidden,
            shape.num_heads * shape.head_dim,
            shape.num_kv_heads * shape.head_dim,
        )
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        """[n, heads * head_dim] -> [n, heads, head_dim]"""
        return x.unflatten(-1, (-1, self.head_dim))

    def key_value(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x: [n, width] -> keys and values, each [n, num_kv_heads, head_dim]"""
        return rotary(self.k_norm(self.heads(self.k_proj(x)))), self.heads(self.v_proj(x))

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, layer: int) -> Tensor:
        """x: [n, width] -> [n, hidden]"""
        query = rotary(self.q_norm(self.heads(self.q_proj(x))))
        return self.o_proj(attend(layer, query, *self.key_value(x, rotary)).flatten(-2))


class DecoderLayer(nn.Module):
    """The pre-norm decoder layer of Llama and Qwen3."""

    def __init__(
        self, shape: LayerShape, attention: Attention | None = None, mlp: nn.Module | None = None
    ) -> None:
        """attention, mlp: instead of ``Attention(shape)`` and ``SwiGLU``, [n, hidden] -> [n, hidden]."""
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = attention or Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = mlp or SwiGLU(shape.hidden, shape.intermediate)

    def forward(self, hidden: Tensor, rotary: Rotary, attend: Attend, layer: int) -> Tensor:
        """hidden: [n, hidden] the residual stream -> the same behind this layer"""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
