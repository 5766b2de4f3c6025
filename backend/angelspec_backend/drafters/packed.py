"""A trained drafter network made fast for serving: packed and fused weights, native kernels on the CPU.

The modules are replaced by others of the same formula, so the network's own code runs unchanged.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from angelspec_backend.drafters.chain import FrozenHead
from angelspec_backend.drafters.layers import Attend, Attention, RMSNorm, Rotary, SwiGLU
from angelspec_backend.drafters.moe import MixtureOfExperts, Router
from angelspec_backend.engine import native
from angelspec_backend.engine.linear import PackedLinear

Network = TypeVar("Network", bound=nn.Module)


class FusedAttend(Protocol):
    """What attends from a fused product; ``PagedAttend`` is one."""

    def fused(self, layer: int, qkv: Tensor, rotary: Rotary, attention: PackedAttention) -> Tensor:
        """qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], overwritten -> [n, num_heads * head_dim]"""
        ...


class PackedNorm(nn.Module):
    """``RMSNorm`` in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight.detach())
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]"""
        x = x.contiguous()
        weight = cast(Tensor, self.weight)
        return native.rms_norm(x.view(-1, x.shape[-1]), weight, self.eps, torch.empty_like(x)).view(x.shape)


class PackedSwiGLU(nn.Module):
    """``SwiGLU`` with gate and up as one product."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, quantization: str) -> None:
        """gate, up: [intermediate, input_size]; down: [hidden, intermediate]"""
        super().__init__()
        both = torch.cat([gate.detach(), up.detach()])
        self.gate_up = PackedLinear(both, None, quantization, gated=True)
        self.down = PackedLinear(down.detach().contiguous(), None, quantization)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, input_size] -> [n, hidden]"""
        return self.down(self.gate_up(x))


class PackedAttention(nn.Module):
    """``Attention`` with queries, keys and values as one product, for an attend that takes them so."""

    def __init__(self, attention: Attention, quantization: str) -> None:
        super().__init__()
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_dim = attention.head_dim
        self.num_heads, self.num_kv_heads = (
            projection.out_features // self.head_dim for projection in projections[:2]
        )
        weight = torch.cat([projection.weight.detach() for projection in projections])
        self.qkv = PackedLinear(weight, None, quantization)
        self.out = PackedLinear(attention.o_proj.weight, None, quantization)
        query_norm, key_norm = attention.q_norm, attention.k_norm
        self.query_norm = query_norm.weight.detach() if isinstance(query_norm, RMSNorm) else None
        self.key_norm = key_norm.weight.detach() if isinstance(key_norm, RMSNorm) else None
        self.eps = query_norm.eps if isinstance(query_norm, RMSNorm) else 0.0

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, layer: int) -> Tensor:
        """x: [n, width] -> [n, hidden]"""
        return self.out(cast(FusedAttend, attend).fused(layer, self.qkv(x), rotary, self))

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys behind their norms, if the layer has these.  [n, heads, head_dim] each"""
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return _rms_norm(query, self.query_norm, self.eps), _rms_norm(key, self.key_norm, self.eps)


class PackedRouter(nn.Module):
    """``Router`` with a packed gate, in fp32 as well."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.gate = PackedLinear(router.gate.weight.float())

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, num_experts] in (0, 1)"""
        return torch.sigmoid(self.gate(x.float()))


class PackedMixture(nn.Module):
    """``MixtureOfExperts`` with packed experts."""

    def __init__(self, mixture: MixtureOfExperts, quantization: str) -> None:
        super().__init__()
        projections = [getattr(mixture, f"experts_{name}_proj").data.mT for name in ("gate", "up", "down")]
        self.experts = nn.ModuleList(
            PackedSwiGLU(gate, up, down, quantization) for gate, up, down in zip(*projections, strict=True)
        )
        for name in ("gate", "up", "down"):
            delattr(mixture, f"experts_{name}_proj")
        self.mixture = pack_network(mixture, quantization)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, hidden] -> [n, hidden]"""
        return self.mixture(x, lambda index, mine: self.experts[index](mine))


def pack_network(network: Network, quantization: str = "none") -> Network:
    """Replace the modules of a network, in place, by faster ones.  It can be served then, not trained.

    Subclasses of ``Attention`` are left alone but for their linear layers.
    quantization: "none", or "int8" for linear layers with 8-bit weights, see PackedLinear.
    """
    for name, module in list(network.named_children()):
        packed = _packed(module, quantization)
        if packed is None:
            pack_network(module, quantization)
        else:
            setattr(network, name, packed)
    return network


def _packed(module: nn.Module, quantization: str) -> nn.Module | None:
    """What takes the place of a module; None: its children are looked at."""
    if type(module) is Attention:
        return PackedAttention(module, quantization)
    if type(module) is SwiGLU:
        return PackedSwiGLU(
            module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight, quantization
        )
    if type(module) is MixtureOfExperts:
        return PackedMixture(module, quantization)
    if type(module) is Router:
        return PackedRouter(module)
    if isinstance(module, RMSNorm):
        weight = module.weight
        return PackedNorm(module) if native.supports(weight.dtype, weight.device) else module
    if isinstance(module, (nn.Linear, FrozenHead)):
        return PackedLinear(module.weight, getattr(module, "bias", None), quantization)
    return None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
