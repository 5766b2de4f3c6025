"""Llama and its relatives without Hugging Face modules.

RMSNorm, grouped-query attention with rotary positions (and a norm on queries and keys, and biases,
where the model has them), SwiGLU.  Rounding follows the Hugging Face modules, so bf16 results are as
close to theirs as the order of summation allows.  CPU only; see ``supports``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from angelspec_backend.engine import native
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.checkpoint import Checkpoint, Take
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.linear import PackedLinear, move_to_huge_pages
from angelspec_backend.engine.llama_layers import Decoder, DecoderLayer, LayerByLayer
from angelspec_backend.engine.llama_native import native_forward
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
        self.dtype = checkpoint.dtype
        self.embedding = _need(take, "model.embed_tokens.weight")  # [vocab_size, hidden]
        self.decoder = Decoder(
            layers=[
                _take_layer(take, index, config, quantization) for index in range(config.num_hidden_layers)
            ],
            cos_sin=_cos_sin(config, max_context or config.max_position_embeddings).to(self.dtype),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            eps=config.rms_norm_eps,
        )
        self.norm = _need(take, "model.norm.weight").clone()
        head = None if config.tie_word_embeddings else take("lm_head.weight")
        self.head = PackedLinear(self.embedding if head is None else head, take("lm_head.bias"), quantization)
        move_to_huge_pages([*(each for layer in self.decoder.layers for each in layer.linears()), self.head])
        fresh = take("model.embed_tokens.weight")  # of files: a view of which nothing is in memory yet
        self.embedding = self.embedding if fresh is None else fresh
        self.native_forward = native_forward(self.decoder, self.embedding, self.norm, self.head)

    def layer_specs(self) -> list[LayerSpec]:
        """What each layer caches per token."""
        decoder = self.decoder
        return [LayerSpec(decoder.num_kv_heads, decoder.head_dim, decoder.head_dim) for _ in decoder.layers]

    def forward(self, batch: PackedBatch, pool: KVPool) -> Tensor:
        """Compute a batch and store its keys and values.  Returns logits [num_logits, vocab_size]."""
        return self.forward_with_taps(batch, pool, ())[0]

    def forward_with_taps(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """``forward``, and the hidden states of some layers.

        taps: id l is the output of decoder layer l, counted from 0, before the final norm.
        Returns logits [num_logits, vocab_size] and per tap hidden states [num_tokens, hidden].

        Raises:
            ValueError: no such layer.
        """
        num_layers = len(self.decoder.layers)
        for tap in taps:
            if not 0 <= tap < num_layers:
                raise ValueError(f"tap {tap}: this model has layers 0 to {num_layers - 1}")
        ascending = sorted(set(taps))
        run = self.native_forward.run if self.native_forward else self._run_by_layer
        logits, states = run(batch, pool, ascending)
        by_tap = dict(zip(ascending, states, strict=True))
        return logits, [by_tap[tap] for tap in taps]

    @torch.inference_mode()
    def _run_by_layer(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        hidden = F.embedding(batch.token_ids, self.embedding)  # [num_tokens, hidden] the residual stream
        delta, tapped = LayerByLayer(self.decoder, batch, pool).run(hidden, taps)
        wanted = batch.logits_index
        delta, hidden = delta[wanted], hidden[wanted]
        normed = native.rms_norm(delta, self.norm, self.decoder.eps, torch.empty_like(hidden), hidden)
        return self.head(normed), tapped


def _take_layer(take: Take, index: int, config: Any, quantization: str) -> DecoderLayer:
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
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        return PackedLinear(whole, bias, quantization, gated="mlp.gate_proj" in names)

    sliding = config.model_type == "mistral" or _layer_type(config, index) == "sliding_attention"
    qkv, attention_out, gate_up, down = (packed(*row) for row in _LINEARS)
    input_norm, post_norm = (_need(norm, name) for name in _NORMS)
    return DecoderLayer(
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
