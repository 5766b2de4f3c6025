"""EAGLE-3: one layer over the target's hidden states at three depths (arXiv 2503.01840, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.layers import Attend, Attention, LayerShape, RMSNorm, Rotary, SwiGLU
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """The layers an EAGLE-3 drafter reads when its checkpoint does not say: low, middle and high.

    num_layers: depth of the target.

    Raises:
        ValueError: the target has too few layers for three different ones.
    """
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < taps[1] < taps[2]:
        raise ValueError(f"the target has {num_layers} layers; EAGLE-3 taps for it must be given")
    return taps


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = SwiGLU(shape.hidden, shape.intermediate)
        self.norm_before_residual = norm_before_residual

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """embeddings, hidden: [n, hidden] -> [n, hidden]"""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)  # [n, 2 * hidden]
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(both, rotary, attend, 0)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(ChainNetwork):
    """Three hidden states of the target joined by ``fc``, a layer, a norm, and a head of its own.

    The next step is fed the layer's output before that norm, unless ``norm_output`` says otherwise.
    """

    def __init__(self, spec: DrafterSpec, target: TargetParts, vocab: DraftVocab | None = None) -> None:
        """Random weights, but the head begins as the target's rows.

        Raises:
            ValueError: spec, target and vocab contradict each other.
        """
        super().__init__(spec, target, vocab)
        shape, taps, width = spec.shape, len(spec.tap_ids), spec.target_hidden
        if not taps:
            raise ValueError("tap_ids are empty, but EAGLE-3 reads hidden states of the target")
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.eps) for _ in range(taps))
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(taps * width, shape.eps)
        self.fc = nn.Linear(taps * width, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape, spec.norm_before_residual)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        rows = self.draft_rows(target.lm_head)
        self.lm_head = nn.Linear(shape.hidden, len(rows), bias=False)
        self.lm_head.weight.data.copy_(rows)

    def features(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [n, num_taps, target_hidden] in ascending order of depth -> [n, hidden]"""
        if self.spec.fc_norm:
            chunks = [norm(hidden_states[:, index]) for index, norm in enumerate(self.fc_norm)]
            hidden_states = torch.stack(chunks, 1)
        joined = hidden_states.flatten(1)  # [n, num_taps * target_hidden]
        return self.fc(self.input_norm(joined) if self.spec.norm_before_fc else joined)

    def step(self, attend: Attend, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> ChainState:
        """See ``ChainNetwork.step``."""
        shape = self.spec.shape
        rotary = Rotary.at(positions, shape.head_dim, shape.rope_theta, hidden.dtype)
        hidden = self.midlayer(embeddings, hidden, rotary, attend)
        output = self.norm(hidden)
        return ChainState(output if self.spec.norm_output else hidden, output)

    def logits(self, output: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocabulary]"""
        return self.lm_head(output)
