"""Replace a Hugging Face model's weights by packed ones: faster on the CPU, and independent of the batch.

Layers with the same input (q/k/v, gate/up, ...) become one product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from angelspec_backend.engine.linear import PackedLinear, fuse


class FusedLinear(nn.Module):
    """Several linear layers of one input as one product, computed when the first of them is called."""

    def __init__(self, linears: list[nn.Linear], quantization: str) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.linear = fuse(*linears, quantization=quantization)
        self._input: Tensor | None = None
        self._pieces: tuple[Tensor, ...] = ()

    def piece(self, x: Tensor, index: int) -> Tensor:
        """The output of layer ``index``.  x: [..., in], the same tensor object for all of them."""
        if x is not self._input:
            self._input, self._pieces = x, self.linear(x).split(self.sizes, dim=-1)
        piece = self._pieces[index]
        if index == len(self.sizes) - 1:
            self._input, self._pieces = None, ()
        return piece


class FusedPiece(nn.Module):
    """Stands where one of the fused layers was."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused, self.index = fused, index

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.piece(x, self.index)


class PackedExperts(nn.Module):
    """The experts of a mixture, each a pair of packed layers, summed per token in order of choice."""

    def __init__(self, experts: Any, quantization: str) -> None:
        super().__init__()
        self.inner = experts  # its gating and norm; the weights move out of it
        up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.up = nn.ModuleList(self._take(up_name, quantization))
        self.down = nn.ModuleList(self._take("down_proj", quantization))

    def _take(self, name: str, quantization: str) -> list[PackedLinear]:
        weights = getattr(self.inner, name).data  # [num_experts, out, in], or [.., in, out] if transposed
        biases = getattr(self.inner, f"{name}_bias").data if self.inner.has_bias else [None] * len(weights)
        delattr(self.inner, name)
        if self.inner.is_transposed:
            weights = weights.transpose(1, 2)
        return [PackedLinear(w.contiguous(), b, quantization) for w, b in zip(weights, biases, strict=True)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [num_tokens, hidden]; top_k_index, top_k_weights: [num_tokens, top_k]."""
        num_tokens, top_k = top_k_index.shape
        chosen = hidden_states.new_zeros(top_k, num_tokens, hidden_states.shape[-1])
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.up):  # a router's sentinel for "no expert"
                continue
            token, choice = torch.where(top_k_index == expert)
            inner = self.up[expert](hidden_states[token])
            inner = self.inner._apply_gate(inner) if self.inner.has_gate else self.inner.act_fn(inner)
            out = self.down[expert](inner)
            if self.inner.has_post_expert_norm:
                out = self.inner.post_expert_norm(out)
            chosen[choice, token] = (out * top_k_weights[token, choice, None]).to(chosen.dtype)
        total = chosen[0]
        for index in range(1, top_k):
            total = total + chosen[index]
        return total


def pack_weights(model: nn.Module, trial_forward: Callable[[], object], quantization: str = "none") -> None:
    """Replace the model's linear layers and experts by packed ones, fusing layers that share their input.

    Siblings (q/k/v, gate/up, ...) are recognised in one trial forward: they are called with the
    very same tensor object.  quantization: see PackedLinear.
    """
    _unify_linears(model)
    modules = dict(model.named_modules())
    for names in _siblings_of_one_input(model, trial_forward):
        parent = modules[names[0].rpartition(".")[0]]
        linears: list[Any] = [modules[name] for name in names]
        fused = FusedLinear(linears, quantization) if len(names) > 1 else None
        for index, name in enumerate(names):
            packed = FusedPiece(fused, index) if fused else fuse(linears[0], quantization=quantization)
            setattr(parent, name.rpartition(".")[2], packed)
    for name, module in modules.items():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            path, _, child = name.rpartition(".")
            setattr(modules[path], child, PackedExperts(module, quantization))


def _unify_linears(model: nn.Module) -> None:
    """Turn GPT-2's Conv1D, a linear layer with its weight transposed, into what it is."""
    for name, module in dict(model.named_modules()).items():
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.weight.shape[0], module.weight.shape[1], device="meta")
            linear.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)
            linear.bias = module.bias
            path, _, child = name.rpartition(".")
            setattr(model.get_submodule(path), child, linear)


def _siblings_of_one_input(model: nn.Module, trial_forward: Callable[[], object]) -> list[list[str]]:
    names = {module: name for name, module in model.named_modules() if type(module) is nn.Linear}
    calls: dict[tuple[str, int, torch.dtype], list[str]] = {}
    inputs: list[Tensor] = []  # kept alive, so that an id stays one tensor's

    def record(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        key = (names[module].rpartition(".")[0], id(args[0]), module.weight.dtype)
        calls.setdefault(key, []).append(names[module])

    handles = [module.register_forward_pre_hook(record) for module in names]  # type: ignore[arg-type]
    try:
        trial_forward()
    finally:
        for handle in handles:
            handle.remove()
    groups = [list(dict.fromkeys(group)) for group in calls.values()]
    count = Counter(name for group in groups for name in group)
    fused = [group for group in groups if len(group) > 1 and all(count[name] == 1 for name in group)]
    done = {name for group in fused for name in group}
    return fused + [[name] for name in names.values() if name not in done]
