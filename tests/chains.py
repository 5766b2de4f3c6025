"""Small random MTP and EAGLE-3 drafters, for tests."""

from __future__ import annotations

import torch

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.eagle3 import Eagle3
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.moe import MoeShape
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.spec import DrafterSpec
from angelspec_backend.drafters.target_parts import TargetParts

VOCAB, HIDDEN, DEPTH = 97, 64, 12

KINDS = ("mtp", "mtp_qk_norm", "mtp_moe", "mtp_pruned", "eagle3", "eagle3_flags", "eagle3_full")


def random_target(seed: int = 0, dtype: torch.dtype = torch.float32) -> TargetParts:
    """Embedding, head and norm of a target of twelve layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return TargetParts(normal(VOCAB, HIDDEN), normal(VOCAB, HIDDEN), normal(HIDDEN), 1e-5, DEPTH)


def random_chain(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> ChainNetwork:
    """A drafter with random weights, equal for equal arguments.  kind: of KINDS"""
    torch.manual_seed(seed)
    target, family = random_target(seed), kind.partition("_")[0]
    pruned = kind in ("mtp_pruned", "eagle3", "eagle3_flags")
    vocab = DraftVocab.of(torch.randperm(VOCAB)[:40], VOCAB) if pruned else None
    shape = LayerShape(HIDDEN, 96, 4, 2, 16, 1e-6, 5e5, qk_norm=kind in ("mtp_qk_norm", "mtp_moe"))
    flags = kind == "eagle3_flags"
    spec = DrafterSpec(
        family,
        shape,
        num_layers=1,
        vocab_size=VOCAB,
        target_hidden=HIDDEN,
        tap_ids=(DEPTH - 1,) if family == "mtp" else (1, 5, 8),
        target_num_layers=DEPTH,
        draft_vocab_size=0 if vocab is None else len(vocab),
        max_context=128,
        num_steps=3,
        moe=MoeShape(4, 2, 24, 1, 2.5) if kind == "mtp_moe" else None,
        fc_norm=flags,
        norm_before_fc=flags,
        norm_before_residual=flags,
        norm_output=flags,
    )
    network = (MTP if family == "mtp" else Eagle3)(spec, target, vocab)
    for name, parameter in network.named_parameters():
        if name.endswith(("norm.weight", "expert_bias")):  # no ones and zeros
            parameter.data.normal_(1, 0.3)
    return network.to(dtype)
