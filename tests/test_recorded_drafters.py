"""A draft computed by a recorded program has the bits of the network's own modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from angelspec_backend.core.messages import ROW
from angelspec_backend.drafters.block_drafter import BlockDrafter
from angelspec_backend.drafters.chain_drafter import ChainDrafter
from angelspec_backend.engine import native
from block_networks import VARIANTS, random_block
from chains import KINDS, VOCAB, random_chain

BLOCK_SIZE, BLOCKS_PER_ROW, NUM_ROWS, LENGTH = 4, 24, 5, 80
RECORDED = [
    *(kind for kind in KINDS if kind != "mtp_moe"),
    *(variant for variant in VARIANTS if not variant.startswith("dspark")),
]

pytestmark = pytest.mark.skipif(native.linear_kernel() != "amx", reason="no native bf16 layers")


def drafter(kind: str, quantization: str) -> ChainDrafter | BlockDrafter:
    network = random_chain(kind, torch.bfloat16) if kind in KINDS else random_block(kind, torch.bfloat16)
    return (ChainDrafter if kind in KINDS else BlockDrafter)(
        network,  # type: ignore[arg-type]
        num_blocks=1 + NUM_ROWS * BLOCKS_PER_ROW,
        block_size=BLOCK_SIZE,
        max_context=BLOCKS_PER_ROW * BLOCK_SIZE,
        quantization=quantization,
    )


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kind", RECORDED)
def test_it_drafts_the_same_as_the_modules_to_the_bit(kind, quantization):
    recorded, modules = drafter(kind, quantization), drafter(kind, quantization)
    assert recorded.can_record
    modules.can_record = False
    spec, rng = recorded.network.spec, np.random.default_rng(0)
    held = np.zeros(NUM_ROWS, np.int64)
    for step in range(12):
        slots = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)]
        rows = np.zeros(len(slots), ROW)
        rows["slot"], rows["num_blocks"], rows["num_fed"] = slots, BLOCKS_PER_ROW, held[slots]
        rows["num_feed"] = rng.integers(0, 7, len(slots))
        rows["num_draft_tokens"] = rng.integers(0, 6, len(slots))
        rows["min_chance"] = rng.choice([0, 0.02, 0.3], len(slots)) if step % 3 == 0 else 0
        rows["top_p"], rows["seed"] = 0.9, rng.integers(0, 99, len(slots))
        rows["temperature"] = rng.choice([0, 1.5], len(slots)) if step % 2 else 0
        held[slots] += rows["num_feed"]
        count = int(rows["num_feed"].sum())
        tokens = rng.integers(0, VOCAB, count).astype(np.int32)
        states = torch.from_numpy(rng.normal(size=(count, len(spec.tap_ids), spec.target_hidden)))
        raw = states.bfloat16().reshape(-1).view(torch.uint8).numpy()
        table = 1 + slots[:, None] * BLOCKS_PER_ROW + np.arange(BLOCKS_PER_ROW)
        drafts = [
            each.draft(rows, tokens, table.ravel().astype(np.int32), raw) for each in (recorded, modules)
        ]
        found = [each.cut(rows["min_chance"]).output() for each in drafts]
        for name in ("lens", "token_ids"):
            np.testing.assert_array_equal(*(getattr(each, name) for each in found), err_msg=name)
        if not rows["min_chance"].any():  # else one may draft on where a draft is cut
            np.testing.assert_array_equal(*(each.confidence for each in drafts))


def test_room_grows_with_what_is_asked():
    chain, modules = drafter("mtp", "none"), drafter("mtp", "none")
    modules.can_record = False
    rows = np.zeros(1, ROW)
    rows["num_blocks"], rows["num_draft_tokens"], rows["top_p"] = BLOCKS_PER_ROW, 9, 1
    for feed in (1, LENGTH):
        rows["num_feed"] = feed
        states = torch.randn(feed, 1, chain.network.spec.target_hidden, dtype=torch.bfloat16)
        arguments = (
            rows,
            np.arange(feed, dtype=np.int32),
            np.arange(1, 1 + BLOCKS_PER_ROW, dtype=np.int32),
            states.view(torch.uint8).numpy().ravel(),
        )
        found = [each.draft(*arguments).token_ids.tolist() for each in (chain, modules)]
        assert len(found[0][0]) == 9
        assert found[0] == found[1]
