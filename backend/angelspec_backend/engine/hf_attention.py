"""The attention function that a Hugging Face model calls instead of its own.

transformers looks attention functions up by name.  Under a name it knows no mask for, it builds
none and hands over rotated, un-repeated keys and values, so all that is left to do is to store
them in the KV pool and attend.  What to do comes through the keyword ``batch``, which travels
from the model's ``forward`` to every attention layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from angelspec_backend.engine.attention import paged_attention
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.loader import UnsupportedAttention

ATTENTION_NAME = "angelspec"


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over the tokens of a batch."""

    module: nn.Module
    query: Tensor  # [num_tokens, num_heads, key_dim]
    key: Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: Tensor  # [num_tokens, num_kv_heads, value_dim]
    scale: float
    sliding_window: int  # keys at most so many positions back, the query's own included; 0: all
    softcap: float  # scores s become softcap * tanh(s / softcap); 0: off
    sinks: Tensor | None  # [num_heads] a learned score that takes part in the softmax only


class Attend(Protocol):
    """What ``batch=`` carries through the model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output [num_tokens, num_heads, value_dim]."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Attend,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature.  query, key, value: [1, heads, num_tokens, dim]."""
    if attention_mask is not None:
        raise UnsupportedAttention("it passes an attention mask to its layers")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("its attention is not causal")
    call = AttentionCall(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return batch.attend(call)[None], None


AttentionInterface.register(ATTENTION_NAME, attention)


@dataclass(frozen=True)
class Recorder:
    """Notes the layers' calls, to learn what each of them caches; attends to nothing."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return call.value.new_zeros(*call.query.shape[:2], call.value.shape[-1])

    def layer_specs(self) -> list[LayerSpec]:
        """Cache sizes per layer, in the order of the calls."""
        return [LayerSpec(c.key.shape[1], c.key.shape[2], c.value.shape[2]) for c in self.calls]


@dataclass(frozen=True)
class Paged:
    """Attention of a packed batch over the KV pool."""

    batch: PackedBatch
    pool: KVPool
    layer_of: Mapping[nn.Module, int]
    batch_invariant: bool = True  # on a GPU: whether a faster attention that is not may be taken

    def attend(self, call: AttentionCall) -> Tensor:
        layer = self.layer_of[call.module]
        self.pool.write(layer, call.key, call.value, self.batch.slot_mapping)
        return paged_attention(
            call.query,
            self.pool.keys[layer],
            self.pool.values[layer],
            self.batch,
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks,
            batch_invariant=self.batch_invariant,
        )


def decoder_layers(model: nn.Module, layers: Mapping[nn.Module, int]) -> list[nn.Module]:
    """The decoder layer around each attention module: ``model.layers.3`` of ``model.layers.3.self_attn``."""
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items() if module in layers}
    found: list[nn.Module] = []
    for module in layers:
        parts = names[module].split(".")
        depth = next(index for index, part in enumerate(parts) if part.isdigit())
        found.append(modules[".".join(parts[: depth + 1])])
    return found
