"""The model runner: a model, its KV pool, and one forward pass over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from angelspec_backend.engine import llama
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.hf_attention import UnsupportedAttention
from angelspec_backend.engine.hf_model import HuggingFaceModel
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.linear_int8 import QuantizationError, check_supported
from angelspec_backend.engine.loader import (
    LoadError,
    check_model,
    eos_token_ids,
    load_model,
    model_max_context,
)
from angelspec_backend.engine.self_check import SelfCheckError, check_batching


class Network(Protocol):
    """What computes a batch: the fused fast path or the Hugging Face model itself."""

    def layer_specs(self) -> list[LayerSpec]: ...

    def forward_with_taps(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]: ...


class ModelRunner:
    """Runs a causal LM over packed batches, with the keys and values of all sequences in one pool.

    ``batch_invariant`` says whether a row's logits have the same bits alone and in any batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int = 0,
        fused: bool = True,
        quantization: str = "none",
    ) -> None:
        """Take over a loaded model; its weights are repacked.

        max_context: longest sequence in tokens; 0: what the model supports.  fused: use the fast path
        for architectures that have one; the generic network is the same model, slower.
        quantization: "none", or "int8" for linear layers with 8-bit weights.

        Raises:
            LoadError: the model cannot be served, and why.
        """
        check_model(model, max_context)
        supported = model_max_context(model.config)
        if max_context > supported:
            raise LoadError(f"max_context is {max_context}, but this model allows at most {supported}")
        self.architecture = type(model).__name__
        self.max_context = max_context or supported
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self.eos_token_ids = eos_token_ids(model)
        self.device, self.dtype, self.quantization = model.device, model.dtype, quantization
        try:
            if quantization != "none":
                check_supported(self.dtype, self.device)
            self.network = self._build(model, fused)
            specs = self.network.layer_specs()
            self.pool = KVPool.allocate(specs, num_blocks, block_size, self.dtype, self.device)
            self.batch_invariant = self._check()
        except (UnsupportedAttention, SelfCheckError) as error:
            raise LoadError(f"{self.architecture} is not supported: {error}") from None
        except (MemoryError, QuantizationError) as error:
            raise LoadError(str(error)) from None

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        num_blocks: int,
        block_size: int,
        max_context: int = 0,
        fused: bool = True,
        quantization: str = "none",
    ) -> ModelRunner:
        """Load ``path``, a local folder or a Hugging Face id.

        Raises:
            LoadError: the model cannot be loaded or served, and why.
        """
        model = load_model(path, dtype, device, max_context)
        return cls(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=max_context,
            fused=fused,
            quantization=quantization,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with its own cache."""
        return len(self.pool.keys)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute a batch and store its keys and values.  Returns logits [num_logits, vocab_size]."""
        return self.network.forward_with_taps(batch, self.pool, ())[0]

    def forward_with_taps(self, batch: PackedBatch, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """``forward``, and the hidden states of some layers.

        taps: id l is the output of decoder layer l, counted from 0, before the final norm.
        Returns logits [num_logits, vocab_size] and per tap hidden states [num_tokens, hidden].

        Raises:
            ValueError: no such layer.
        """
        return self.network.forward_with_taps(batch, self.pool, taps)

    def describe(self) -> dict[str, Any]:
        """What is served, for logs; values are JSON."""
        return {
            "architecture": self.architecture,
            "network": type(self.network).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            "device": str(self.device),
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_context": self.max_context,
            "eos_token_ids": list(self.eos_token_ids),
            "num_blocks": self.pool.num_blocks,
            "block_size": self.pool.block_size,
            "kv_bytes_per_token": self.pool.bytes_per_token,
            "batch_invariant": self.batch_invariant,
        }

    def _build(self, model: PreTrainedModel, fused: bool) -> Network:
        if fused and llama.supports(model.config, self.dtype, self.device):
            return llama.FusedLlama(model, self.max_context, self.quantization)
        return HuggingFaceModel(model, self.quantization)

    def _check(self) -> bool:
        return check_batching(
            self.forward,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            device=str(self.device),
        )
