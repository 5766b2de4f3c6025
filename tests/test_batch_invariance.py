"""A row's bf16 logits have the same bits alone, among any batch mates, as one token or in a verify block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.engine.runner import ModelRunner
from families import tiny_model
from traces import Piece, batch_of

LENGTH, BLOCK_SIZE, MATES = 40, 16, 63
BLOCKS_PER_TEXT = 6
NUM_BLOCKS = 1 + (MATES + 2) * BLOCKS_PER_TEXT
TABLES = 1 + np.arange(NUM_BLOCKS - 1).reshape(-1, BLOCKS_PER_TEXT)  # text 0 is the one under test


class Case:
    """A runner, a text, and the logits of each of its positions computed one token at a time, alone."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.text = np.random.default_rng(0).integers(0, runner.vocab_size, LENGTH)
        self.alone = torch.cat(
            [self.run([self.piece(at, at + 1)]) for at in range(LENGTH)]
        )  # [length, vocab]

    def piece(self, start: int, end: int, text: int = 0) -> Piece:
        """Tokens [start, end) as one known token and drafts, so that all their logits are returned."""
        return Piece(text, start, self.text[start:end], drafts=end - start - 1)

    def run(self, pieces: list[Piece]) -> torch.Tensor:
        return self.runner.forward(batch_of(pieces, TABLES, BLOCK_SIZE))

    def mates(self, rng: np.random.Generator, count: int) -> list[Piece]:
        """Other sequences at any place of their text: single tokens, verify blocks, chunks."""
        return [self.mate(rng, text) for text in range(1, count + 1)]

    def mate(self, rng: np.random.Generator, text: int) -> Piece:
        count, start = int(rng.choice([1, 1, 1, 5, 9, 17])), int(rng.integers(0, 79))
        return Piece(text, start, rng.integers(0, self.runner.vocab_size, count), int(rng.integers(0, count)))


@pytest.fixture(scope="module", params=["tiny llama", "tiny llama, generic network", "SmolLM2-135M-Instruct"])
def case(request: pytest.FixtureRequest) -> Case:
    options = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    if request.param != "SmolLM2-135M-Instruct":
        sizes = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 64, "num_attention_heads": 2}
        model = tiny_model("llama", torch.bfloat16, **sizes, num_key_value_heads=1, vocab_size=1009)
        return Case(ModelRunner(model, fused="generic" not in request.param, **options))
    folder = request.getfixturevalue("target_dir")
    return Case(ModelRunner.from_pretrained(str(folder), dtype=torch.bfloat16, **options))


def test_the_runner_says_it_is_batch_invariant(case):
    assert case.runner.batch_invariant


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_a_token_in_a_verify_block_equals_the_token_alone(case, num_draft_tokens):
    start = 5
    end = start + 1 + num_draft_tokens
    assert torch.equal(case.run([case.piece(start, end)]), case.alone[start:end])


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 48, 64])
def test_a_row_among_batch_mates_equals_the_row_alone(case, rows):
    rng = np.random.default_rng(rows)
    pieces = case.mates(rng, rows - 1)
    place = int(rng.integers(0, rows))
    start = int(rng.integers(0, LENGTH - 9))
    for own in (case.piece(start, start + 1), case.piece(start, start + 9)):
        first = sum(len(piece.logit_positions) for piece in pieces[:place])
        logits = case.run([*pieces[:place], own, *pieces[place:]])[first : first + len(own.logit_positions)]
        assert torch.equal(logits, case.alone[own.start : own.start + len(own.tokens)])


@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5), mates=st.sampled_from([0, 1, 7]))
def test_prompt_chunks_of_any_size_leave_the_same_context(case, cuts, mates):
    edges = [0, *sorted(cuts), LENGTH]
    rng = np.random.default_rng(len(edges))
    for start, end in itertools.pairwise(edges):
        others = case.mates(rng, mates)
        logits = case.run([case.piece(start, end), *others])[: end - start]
        assert torch.equal(logits, case.alone[start:end])


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_logits(case, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = case.run([case.piece(0, LENGTH), *case.mates(np.random.default_rng(0), 20)])[:LENGTH]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits, case.alone)
