"""Comparisons of attention masks, anchors and the loss mask of conversations with stored vectors.

Each function reads one folder; all quantities are exact.
"""

from __future__ import annotations

from pathlib import Path

import torch

from angelspec_backend.training.anchors import choose_anchors, eligible_anchors, pad_anchors
from angelspec_backend.training.chat_mask import marked_spans, offsets_mask, pack_runs
from angelspec_backend.training.masks import block_mask, block_positions, step_mask
from golden_rows import Row, exact, load


def check_masks(folder: Path) -> list[Row]:
    """Attention masks, RoPE positions and anchors."""
    vectors, about = load(folder)
    size, anchors, keep = about["block_size"], vectors["anchors"], vectors["keep"]
    doc_ids, places = vectors["doc_ids"], vectors["doc_positions"]
    context = len(doc_ids)
    rows = [exact("ttt_mask", step_mask(6, 2), vectors["ttt_mask"])]
    for name, docs, positions in (("single_doc", None, torch.arange(context)), ("packed", doc_ids, places)):
        mask = block_mask(anchors, keep, size, context, docs)
        rows.append(exact(f"mask_{name}", mask, vectors[f"mask_{name}"]))
        slots = block_positions(anchors, size, positions)
        rows.append(exact(f"rope_positions_{name}", slots, vectors[f"rope_positions_{name}"]))
        eligible = eligible_anchors(vectors["anchor_loss_mask"], size, docs, "whole")
        places_of = eligible.nonzero()[:, 0]
        rows.append(exact(f"eligible_anchors_{name}", places_of, vectors[f"eligible_anchors_{name}"]))
        chosen, real = pad_anchors(choose_anchors(eligible, 20, torch.Generator()), 20)
        rows.append(exact(f"sampled_slots_{name}", chosen, vectors[f"sampled_slots_{name}"]))
        rows.append(exact(f"sampled_keep_{name}", real, vectors[f"sampled_keep_{name}"]))
    return rows


def check_chat_mask(folder: Path) -> list[Row]:
    """Loss masks of conversations, from their text and their tokens' offsets."""
    vectors, about = load(folder)
    rows = []
    for name, sample in about["samples"].items():
        spans, cut = marked_spans(sample["rendered_text"]), sample["max_length_truncated"]
        offsets = [(start, end) for start, end in vectors[f"{name}.offsets"].tolist()]
        mask = offsets_mask(offsets, spans)
        last = offsets_mask(offsets, spans[-1:])
        rows.append(exact(f"{name}.loss_mask", torch.tensor(mask), vectors[f"{name}.loss_mask"]))
        rows.append(exact(f"{name}.last_turn", torch.tensor(last), vectors[f"{name}.loss_mask_last_turn"]))
        truncated = vectors[f"{name}.truncated_loss_mask"]
        rows.append(exact(f"{name}.truncated", torch.tensor(mask[:cut]), truncated))
        rows.append((f"{name}.packed", float(pack_runs(mask) != sample["packed_loss_mask"]), 0.0))
    return rows
