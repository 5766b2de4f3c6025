"""Comparisons of attention masks, anchors and the loss mask of conversations with stored vectors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from angelspec_backend.training.anchors import choose_anchors, eligible_anchors, pad_anchors
from angelspec_backend.training.chat_mask import marked_spans, offsets_mask, pack_runs, unpack_runs
from angelspec_backend.training.masks import block_mask, block_positions, step_mask
from golden_compare import Compare


def check_masks(folder: Path, compare: Compare) -> None:
    """Attention masks, RoPE positions and anchors."""
    vectors = load_file(folder / "vectors.safetensors")
    size = json.loads((folder / "vectors.json").read_text())["block_size"]
    anchors, keep, doc_ids = vectors["anchors"], vectors["keep"], vectors["doc_ids"]
    context = len(doc_ids)
    compare("ttt_mask", step_mask(6, 2), vectors["ttt_mask"])
    layouts = (("single_doc", None, torch.arange(context)), ("packed", doc_ids, vectors["doc_positions"]))
    for name, docs, positions in layouts:
        mask = block_mask(anchors, keep, size, context, docs)
        compare(f"mask_{name}", mask, vectors[f"mask_{name}"])
        columns = block_positions(anchors, size, positions)
        compare(f"rope_positions_{name}", columns, vectors[f"rope_positions_{name}"])
        eligible = eligible_anchors(vectors["anchor_loss_mask"], size, docs, "whole")
        stored = vectors[f"eligible_anchors_{name}"]
        compare(f"eligible_anchors_{name}", eligible.nonzero()[:, 0], stored)
        chosen, real = pad_anchors(choose_anchors(eligible, 20, torch.Generator()), 20)
        compare(f"sampled_slots_{name}", chosen, vectors[f"sampled_slots_{name}"])
        compare(f"sampled_keep_{name}", real, vectors[f"sampled_keep_{name}"])


def check_chat_mask(folder: Path, compare: Compare) -> None:
    """Loss masks of conversations, from their text and their tokens' offsets."""
    vectors = load_file(folder / "vectors.safetensors")
    for name, sample in json.loads((folder / "vectors.json").read_text())["samples"].items():
        spans, cut = marked_spans(sample["rendered_text"]), sample["max_length_truncated"]
        offsets = [(start, end) for start, end in vectors[f"{name}.offsets"].tolist()]
        mask = offsets_mask(offsets, spans)
        compare(f"{name}.loss_mask", torch.tensor(mask), vectors[f"{name}.loss_mask"])
        last = offsets_mask(offsets, spans[-1:])
        compare(f"{name}.loss_mask_last_turn", torch.tensor(last), vectors[f"{name}.loss_mask_last_turn"])
        truncated = vectors[f"{name}.truncated_loss_mask"]
        compare(f"{name}.truncated_loss_mask", torch.tensor(mask[:cut]), truncated)
        runs = [list(map(int, packed.split(","))) for packed in (pack_runs(mask), sample["packed_loss_mask"])]
        compare(f"{name}.packed_loss_mask", torch.tensor(runs[0]), torch.tensor(runs[1]))
        unpacked = unpack_runs(sample["packed_loss_mask"])
        compare(f"{name}.unpacked_loss_mask", torch.tensor(unpacked), vectors[f"{name}.loss_mask"])
