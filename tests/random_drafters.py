"""Random drafters of every kind for a given target, for tests."""

from __future__ import annotations

import torch

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.checkpoint import DrafterNetwork
from angelspec_backend.drafters.eagle3 import Eagle3
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.spec import BLOCK_KINDS, DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts

HEADS = {
    "dfly": {"correction_size": 16},
    "dspark": {"markov_rank": 4, "confidence_head": True, "label_shift": 1},
}


def random_drafter(
    kind: str, target: TargetParts, taps: tuple[int, ...] = (0, 1), template: str = "", block_size: int = 6
) -> DrafterNetwork:
    """One layer (block drafters: two) of the target's width, the same on every call."""
    torch.manual_seed(7)
    hidden = target.hidden_size
    head_dim = min(64, hidden // 4)
    shape = LayerShape(hidden, 2 * hidden, hidden // head_dim, hidden // head_dim, head_dim, 1e-6, 1e4)
    common = {
        "kind": kind,
        "shape": shape,
        "vocab_size": target.vocab_size,
        "target_hidden": hidden,
        "target_num_layers": target.num_layers,
        "target": TargetIdentity(chat_template_sha256=template),
    }
    if kind in BLOCK_KINDS:
        spec = DrafterSpec(
            **common,
            num_layers=2,
            tap_ids=taps,
            block_size=block_size,
            mask_token_id=3,
            **HEADS.get(kind, {}),
        )
        return _randomized(BlockNetwork(spec, target), target)
    taps = (target.num_layers - 1,) if kind == "mtp" else (*taps, target.num_layers - 1)[-3:]
    spec = DrafterSpec(**common, num_layers=1, tap_ids=taps, num_steps=3)
    return _randomized((MTP if kind == "mtp" else Eagle3)(spec, target, None), target)


def _randomized(network: DrafterNetwork, target: TargetParts) -> DrafterNetwork:
    """Weights so large that every part matters."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return network.to(target.embed_tokens.dtype)
