"""Block drafters in serving draft what they compute in training, however they are fed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from angelspec_backend.core.messages import ROW
from angelspec_backend.drafters.block_drafter import BlockDrafter
from angelspec_backend.drafters.choice import choose_tokens
from angelspec_backend.drafters.draft_vocab import DraftVocab
from angelspec_backend.drafters.masked import train_forward
from angelspec_backend.engine.sampler import SamplingRows, sample
from angelspec_backend.training.masks import block_mask
from block_networks import VARIANTS, VOCAB, random_block

BLOCK_SIZE, BLOCKS_PER_ROW, NUM_SLOTS, LENGTH = 4, 16, 3, 40


class Serving:
    """Feeds sequences to a drafter; the table of a slot is its own."""

    def __init__(self, variant: str, **options) -> None:
        self.drafter = BlockDrafter(
            random_block(variant, **options),
            num_blocks=1 + NUM_SLOTS * BLOCKS_PER_ROW,
            block_size=BLOCK_SIZE,
            max_context=BLOCKS_PER_ROW * BLOCK_SIZE,
        )

    def draft(self, cases: list[dict]) -> list[tuple[list[int], list[float]]]:
        """cases: slot, num_fed, num_feed, text, states [len, taps, hidden], num_draft_tokens, sampling."""
        rows = np.zeros(len(cases), ROW)
        rows["top_p"], rows["num_blocks"] = 1, BLOCKS_PER_ROW
        for row, case in zip(rows, cases, strict=True):
            for name in case.keys() - {"text", "states"}:
                row[name] = case[name]
        spans = [(case["num_fed"], case["num_fed"] + case["num_feed"]) for case in cases]
        feed = [case["text"][start + 1 : end + 1] for case, (start, end) in zip(cases, spans, strict=True)]
        states = [case["states"][start:end] for case, (start, end) in zip(cases, spans, strict=True)]
        raw = torch.cat(states).contiguous().view(torch.uint8).numpy().ravel()
        tables = 1 + rows["slot"][:, None] * BLOCKS_PER_ROW + np.arange(BLOCKS_PER_ROW)
        table = np.concatenate([t[:n] for t, n in zip(tables, rows["num_blocks"], strict=True)])
        found = self.drafter.draft(rows, np.concatenate(feed).astype(np.int32), table.astype(np.int32), raw)
        return [
            (found.token_ids[index, :length].tolist(), found.confidence[index, :length].tolist())
            for index, length in enumerate(found.lens)
        ]


def random_text(variant: str, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """Tokens [LENGTH] and what a target might have made of them [LENGTH, num_taps, target_hidden]."""
    spec = random_block(variant).spec
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator)
    return tokens.numpy(), torch.randn(LENGTH, len(spec.tap_ids), spec.target_hidden, generator=generator)


def trained(variant: str, text, states, anchor: int, drafts: list[int], **options):
    """Training's forward, the drafts being the text behind the anchor, among other blocks.

    Returns the likeliest tokens and the confidences, [num_drafts] each.
    """
    network = random_block(variant, **options)
    tokens = torch.from_numpy(text).clone()
    tokens[anchor + 1 : anchor + 1 + len(drafts)] = torch.tensor(drafts)
    anchors = torch.tensor([2, anchor, min(anchor + 2, LENGTH - 1), 0])
    keep = torch.tensor([True, True, True, False])
    mask = block_mask(anchors, keep, network.spec.block_size, LENGTH)
    with torch.no_grad():
        _, slots = train_forward(network, states[None], tokens[None], anchors[None], mask[None])
    assert not slots.logits.isnan().any()
    logits = slots.logits[0, 1]
    likely = logits.softmax(-1).amax(-1) if slots.confidence is None else slots.confidence[0, 1].sigmoid()
    return network.to_target(logits.argmax(-1)).numpy(), likely.numpy()


def check(variant: str, case: dict, found, **options) -> None:
    tokens, confidence = found
    anchor = case["num_fed"] + case["num_feed"]
    wanted, likely = trained(variant, case["text"], case["states"], anchor, tokens, **options)
    num_drafts = min(case["num_draft_tokens"], random_block(variant).spec.num_drafts)
    assert len(tokens) == num_drafts
    np.testing.assert_array_equal(tokens, wanted[:num_drafts])
    np.testing.assert_allclose(confidence, likely[:num_drafts], atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_serving_drafts_what_training_computes_however_it_is_fed_and_taken_back(variant):
    rng = np.random.default_rng(0)
    serving = Serving(variant)
    texts = [random_text(variant, seed) for seed in range(NUM_SLOTS)]
    held = [0] * NUM_SLOTS
    for _ in range(8):
        cases = []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            text, states = texts[slot]
            fed = int(rng.integers(0, held[slot] + 1)) if rng.random() < 0.4 else held[slot]
            if fed < held[slot]:  # the text goes on otherwise from here
                other, other_states = random_text(variant, int(rng.integers(100, 1000)))
                texts[slot] = text, states = (
                    np.concatenate([text[: fed + 1], other[fed + 1 :]]),
                    torch.cat([states[:fed], other_states[fed:]]),
                )
            feed = int(rng.integers(1, 8))
            if fed + feed > LENGTH - 7:
                fed, feed = 0, 5
            cases.append(
                {
                    "slot": slot,
                    "num_fed": fed,
                    "num_feed": feed,
                    "text": text,
                    "states": states,
                    "num_draft_tokens": int(rng.integers(0, 7)),
                }
            )
            held[slot] = fed + feed
        for case, found in zip(cases, serving.draft(cases), strict=True):
            check(variant, case, found)


def test_a_network_without_norms_on_queries_and_keys_is_served_too():
    text, states = random_text("dfly", 0)
    case = {"slot": 0, "num_fed": 0, "num_feed": 20, "text": text, "states": states, "num_draft_tokens": 4}
    found = Serving("dfly", qk_norm=False).draft([case])
    check("dfly", case, found[0], qk_norm=False)


@pytest.mark.parametrize("variant", ["dflash", "dfly", "dspark_rnn"])
def test_a_row_gets_the_same_drafts_alone_and_beside_others(variant):
    cases = []
    for slot in range(NUM_SLOTS):
        text, states = random_text(variant, slot)
        cases.append(
            {
                "slot": slot,
                "num_fed": 0,
                "num_feed": 3 + 7 * slot,
                "text": text,
                "states": states,
                "num_draft_tokens": 2 + slot,
                "temperature": 0.8 * (slot % 2),
                "seed": slot,
            }
        )
    together = Serving(variant).draft(cases)
    alone = [Serving(variant).draft([case])[0] for case in cases]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]


def test_a_bf16_drafter_drafts_nearly_as_the_same_in_fp32():
    text, states = random_text("dfly", 3)
    case = {"slot": 0, "num_fed": 0, "num_feed": 20, "text": text, "num_draft_tokens": 1}
    whole = Serving("dfly").draft([{**case, "states": states}])[0]
    half = Serving("dfly", dtype=torch.bfloat16).draft([{**case, "states": states.bfloat16()}])[0]
    assert half[0] == whole[0]
    assert half[1] == pytest.approx(whole[1], abs=0.1)


def test_rows_without_feed_or_without_room_for_a_block_get_no_drafts():
    serving = Serving("dflash")
    text, states = random_text("dflash", 0)
    common = {"text": text, "states": states, "num_draft_tokens": 4}
    exact = {"slot": 0, "num_fed": 0, "num_feed": 15, "num_blocks": 5, **common}  # 15 + 5 slots
    short = {"slot": 1, "num_fed": 0, "num_feed": 16, "num_blocks": 5, **common}
    idle = {"slot": 2, "num_fed": 4, "num_feed": 0, **common}
    assert [len(tokens) for tokens, _ in serving.draft([exact, short, idle])] == [4, 0, 0]


def test_drafts_use_the_noise_of_their_positions_and_a_draft_vocabulary_changes_nothing_of_it():
    generator = torch.Generator().manual_seed(5)
    vocab = DraftVocab.of(torch.randperm(VOCAB, generator=generator)[:40], VOCAB)
    logits = 3 * torch.randn(64, 40, generator=generator)
    rows = np.zeros(64, ROW)
    rows["temperature"], rows["top_p"], rows["seed"] = 0.9, 0.8, np.arange(64)
    rows["temperature"][::4] = 0
    params = SamplingRows.from_rows(rows, np.ones(64, int), np.arange(64))
    tokens, confidence = choose_tokens(logits, params, vocab)
    np.testing.assert_array_equal(tokens.numpy(), sample(vocab.spread(logits), params))
    wanted = logits.softmax(-1).gather(1, vocab.draft_ids[tokens][:, None])[:, 0]
    torch.testing.assert_close(confidence, wanted)
    unsure, _ = choose_tokens(logits, params, vocab, confident=False)
    np.testing.assert_array_equal(unsure.numpy(), tokens.numpy())
    plain, _ = choose_tokens(vocab.spread(logits), params, None)
    np.testing.assert_array_equal(plain.numpy(), tokens.numpy())


def test_sampled_drafts_are_the_targets_samples_where_the_logits_are_the_same():
    serving = Serving("dflash")
    text, states = random_text("dflash", 1)
    case = {
        "slot": 0,
        "num_fed": 0,
        "num_feed": 12,
        "text": text,
        "states": states,
        "num_draft_tokens": 4,
        "temperature": 1.0,
        "seed": 77,
    }
    tokens, _ = serving.draft([case])[0]
    network = random_block("dflash")
    anchors = torch.tensor([12])
    mask = block_mask(anchors, torch.tensor([True]), 5, LENGTH)
    with torch.no_grad():
        logits = train_forward(
            network, states[None], torch.from_numpy(text)[None], anchors[None], mask[None]
        )[1].logits[0, 0]
    rows = np.zeros(1, ROW)
    rows["temperature"], rows["seed"], rows["top_p"] = 1, 77, 1
    wanted = sample(logits, SamplingRows.from_rows(rows, np.array([4]), np.array([13])))
    np.testing.assert_array_equal(tokens, wanted)
