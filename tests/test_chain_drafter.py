"""MTP and EAGLE-3 in serving draft what they draft in training, however they are fed."""

import numpy as np
import pytest
import torch

from angelspec_backend.core.messages import ROW
from angelspec_backend.drafters.chain_drafter import ChainDrafter, Drafts
from angelspec_backend.drafters.unroll import unroll
from chains import KINDS, VOCAB, random_chain

BLOCK_SIZE, BLOCKS_PER_ROW, NUM_SLOTS, STEPS = 4, 16, 3, 4


class Serving:
    """Feeds sequences to a drafter; the table of a slot is its own."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.drafter = ChainDrafter(
            random_chain(kind, dtype),
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
        found: Drafts = self.drafter.draft(
            rows, np.concatenate(feed).astype(np.int32), tables.ravel().astype(np.int32), raw
        )
        return [
            (found.token_ids[index, :length].tolist(), found.confidence[index, :length].tolist())
            for index, length in enumerate(found.lens)
        ]


def random_text(kind: str, seed: int, length: int = 40) -> tuple[np.ndarray, torch.Tensor]:
    """Tokens [length] and what a target might have made of them [length, num_taps, hidden]."""
    spec = random_chain(kind).spec
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    shape = (length, len(spec.tap_ids), spec.target_hidden)
    return tokens.numpy(), torch.randn(shape, generator=generator)


def trained(kind: str, text: np.ndarray, states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What training's forward drafts behind each position and how likely: [STEPS, len] each."""
    network = random_chain(kind)
    with torch.no_grad():
        steps = unroll(network, states, torch.from_numpy(text), STEPS, on_policy=True)
        logits = torch.stack([step.logits for step in steps])  # [STEPS, len, draft vocabulary]
        chosen = logits.argmax(-1)
        likely = logits.softmax(-1).gather(-1, chosen[..., None])[..., 0]
    return network.to_target(chosen).numpy(), likely.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_serving_drafts_what_training_computes_however_it_is_fed_and_taken_back(kind):
    rng = np.random.default_rng(0)
    serving = Serving(kind)
    texts = [random_text(kind, seed) for seed in range(NUM_SLOTS)]
    held = [0] * NUM_SLOTS
    for _ in range(12):
        cases = []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            text, states = texts[slot]
            fed = int(rng.integers(0, held[slot] + 1)) if rng.random() < 0.4 else held[slot]
            if fed < held[slot]:  # the text goes on otherwise from here
                other, other_states = random_text(kind, int(rng.integers(100, 1000)))
                text = np.concatenate([text[: fed + 1], other[fed + 1 :]])
                states = torch.cat([states[:fed], other_states[fed:]])
                texts[slot] = text, states
            feed = int(rng.choice([1, 2, 5, 11]))
            if fed + feed >= len(text):
                fed, feed = 0, 3
            drafts = int(rng.integers(0, STEPS + 1))
            case = {"slot": slot, "num_fed": fed, "num_feed": feed, "num_draft_tokens": drafts}
            cases.append({**case, "text": text, "states": states})
            held[slot] = fed + feed
        for case, (tokens, confidence) in zip(cases, serving.draft(cases), strict=True):
            expected, likely = trained(kind, case["text"], case["states"])
            row, count = held[case["slot"]] - 1, case["num_draft_tokens"]
            assert tokens == expected[:count, row].tolist()
            np.testing.assert_allclose(confidence, likely[:count, row], rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_drafts_the_same_alone_and_beside_others(kind, dtype):
    together, alone = Serving(kind, dtype), Serving(kind, dtype)
    cases = []
    for slot in range(NUM_SLOTS):
        text, states = random_text(kind, slot)
        case = {"slot": slot, "num_fed": 0, "num_feed": 3 + 4 * slot, "num_draft_tokens": 1 + slot}
        sampling = {"temperature": 0.5 * slot, "seed": 11 + slot}
        cases.append({**case, **sampling, "text": text, "states": states.to(dtype)})
    assert together.draft(cases) == [alone.draft([case])[0] for case in cases]


def test_drafts_are_sampled_with_the_noise_of_their_positions():
    """A draft is the token that the sampler takes from the drafter's logits at the draft's own position."""
    from angelspec_backend.engine.sampler import SamplingRows, sample

    kind = "mtp_pruned"
    serving, network = Serving(kind), random_chain(kind)
    text, states = random_text(kind, 0)
    newest = 9
    case = {"slot": 0, "num_fed": 0, "num_feed": newest, "num_draft_tokens": 1, "temperature": 6}
    with torch.no_grad():
        logits = unroll(network, states, torch.from_numpy(text), 1)[0].logits[newest - 1][None]
    seen = set()
    for seed in range(20):
        row = np.zeros(1, ROW)
        row["seed"], row["temperature"], row["top_p"] = seed, 6, 1
        params = SamplingRows.from_rows(row, np.ones(1, int), np.array([newest + 1]))
        expected = sample(network.vocab.spread(logits), params).tolist()
        tokens, confidence = serving.draft([{**case, "seed": seed, "text": text, "states": states}])[0]
        assert tokens == expected
        draft_id = network.vocab.draft_ids[tokens[0]]
        assert confidence[0] == pytest.approx(float(logits.softmax(-1)[0, draft_id]), rel=1e-4)
        seen.update(tokens)
    assert len(seen) > 3


def test_no_draft_lies_beyond_the_context():
    serving = Serving("mtp")
    text, states = random_text("mtp", 0, BLOCKS_PER_ROW * BLOCK_SIZE)
    case = {"slot": 0, "num_fed": 0, "num_draft_tokens": STEPS, "text": text, "states": states}
    for room in (0, 1, 2):
        fed = len(text) - 1 - room
        assert len(serving.draft([{**case, "num_feed": fed}])[0][0]) == room


def test_rows_that_are_fed_nothing_get_no_drafts():
    serving = Serving("mtp")
    text, states = random_text("mtp", 0)
    nothing = {"slot": 0, "num_fed": 0, "num_feed": 0, "num_draft_tokens": 2, "text": text, "states": states}
    fed = {**nothing, "slot": 1, "num_feed": 5}
    assert [len(tokens) for tokens, _ in serving.draft([nothing, fed])] == [0, 2]
    assert [len(tokens) for tokens, _ in serving.draft([nothing])] == [0]
