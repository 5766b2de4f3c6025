"""Small random block drafters, for tests."""

from __future__ import annotations

import torch

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.spec import DrafterSpec, TargetIdentity
from angelspec_backend.drafters.target_parts import TargetParts

VOCAB, HIDDEN, DEPTH = 97, 64, 12

VARIANTS = {  # name: kind and options of the specification
    "dflash": ("dflash", {}),
    "dflash_next_token": ("dflash", {"label_shift": 1}),
    "dflash_pruned": ("dflash", {"draft_vocab_size": 40}),
    "dflare": ("dflare", {}),
    "dfly": ("dfly", {"correction_size": 64}),
    "dfly_folded": ("dfly", {"correction_size": 32, "draft_vocab_size": 40}),
    "dspark": ("dspark", {"markov_rank": 8, "confidence_head": True}),
    "dspark_next_token": ("dspark", {"markov_rank": 8, "confidence_head": True, "label_shift": 1}),
    "dspark_gated": ("dspark", {"markov_rank": 8, "markov_kind": "gated", "draft_vocab_size": 40}),
    "dspark_rnn": ("dspark", {"markov_rank": 8, "markov_kind": "rnn"}),
    "dspark_confidence_only": ("dspark", {"confidence_head": True, "confidence_with_markov": False}),
}


def random_target(dtype: torch.dtype = torch.float32) -> TargetParts:
    """Embedding and head of a target of twelve layers."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return TargetParts(embedding, head, None, 1e-5, DEPTH)


def random_block(variant: str, dtype: torch.dtype = torch.float32, qk_norm: bool = True) -> BlockNetwork:
    """A drafter with random weights, equal for equal arguments.  variant: of VARIANTS"""
    torch.manual_seed(1)
    kind, options = VARIANTS[variant]
    pruned = options.get("draft_vocab_size", 0)
    vocab = DraftVocab.of(torch.randperm(VOCAB)[:pruned], VOCAB) if pruned else None
    fields = {
        "target_hidden": HIDDEN,
        "block_size": 5,
        "mask_token_id": 90,
        "max_context": 256,
        "target_num_layers": DEPTH,
        "target": TargetIdentity("org/target", "", "1234", "no_think"),
        **options,
    }
    shape = LayerShape(HIDDEN, 96, 4, 2, 16, 1e-6, 5e5, qk_norm)
    spec = DrafterSpec(kind, shape, num_layers=2, vocab_size=VOCAB, tap_ids=(1, 5, 8), **fields)
    network = BlockNetwork(spec, random_target(), vocab)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
        elif "markov_w2" in name or "correction.down" in name or "fusion" in name:  # no zeros
            parameter.data.normal_(0, 0.5)
    return network.to(dtype)
