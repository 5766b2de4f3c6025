"""A check at load: does the engine, with this model, give the same logits however a text is cut and batched?

It catches what no list of architectures can: a layer that keeps a state of its own, mixes
neighbouring tokens, or looks at the whole batch would be served wrongly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.engine.batch import PackedBatch, pack

LENGTH = 12
"""Tokens of the text under test."""
COMPANION = 80
"""Tokens of its batch mate, enough to reach the kernels for large batches."""
TOLERANCE = 0.1
"""Relative difference of the logits above which it cannot be rounding."""


class SelfCheckError(ValueError):
    """The model's output depends on how its input is cut and batched."""


def check_batching(
    forward: Callable[[PackedBatch], Tensor],
    *,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    max_context: int,
    device: str,
) -> bool:
    """Compare a text computed at once with the same text computed in pieces, among others.

    Writes to the KV pool, so it must run before anything else does.

    Returns:
        Whether the logits were bit-identical: the engine is batch-invariant with this model.

    Raises:
        SelfCheckError: the logits are not finite, or differ by more than rounding.
    """
    room = (num_blocks - 1) // 2 * block_size
    length, companion = (min(n, room, max_context) for n in (LENGTH, COMPANION))
    if length < 3:
        return False
    per_row = (num_blocks - 1) // 2
    tokens = np.random.default_rng(0).integers(0, vocab_size, length + companion).astype(np.int32)

    def run(*pieces: tuple[int, int, int]) -> list[Tensor]:
        """Logits of pieces (text, start, end), each computed as one token and drafts behind it."""
        rows = np.zeros(len(pieces), ROW)
        text, start, end = np.array(pieces).T
        rows["num_computed"], rows["num_tokens"], rows["sample"], rows["num_blocks"] = start, 1, 1, per_row
        ids = [tokens[length * t :][s:e] for t, s, e in pieces]
        drafts = DraftOutput.of(np.concatenate([i[1:] for i in ids]), (end - start - 1).astype(np.int32))
        table = np.concatenate([1 + t * per_row + np.arange(per_row) for t in text]).astype(np.int32)
        first = np.array([i[0] for i in ids], np.int32)
        logits = forward(pack(rows, first, drafts, table, block_size, device))
        return list(logits.float().split((end - start).tolist()))

    (whole,) = run((0, 0, length))
    first, *_ = run((0, 0, 1), (1, 0, companion))
    (second,) = run((0, 1, 2))
    _, third = run((1, 0, companion), (0, 2, length))
    cut = torch.cat([first, second, third])
    if not torch.isfinite(whole).all():
        raise SelfCheckError("its logits are not finite in this dtype")
    difference = float((whole - cut).norm() / whole.norm().clamp_min(1e-30))
    if difference > TOLERANCE:
        raise SelfCheckError(
            f"its logits change by {difference:.0%} when a text is computed in pieces and among others: "
            f"some layer keeps a state or mixes tokens outside attention"
        )
    return torch.equal(whole, cut)
