"""MTP: a head that predicts the token after next from the target's last hidden state.

DeepSeek-V3 (arXiv 2412.19437, section 2.2); trained over its own outputs as in FastMTP (arXiv 2509.18362).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from angelspec_backend.drafters.chain import ChainNetwork, ChainState, FrozenHead, FrozenNorm
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.layers import Attend, DecoderLayer, LayerShape, RMSNorm, Rotary
from angelspec_backend.drafters.moe import MixtureOfExperts
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.tensor_files import load_decoder_layer, rope_theta, text_config


class MTP(ChainNetwork):
    """x = eh_proj([enorm(embedding) ; hnorm(hidden)]), one decoder layer, a final norm, the target's head.

    It reads the output of the target's last layer and applies the target's final norm itself.  What its own
    final norm puts out is what the head reads and what the next step is fed.
    """

    def __init__(self, spec: DrafterSpec, target: TargetParts, vocab: DraftVocab | None = None) -> None:
        """Random weights.

        Raises:
            ValueError: spec, target and vocab contradict each other.
        """
        super().__init__(spec, target, vocab)
        shape = spec.shape
        if target.norm is None:
            raise ValueError("the target has no final RMSNorm, which an MTP head needs")
        if spec.tap_ids != (target.num_layers - 1,):
            raise ValueError(
                f"tap_ids are {list(spec.tap_ids)}, allowed: [{target.num_layers - 1}], the last"
            )
        self.target_norm = FrozenNorm(target.norm, target.eps)
        self.enorm, self.hnorm = RMSNorm(shape.hidden, shape.eps), RMSNorm(shape.hidden, shape.eps)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        mlp = None if spec.moe is None else MixtureOfExperts(shape.hidden, spec.moe)
        self.midlayer = DecoderLayer(shape, mlp=mlp)
        self.final_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = FrozenHead(self.draft_rows(target.lm_head))

    def features(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [n, 1, hidden], before the target's final norm -> [n, hidden]"""
        hidden = hidden_states[:, 0]
        return self.target_norm(hidden) if self.spec.postnorm_input else hidden

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Zero for the row at position 0, as vLLM serves MTP heads.  [n], [n] -> [n, hidden]"""
        return super().embed(token_ids, positions).masked_fill(positions[:, None] == 0, 0)

    def step(self, attend: Attend, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> ChainState:
        """See ``ChainNetwork.step``."""
        shape = self.spec.shape
        rotary = Rotary.at(positions, shape.head_dim, shape.rope_theta, hidden.dtype)
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))  # [n, hidden]
        output = self.final_layernorm(self.midlayer(x, rotary, attend, 0))
        return ChainState(output, output)

    def logits(self, output: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocabulary]"""
        return self.lm_head(output)


def mtp_from_target(
    path: str, target: TargetParts, vocab: DraftVocab | None = None, *, layer: int = -1, num_steps: int = 3
) -> MTP:
    """An MTP head to be trained that begins as one of the target's own decoder layers, in fp32.

    Its input is the sum of the two normed halves, and its final norm is the target's.
    path: folder or hub id of the target; layer: counted from 0, negative ones from the end;
    num_steps: the drafts it shall be trained for.

    Raises:
        LoadError: the layer is not one of Llama's or Qwen3's kind.
    """
    config, weights = text_config(path), load_decoder_layer(path, layer)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    theta = rope_theta(config)
    expected = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    if theta is None or not expected <= weights.keys() or "mlp.gate_proj.weight" not in weights:
        raise LoadError(f"{path}: an MTP head can begin as a decoder layer of Llama's kind; this one has "
                        f"{', '.join(sorted(weights)[:6])}, ... and rope_theta {theta}")  # fmt: skip
    shape = LayerShape(
        hidden=hidden,
        intermediate=weights["mlp.gate_proj.weight"].shape[0],
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=weights["self_attn.q_proj.weight"].shape[0] // heads,
        eps=float(config["rms_norm_eps"]),
        rope_theta=theta,
        qk_norm="self_attn.q_norm.weight" in weights,
    )
    spec = DrafterSpec(
        "mtp",
        shape,
        num_layers=1,
        vocab_size=target.vocab_size,
        target_hidden=hidden,
        tap_ids=(target.num_layers - 1,),
        target_num_layers=target.num_layers,
        draft_vocab_size=0 if vocab is None else len(vocab),
        max_context=int(config.get("max_position_embeddings") or 0),
        num_steps=num_steps,
    )
    network = MTP(spec, target, vocab).float()
    try:
        network.midlayer.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise LoadError(f"{path}: layer {layer} is not of Llama's or Qwen3's kind: {reason}") from error
    with torch.no_grad():
        network.eh_proj.weight.copy_(torch.eye(hidden).repeat(1, 2))
        network.final_layernorm.weight.copy_(network.target_norm.weight)
    return network
