"""Verification of drafts by the target's own samples, against a loop over single tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.messages import ROW, DraftOutput, StepInput, split_rows
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from families import COMMON, tiny_model

VOCAB, BLOCK_SIZE, BLOCKS_PER_ROW, MAX_ROWS = COMMON["vocab_size"], 4, 8, 6
NUM_BLOCKS = 1 + MAX_ROWS * BLOCKS_PER_ROW


@pytest.fixture(scope="module")
def engine() -> TargetEngine:
    return TargetEngine(ModelRunner(tiny_model("llama"), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))


def make_row(slot: int, num_computed: int, num_tokens: int, sample: int = 1, **values: float) -> np.ndarray:
    row = np.zeros(1, ROW)
    row["slot"], row["num_computed"], row["num_tokens"], row["sample"] = (
        slot,
        num_computed,
        num_tokens,
        sample,
    )
    row["num_blocks"], row["top_p"] = BLOCKS_PER_ROW, 1
    for name, value in values.items():
        row[name] = value
    return row


def make_step(rows: list[np.ndarray], tokens: list[list[int]]) -> StepInput:
    table = [1 + row["slot"][0] * BLOCKS_PER_ROW + np.arange(BLOCKS_PER_ROW) for row in rows]
    flat = np.concatenate(tokens).astype(np.int32)
    return StepInput(
        np.concatenate(rows), flat, np.zeros(0, np.int32), np.concatenate(table).astype(np.int32)
    )


def plain_decoding(engine: TargetEngine, prompt: list[int], count: int, **values: float) -> list[int]:
    """The tokens after a prompt, one step per token, alone."""
    tokens = list(prompt)
    computed = 0
    for _ in range(count):
        row = make_row(0, computed, len(tokens) - computed, **values)
        output = engine.step(make_step([row], [tokens[computed:]]), DraftOutput.empty(1))
        assert output.lens.tolist() == [1]
        computed = len(tokens)
        tokens += output.token_ids.tolist()
    return tokens[len(prompt) :]


@st.composite
def sampling_rows(draw) -> list[dict]:
    """Per row: a prompt, its sampling parameters, and how many right and wrong drafts it gets."""
    kinds = st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9),
            "temperature": st.sampled_from([0.0, 0.3, 1.0]),
            "top_k": st.sampled_from([0, 5]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "seed": st.integers(0, 2**64 - 1),
            "right": st.integers(0, 4),
            "wrong": st.integers(0, 3),
            "sample": st.integers(0, 3).map(bool).map(int),
        }
    )
    return draw(st.lists(kinds, min_size=1, max_size=MAX_ROWS))


@settings(max_examples=25, deadline=None)
@given(cases=sampling_rows())
def test_a_step_emits_what_plain_decoding_would(engine, cases):
    rows, tokens, drafts, expected, lens = [], [], [], [], []
    for case in cases:
        sampling = {name: case[name] for name in ("temperature", "top_k", "top_p", "seed")}
        path = plain_decoding(engine, case["prompt"], case["right"] + 1, **sampling)
        wrong = [(path[case["right"]] + 1 + i) % VOCAB for i in range(case["wrong"])]
        draft = [*path[: case["right"]], *wrong] if case["sample"] else []
        rows.append({**sampling, "sample": case["sample"], "num_draft_tokens": len(draft)})
        tokens.append(case["prompt"])
        drafts.append(draft)
        expected += path if case["sample"] else []
        lens.append(len(path) if case["sample"] else 0)
    records = [make_row(slot, 0, len(tokens[slot]), **row) for slot, row in enumerate(rows)]
    proposal = DraftOutput.of(
        np.array([token for draft in drafts for token in draft], np.int32),
        np.array([len(draft) for draft in drafts], np.int32),
    )
    output = engine.step(make_step(records, tokens), proposal)
    assert output.lens.tolist() == lens
    assert output.token_ids.tolist() == expected
    assert output.draft_lens.tolist() == proposal.lens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_decoding_with_drafts_gives_the_text_of_plain_decoding(engine, temperature, num_draft_tokens):
    prompt, count, values = [5, 6, 7], 20, {"temperature": temperature, "seed": 11}
    expected = plain_decoding(engine, prompt, count, **values)
    rng = np.random.default_rng(num_draft_tokens)
    tokens, computed, steps = list(prompt), 0, 0
    while len(tokens) < len(prompt) + count:
        room = len(prompt) + count - len(tokens) - 1
        lens = min(num_draft_tokens, room)
        known = len(tokens) - len(prompt)
        draft = np.array(expected[known : known + lens], np.int32)
        draft[rng.random(lens) < 0.3] = 4  # most drafts are right, some are not
        row = make_row(0, computed, len(tokens) - computed, num_draft_tokens=lens, **values)
        output = engine.step(
            make_step([row], [tokens[computed:]]), DraftOutput.of(draft, np.array([lens], np.int32))
        )
        computed = len(tokens) + int(output.lens[0]) - 1
        tokens += output.token_ids.tolist()
        steps += 1
    assert tokens[len(prompt) :] == expected
    assert steps < count


def test_greedy_decoding_equals_transformers_generate(engine):
    prompt = [5, 6, 7, 8]
    generated = tiny_model("llama").generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert plain_decoding(engine, prompt, 20) == generated[0, len(prompt) :].tolist()


def test_a_prompt_in_chunks_gives_the_same_text(engine):
    prompt = list(range(3, 17))
    expected = plain_decoding(engine, prompt, 1, temperature=1.0, seed=5)
    for start, end in ((0, 3), (3, 4), (4, 12)):
        row = make_row(0, start, end - start, sample=0)
        output = engine.step(make_step([row], [prompt[start:end]]), DraftOutput.empty(1))
        assert (output.lens.tolist(), output.token_ids.tolist()) == ([0], [])
    row = make_row(0, 12, 2, temperature=1.0, seed=5)
    output = engine.step(make_step([row], [prompt[12:]]), DraftOutput.empty(1))
    assert output.token_ids.tolist() == expected


def layer_outputs(tokens: list[int]) -> list[torch.Tensor]:
    """What each decoder layer of the target puts out for a text, by transformers: [num_tokens, hidden]."""
    model, found = tiny_model("llama"), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: found.append(output[0]))
    model(torch.tensor([tokens]))
    return found


def test_hidden_states_are_those_of_committed_tokens_and_of_the_layers_each_row_asks_for(engine):
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]
    paths = [plain_decoding(engine, prompt, 4) for prompt in prompts]
    drafts = [[*paths[0][:2], (paths[0][2] + 1) % VOCAB], [], paths[2][:1], []]  # 2 of 3 right; 1 right
    taps = [[0, 2], [], [1], [0, 1, 2]]
    samples = [1, 1, 1, 0]  # the last row is a prompt chunk
    rows = [
        make_row(
            slot, 0, len(prompts[slot]), samples[slot],
            num_draft_tokens=len(drafts[slot]), num_taps=len(taps[slot]),
        )
        for slot in range(4)
    ]  # fmt: skip
    step = replace(make_step(rows, prompts), tap_ids=np.concatenate(taps).astype(np.int32))
    lens = np.array([len(draft) for draft in drafts], np.int32)
    output = engine.step(step, DraftOutput.of(np.concatenate(drafts).astype(np.int32), lens))
    assert output.lens.tolist() == [3, 1, 2, 0]
    committed = [prompts[0] + paths[0][:2], [], prompts[2] + paths[2][:1], prompts[3]]
    expected = []
    for tokens, layers in zip(committed, taps, strict=True):
        if tokens:
            outputs = layer_outputs(tokens)
            expected.append(torch.stack([outputs[layer] for layer in layers], dim=1).flatten())
    states = torch.from_numpy(output.hidden_states.copy()).view(torch.float32)
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_rows_that_all_ask_for_the_same_layers_get_them_and_no_row_gets_none(engine):
    prompts = [[5, 6, 7], [9, 10]]
    rows = [make_row(slot, 0, len(prompt), num_taps=2) for slot, prompt in enumerate(prompts)]
    step = make_step(rows, prompts)
    output = engine.step(replace(step, tap_ids=np.array([0, 2, 0, 2], np.int32)), DraftOutput.empty(2))
    states = torch.from_numpy(output.hidden_states.copy()).view(torch.float32).view(5, 2, -1)
    expected = [torch.cat([layer_outputs(prompt)[layer] for prompt in prompts]) for layer in (0, 2)]
    torch.testing.assert_close(states, torch.stack(expected, dim=1), atol=1e-5, rtol=1e-5)
    for row in rows:
        row["num_taps"] = 0
    assert len(engine.step(make_step(rows, prompts), DraftOutput.empty(2)).hidden_states) == 0


def test_hidden_states_that_stay_on_the_device_are_a_tensor_of_the_same_bytes(engine):
    prompts, taps = [[5, 6, 7], [9, 10], [11, 12]], [[0, 2], [1], []]
    rows = [make_row(slot, 0, len(prompts[slot]), num_taps=len(taps[slot])) for slot in range(3)]
    step = replace(make_step(rows, prompts), tap_ids=np.array([0, 2, 1], np.int32))
    expected = engine.step(step, DraftOutput.empty(3)).hidden_states
    found = TargetEngine(engine.runner, states_on_device=True).step(step, DraftOutput.empty(3)).hidden_states
    assert isinstance(found, torch.Tensor)
    assert found.numpy().tobytes() == expected.tobytes()


def test_a_step_that_points_outside_the_pool_is_refused(engine):
    step = make_step([make_row(MAX_ROWS, 0, 1)], [[5]])
    with pytest.raises(
        ValueError, match=f"block_table: entry 0 is {NUM_BLOCKS}, allowed: 1 to {NUM_BLOCKS - 1}"
    ):
        engine.step(step, DraftOutput.empty(1))
    assert len(split_rows(step.block_table, step.rows["num_blocks"])) == 1
