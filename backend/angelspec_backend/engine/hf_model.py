"""Any Hugging Face causal LM over packed batches: the generic network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.hf_attention import (
    ATTENTION_NAME,
    Attend,
    Paged,
    Recorder,
    decoder_layers,
)
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.loader import UnsupportedAttention
from angelspec_backend.engine.packing import pack_weights
from angelspec_backend.engine.row_independent import row_independent


class HuggingFaceModel:
    """Runs transformers' own modules, with the engine's attention and, where rows must not depend on each
    other, packed weights."""

    def __init__(
        self, model: PreTrainedModel, quantization: str = "none", batch_invariant: bool = True
    ) -> None:
        """Take over a loaded model; its weights are repacked in place.

        quantization: see PackedLinear.  batch_invariant: on a GPU, False leaves its weights and products to
        torch; on the CPU packed weights are faster anyway.

        Raises:
            UnsupportedAttention: it does not call the engine's attention once per layer as it should.
        """
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION_NAME)
        recorder = Recorder()
        on_cpu = model.device.type == "cpu"
        self._batch_invariant = batch_invariant or on_cpu
        self._mode = row_independent(model.device, self._batch_invariant)

        def trial() -> None:
            recorder.calls.clear()
            tokens = torch.zeros(2, dtype=torch.int64, device=model.device)
            self._forward(tokens, torch.arange(2, device=model.device), tokens[:1], recorder)

        if self._batch_invariant:
            pack_weights(self.model, trial, quantization)
        trial()
        self._check_calls(recorder)
        self._specs = recorder.layer_specs()
        self._layer_of = {call.module: layer for layer, call in enumerate(recorder.calls)}
        self._decoder_layers = decoder_layers(self.model, self._layer_of)

    def layer_specs(self) -> list[LayerSpec]:
        """What each layer caches per token."""
        return self._specs

    def forward_with_taps(
        self, batch: PackedBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute a batch, store its keys and values, and keep the hidden states of some layers.

        taps: id l is the output of decoder layer l, counted from 0, before the final norm.
        Returns logits [num_logits, vocab_size] and per tap hidden states [num_tokens, hidden].

        Raises:
            ValueError: no such layer.
        """
        states: dict[int, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for tap in set(taps):
                if not 0 <= tap < len(self._specs):
                    raise ValueError(f"tap {tap}: this model has layers 0 to {len(self._specs) - 1}")
                hooks.enter_context(self._decoder_layers[tap].register_forward_hook(_keep(states, tap)))
            attend = Paged(batch, pool, self._layer_of, self._batch_invariant)
            logits = self._forward(batch.token_ids, batch.positions, batch.logits_index, attend)
        return logits, [states[tap] for tap in taps]

    @torch.inference_mode()
    def _forward(self, token_ids: Tensor, positions: Tensor, logits_index: Tensor, attend: Attend) -> Tensor:
        # Prompt chunks alone want no logits; the head gets one row all the same, since it may not take none.
        keep = logits_index if len(logits_index) else positions.new_zeros(1)
        with self._mode():
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                batch=attend,
            )
        return output.logits[0, : len(logits_index)]

    def _check_calls(self, recorder: Recorder) -> None:
        config = self.model.config.get_text_config()
        modules = [call.module for call in recorder.calls]
        if len(set(modules)) != len(modules) or len(modules) != config.num_hidden_layers:
            raise UnsupportedAttention(
                f"it calls attention {len(modules)} times in {config.num_hidden_layers} layers"
            )
        kinds = getattr(config, "layer_types", None) or []
        for layer, (kind, call) in enumerate(zip(kinds, recorder.calls, strict=False)):
            if (kind == "sliding_attention") != (call.sliding_window > 0):
                raise UnsupportedAttention(
                    f"layer {layer} is '{kind}' but calls attention with a window of {call.sliding_window}"
                )


def _keep(states: dict[int, Tensor], tap: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        states[tap] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook
