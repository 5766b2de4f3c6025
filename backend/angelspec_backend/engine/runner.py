"""The model runner: a model, its KV pool, and one forward pass over a packed batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from angelspec_backend.engine import checkpoint as checkpoints
from angelspec_backend.engine import llama
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.checkpoint import Checkpoint
from angelspec_backend.engine.cuda_graphs import CudaGraphs
from angelspec_backend.engine.graph_shapes import GraphShapes
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.linear_native import QuantizationError, check_supported
from angelspec_backend.engine.loader import (
    LoadError,
    UnsupportedAttention,
    check_model,
    load_model,
    model_max_context,
)
from angelspec_backend.engine.self_check import SelfCheckError, check_batching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


class Network(Protocol):
    """What computes a batch: the fused fast path or the Hugging Face model itself."""

    def layer_specs(self) -> list[LayerSpec]: ...

    def forward_with_taps(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]: ...


class ModelRunner:
    """Runs a causal LM over packed batches, with the keys and values of all sequences in one pool.

    ``batch_invariant`` says whether a row's logits have the same bits alone and in any batch.
    ``graph_shapes``: what ``pack`` may pad a step to, so that it is replayed as a CUDA graph; None: nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel | Checkpoint,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int = 0,
        fused: bool = True,
        quantization: str = "none",
        batch_invariant: bool = True,
        cuda_graphs: bool = True,
    ) -> None:
        """Take over a loaded model, whose weights are repacked, or one that the fast path is to build.

        max_context: longest sequence in tokens; 0: what the model supports.  fused: use the fast path
        for architectures that have one; the generic network is the same model, slower.
        quantization: "none", or "int8" for linear layers with 8-bit weights.
        batch_invariant: False lets a GPU use faster kernels whose rounding depends on the batch.
        cuda_graphs: on a GPU, replay verify steps as graphs.

        Raises:
            LoadError: the model cannot be served, and why.
        """
        if not isinstance(model, Checkpoint):
            check_model(model, max_context)
        source = model if isinstance(model, Checkpoint) else checkpoints.of_model(model)
        supported = model_max_context(source.config)
        if max_context > supported:
            raise LoadError(f"max_context is {max_context}, but this model allows at most {supported}")
        self.architecture = source.architecture
        self.max_context = max_context or supported
        self.vocab_size = int(source.config.get_text_config().vocab_size)
        self.hidden_size = int(source.config.get_text_config().hidden_size)
        self.eos_token_ids = source.eos_token_ids
        self.device, self.dtype, self.quantization = source.device, source.dtype, quantization
        try:
            if quantization != "none":
                check_supported(self.dtype, self.device)
            if isinstance(model, Checkpoint) or (fused and llama.can_build(source)):
                self.network: Network = llama.FusedLlama(source, self.max_context, quantization)
            else:
                from angelspec_backend.engine.hf_model import HuggingFaceModel  # imports much of transformers

                self.network = HuggingFaceModel(model, quantization, batch_invariant)
            specs = self.network.layer_specs()
            self.pool = KVPool.allocate(specs, num_blocks, block_size, self.dtype, self.device)
            self._graphs: CudaGraphs | None = None
            self.batch_invariant = self._check()
        except (UnsupportedAttention, SelfCheckError) as error:
            raise LoadError(f"{self.architecture} is not supported: {error}") from None
        except (MemoryError, QuantizationError) as error:
            raise LoadError(str(error)) from None
        if batch_invariant and not self.batch_invariant:
            _log.warning("%s: logits depend on the batch; a text may too, at near ties", self.architecture)
        if cuda_graphs and self.device.type == "cuda":
            self._graphs = CudaGraphs(self._eager, GraphShapes(block_size, self.max_context))

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
        batch_invariant: bool = True,
        cuda_graphs: bool = True,
    ) -> ModelRunner:
        """Load ``path``, a local folder or a Hugging Face id.

        Raises:
            LoadError: the model cannot be loaded or served, and why.
        """
        files = checkpoints.of_files(path, dtype, max_context) if fused and device == "cpu" else None
        runner = cls(
            files if files and llama.can_build(files) else load_model(path, dtype, device, max_context),
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=max_context,
            fused=fused,
            quantization=quantization,
            batch_invariant=batch_invariant,
            cuda_graphs=cuda_graphs,
        )
        checkpoints.release_memory()
        return runner

    @property
    def graph_shapes(self) -> GraphShapes | None:
        """See the class."""
        return self._graphs.shapes if self._graphs else None

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with its own cache."""
        return len(self.pool.keys)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute a batch and store its keys and values.  Returns logits [num_logits, vocab_size]."""
        return self.forward_with_taps(batch, ())[0]

    def forward_with_taps(self, batch: PackedBatch, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """``forward``, and the hidden states of some layers.

        taps: id l is the output of decoder layer l, counted from 0, before the final norm.
        Returns logits [num_logits, vocab_size] and per tap hidden states [num_tokens, hidden]; those of a
        CUDA graph only until the next call.

        Raises:
            ValueError: no such layer.
        """
        if batch.graph_shape is None or self._graphs is None:
            logits, states = self._eager(batch, taps)
        else:
            logits, states = self._graphs.run(batch, taps)
        if batch.graph_shape is not None:  # every token of such a batch has logits
            logits = logits[: batch.num_used]
        return logits, [each[: batch.num_used] for each in states]

    def _eager(self, batch: PackedBatch, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
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
            "cuda_graphs": self._graphs is not None,
        }

    def _check(self) -> bool:
        return check_batching(
            self.forward,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            device=str(self.device),
        )
