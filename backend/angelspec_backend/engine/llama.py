"""Llama and its relatives without Hugging Face modules: what one layer does, in nine calls.

RMSNorm, grouped-query attention with rotary positions (and a norm on queries and keys, and biases,
where the model has them), SwiGLU.  Rounding follows the Hugging Face modules, so bf16 results are as
close to theirs as the order of summation allows.  CPU only; see ``supports``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from angelspec_backend.engine import native
from angelspec_backend.engine.attention import attention_args
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.checkpoint import Checkpoint, Take
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.loader import LoadError

MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss")
"""Types of one formula.  Each has a parity test; a type is added here together with its test."""


def supports(config: Any, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> bool:
    """Whether FusedLlama computes models of this configuration, and can do so on this machine."""
    return (
        config.model_type in MODEL_TYPES
        and config.hidden_act in ("silu", "swish")
        and config.rope_parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and native.supports(dtype, torch.device(device), _head_dim(config))
    )


def can_build(checkpoint: Checkpoint) -> bool:
    """Whether FusedLlama supports this checkpoint and finds all of its weights in it."""
    config = checkpoint.config
    if not supports(config, checkpoint.dtype, checkpoint.device):
        return False
    needed = {"model.embed_tokens", "model.norm"} | (set() if config.tie_word_embeddings else {"lm_head"})
    for index in range(config.num_hidden_layers):
        parts = (*_NORMS, *(name for row in _LINEARS for name in row))
        needed |= {f"model.layers.{index}.{part}" for part in parts}
    return {f"{name}.weight" for name in needed} <= checkpoint.names


_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Linear layers that are fused into one, in rows."""


@dataclass(frozen=True)
class _Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_out: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear
    sliding_window: int  # positions a token sees, itself included; 0: all


class FusedLlama:
    """A llama-like causal LM over packed batches and a KV pool, with packed and fused weights."""

    def __init__(self, checkpoint: Checkpoint, max_context: int = 0, quantization: str = "none") -> None:
        """Take the weights out of a checkpoint.

        max_context: positions to prepare rotary embeddings for; 0: what the model supports.
        quantization: of the linear layers, see PackedLinear.

        Raises:
            LoadError: a weight is missing.
        """
        config, take = checkpoint.config, checkpoint.take
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = _head_dim(config)
        self.eps = config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        self.dtype = checkpoint.dtype
        self.embedding = _need(take, "model.embed_tokens.weight")  # [vocab_size, hidden]
        self.cos_sin = _cos_sin(config, max_context or config.max_position_embeddings).to(self.dtype)
        self.layers = [
            _take_layer(take, index, config, quantization) for index in range(config.num_hidden_layers)
        ]
        self.norm = _need(take, "model.norm.weight").clone()
        head = None if config.tie_word_embeddings else take("lm_head.weight")
        self.head = PackedLinear(self.embedding if head is None else head, take("lm_head.bias"), quantization)
        fresh = take("model.embed_tokens.weight")  # of files: a view of which nothing is in memory yet
        self.embedding = self.embedding if fresh is None else fresh

    def layer_specs(self) -> list[LayerSpec]:
        """What each layer caches per token."""
        return [LayerSpec(self.num_kv_heads, self.head_dim, self.head_dim) for _ in self.layers]

    def forward(self, batch: PackedBatch, pool: KVPool) -> Tensor:
        """Compute a batch and store its keys and values.  Returns logits [num_logits, vocab_size]."""
        return self.forward_with_taps(batch, pool, ())[0]

    @torch.inference_mode()
    def forward_with_taps(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """``forward``, and the hidden states of some layers.

        taps: id l is the output of decoder layer l, counted from 0, before the final norm.
        Returns logits [num_logits, vocab_size] and per tap hidden states [num_tokens, hidden].

        Raises:
            ValueError: no such layer.
        """
        for tap in taps:
            if not 0 <= tap < len(self.layers):
                raise ValueError(f"tap {tap}: this model has layers 0 to {len(self.layers) - 1}")
        hidden = F.embedding(batch.token_ids, self.embedding)  # [num_tokens, hidden] the residual stream
        tapped: dict[int, Tensor] = {}
        step = _Step(self, batch, pool)
        delta = torch.zeros_like(hidden)  # what is still to be added to it
        for index, layer in enumerate(self.layers):
            delta = step.layer(index, layer, hidden, delta)
            if index in taps:
                tapped[index] = hidden + delta
        wanted = batch.logits_index
        delta, hidden = delta[wanted], hidden[wanted]
        normed = native.rms_norm(delta, self.norm, self.eps, torch.empty_like(hidden), hidden)
        return self.head(normed), [tapped[tap] for tap in taps]


class _Step:
    """One forward pass: its batch, and buffers that all layers share."""

    def __init__(self, model: FusedLlama, batch: PackedBatch, pool: KVPool) -> None:
        self.model, self.pool = model, pool
        num_tokens, hidden = batch.token_ids.shape[0], model.embedding.shape[1]
        self.normed = torch.empty(num_tokens, hidden, dtype=model.dtype)
        self.attended = torch.empty(num_tokens, model.num_heads * model.head_dim, dtype=model.dtype)
        self.activated = torch.empty(num_tokens, model.layers[0].down.in_features, dtype=model.dtype)
        self.attention = attention_args(batch, model.num_heads, pool.keys[0], pool.values[0], model.scale)
        self.attention.query_stride = model.layers[0].qkv.out_features
        self.attention.out = self.attended.data_ptr()
        self.rope = native.RopeArgs(
            cos_sin=model.cos_sin.data_ptr(),
            positions=batch.positions.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            num_tokens=num_tokens,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotary_dim=model.cos_sin.shape[1],
            block_size=pool.block_size,
            num_threads=torch.get_num_threads(),
            eps=model.eps,
        )

    def layer(self, index: int, layer: _Layer, hidden: Tensor, delta: Tensor) -> Tensor:
        """One decoder layer.  hidden: [num_tokens, hidden] becomes hidden + delta + attention, in place.

        Returns what is still to be added to ``hidden``: the output of the MLP.
        """
        eps, dtype = self.model.eps, self.model.dtype
        native.rms_norm(delta, layer.input_norm, eps, self.normed, hidden)
        qkv = layer.qkv(self.normed)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        rope, attention = self.rope, self.attention
        rope.qkv = attention.query = qkv.data_ptr()
        rope.key_cache = attention.key_cache = self.pool.keys[index].data_ptr()
        rope.value_cache = attention.value_cache = self.pool.values[index].data_ptr()
        rope.query_norm = None if layer.query_norm is None else layer.query_norm.data_ptr()
        rope.key_norm = None if layer.key_norm is None else layer.key_norm.data_ptr()
        native.rope_and_cache(rope, dtype)
        attention.sliding_window = layer.sliding_window
        native.paged_attention(attention, dtype)

        delta = layer.attention_out(self.attended)
        native.rms_norm(delta, layer.post_norm, eps, self.normed, hidden)
        return layer.down(native.silu_and_mul(layer.gate_up(self.normed), self.activated))


def _take_layer(take: Take, index: int, config: Any, quantization: str) -> _Layer:
    """The weights of one decoder layer, packed and fused."""
    prefix = f"model.layers.{index}."

    def norm(name: str) -> Tensor | None:
        weight = take(f"{prefix}{name}.weight")
        return None if weight is None else weight.clone()  # a view would keep its file in memory

    def packed(*names: str) -> PackedLinear:
        weights = [_need(take, f"{prefix}{name}.weight") for name in names]
        biases = [take(f"{prefix}{name}.bias") for name in names]
        bias = None
        if any(each is not None for each in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        return PackedLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, quantization)

    sliding = config.model_type == "mistral" or _layer_type(config, index) == "sliding_attention"
    qkv, attention_out, gate_up, down = (packed(*row) for row in _LINEARS)
    input_norm, post_norm = (_need(norm, name) for name in _NORMS)
    return _Layer(
        input_norm=input_norm,
        qkv=qkv,
        query_norm=norm("self_attn.q_norm"),
        key_norm=norm("self_attn.k_norm"),
        attention_out=attention_out,
        post_norm=post_norm,
        gate_up=gate_up,
        down=down,
        sliding_window=(config.sliding_window or 0) if sliding else 0,
    )


def _need(take: Take, name: str) -> Tensor:
    weight = take(name)
    if weight is None:
        raise LoadError(f"the checkpoint lacks the weight {name}; download it again or use a complete one")
    return weight


def _layer_type(config: Any, index: int) -> str:
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def _cos_sin(config: Any, num_positions: int) -> Tensor:
    """Per position the cosines of one half, then the sines.  [num_positions, rotary_dim]"""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = int(_head_dim(config) * (rope.get("partial_rotary_factor") or 1.0))
        inverse = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
        factor = 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.arange(num_positions).float()[:, None] * inverse.float()  # [num_positions, rotary_dim / 2]
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).contiguous()


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
