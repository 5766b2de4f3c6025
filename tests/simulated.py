"""A target and a drafter without a neural network, for tests of the loop and the scheduler.

They keep tokens where the real ones keep keys and values, so any mistake in block tables, positions or
roll-back shows as a wrong context, and hence as a wrong text.
"""

from __future__ import annotations

import zlib

import numpy as np

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import NO_DRAFTER, DraftOutput, StepInput, StepOutput, split_rows

VOCAB = 50


def next_token(context: list[int], seed: int) -> int:
    """The target's sample: a function of the whole context and the seed."""
    return zlib.crc32(np.array([*context, seed], np.uint64).tobytes()) % VOCAB


def reference_text(prompt: list[int], seed: int, count: int) -> list[int]:
    """What plain decoding of one sequence gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class SimulatedTarget:
    """Reads its context back from the blocks, as attention does."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size), -1, np.int64)

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput:
        emitted, lens = [], []
        rows = step.rows
        tables = split_rows(step.block_table, rows["num_blocks"])
        known = split_rows(step.token_ids, rows["num_tokens"])
        proposed = split_rows(drafts.token_ids, drafts.lens)
        uses = np.bincount(step.block_table)
        assert 0 not in step.block_table, "the null block was handed out"
        for row, table, tokens, draft in zip(rows, tables, known, proposed, strict=True):
            new = [*tokens.tolist(), *draft.tolist()]
            start = int(row["num_computed"])
            assert all(uses[table[start // self.block_size :]] == 1), (
                "a block that is written has another user"
            )
            for position, token in enumerate(new, start):
                self.pool[table[position // self.block_size], position % self.block_size] = token
            context = self.pool[table].reshape(-1)[: start + len(new)].tolist()
            assert -1 not in context, "a context position was never computed"
            if not row["sample"]:
                lens.append(0)
                continue
            samples = [
                next_token(context[: start + len(tokens) + i], int(row["seed"]))
                for i in range(len(draft) + 1)
            ]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == samples[accepted]:
                accepted += 1
            emitted += samples[: accepted + 1]
            lens.append(accepted + 1)
        return StepOutput(np.array(emitted, np.int32), np.array(lens, np.int32), drafts.lens)


class SimulatedDrafter:
    """Knows the right continuation, and errs now and then; asserts that it has seen every token before.

    Its context lies in KV blocks or, without ``shares_blocks``, in the sequence's slot.
    """

    def __init__(self, info: DrafterInfo, block_size: int, error_rate: float, seed: int) -> None:
        self.info = info
        self.block_size = block_size
        self.blocks: dict[int, list[int]] = {}
        self.random = np.random.default_rng(seed)
        self.error_rate = error_rate
        self.context: dict[int, list[int]] = {}

    def propose(self, step: StepInput) -> DraftOutput:
        flat, lens = [], []
        feeds = split_rows(step.feed_token_ids, step.rows["num_feed"])
        tables = split_rows(step.block_table, step.rows["num_blocks"])
        for row, feed, table in zip(step.rows, feeds, tables, strict=True):
            if row["drafter"] == NO_DRAFTER:
                assert row["num_draft_tokens"] == 0
                lens.append(0)
                continue
            context = self._context(int(row["slot"]), table.tolist(), int(row["num_fed"]))
            context += feed.tolist()
            draft = []
            for _ in range(row["num_draft_tokens"]):
                token = next_token([*context, *draft], int(row["seed"]))
                draft.append(
                    int(self.random.integers(VOCAB)) if self.random.random() < self.error_rate else token
                )
            if self.info.keeps_drafts:
                context += draft[:-1]
            self.context[int(row["slot"])] = context
            for index, block in enumerate(table.tolist()):
                written = context[index * self.block_size : (index + 1) * self.block_size]
                self.blocks[block] = written + self.blocks.get(block, [])[len(written) :]
            flat += draft
            lens.append(len(draft))
        return DraftOutput(np.array(flat, np.int32), np.array(lens, np.int32))

    def _context(self, slot: int, table: list[int], num_fed: int) -> list[int]:
        known = self.context.get(slot, [])
        if self.info.shares_blocks:
            known = [token for block in table for token in self.blocks.get(block, [])]
        assert len(known) >= num_fed, "a token never reached the drafter"
        return known[:num_fed]

    def forget(self) -> None:
        """Lose all context, as a process does that is started again."""
        self.context.clear()
        self.blocks.clear()
