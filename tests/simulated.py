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


def hidden_state(layer: int, context: list[int]) -> np.ndarray:
    """What a layer of the target puts out at the last position, as bytes: a function of the whole context."""
    crc = zlib.crc32(np.array(context, np.uint64).tobytes())
    return np.array([layer, len(context) - 1, context[-1], crc], np.uint32).view(np.uint8)


HIDDEN_BYTES = 16


class SimulatedTarget:
    """Reads its context back from the blocks, as attention does."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size), -1, np.int64)

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput:
        emitted, lens, states = [], [], [np.zeros(0, np.uint8)]
        rows = step.rows
        tables = split_rows(step.block_table, rows["num_blocks"])
        known = split_rows(step.token_ids, rows["num_tokens"])
        proposed = split_rows(drafts.token_ids, drafts.lens)
        taps = split_rows(step.tap_ids, rows["num_taps"])
        uses = np.bincount(step.block_table)
        assert 0 not in step.block_table, "the null block was handed out"
        for row, table, tokens, draft, layers in zip(rows, tables, known, proposed, taps, strict=True):
            new = [*tokens.tolist(), *draft.tolist()]
            start = int(row["num_computed"])
            assert all(uses[table[start // self.block_size :]] == 1), (
                "a block that is written has another user"
            )
            for position, token in enumerate(new, start):
                self.pool[table[position // self.block_size], position % self.block_size] = token
            context = self.pool[table].reshape(-1)[: start + len(new)].tolist()
            assert -1 not in context, "a context position was never computed"
            samples = [
                next_token(context[: start + len(tokens) + i], int(row["seed"]))
                for i in range(len(draft) + 1 if row["sample"] else 0)
            ]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == samples[accepted]:
                accepted += 1
            emitted += samples[: accepted + 1]
            lens.append(min(accepted + 1, len(samples)))
            for end in range(start + 1, start + len(tokens) + accepted + 1):
                states += [hidden_state(layer, context[:end]) for layer in layers]
        flat = np.concatenate(states)
        return StepOutput(
            np.array(emitted, np.int32), np.array(lens, np.int32), drafts.lens, drafts.looked_up, flat
        )


class SimulatedDrafter:
    """Sees tokens alone; asserts that it has seen every one of them before.

    Its context lies in KV blocks or, without ``shares_blocks``, in the sequence's slot.
    """

    def __init__(self, info: DrafterInfo, block_size: int) -> None:
        self.info = info
        self.block_size = block_size
        self.blocks: dict[int, list[int]] = {}
        self.context: dict[int, list[int]] = {}

    def feed(self, row: np.void, feed: list[int], table: list[int], states: np.ndarray) -> list[int]:
        """Take the fed tokens in and return all that are known now."""
        assert len(states) == 0, "hidden states for a drafter without taps"
        context = self._context(int(row["slot"]), table, int(row["num_fed"])) + feed
        self.keep(row, table, context)
        return context

    def keep(self, row: np.void, table: list[int], context: list[int]) -> None:
        """Store a context; also called with the drafts behind it."""
        self.context[int(row["slot"])] = context
        for index, block in enumerate(table):
            written = context[index * self.block_size : (index + 1) * self.block_size]
            self.blocks[block] = written + self.blocks.get(block, [])[len(written) :]

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


class SimulatedStateDrafter:
    """Sees hidden states, each with the token at the next position, and keeps both in the KV blocks.

    It asserts that every state is the right one, at every position before its drafts, whoever was fed it.
    While it drafts it scribbles over the slots it may use.
    """

    def __init__(self, info: DrafterInfo, block_size: int) -> None:
        self.info = info
        self.block_size = block_size
        self.forget()

    def feed(self, row: np.void, feed: list[int], table: list[int], states: np.ndarray) -> list[int]:
        """Take the fed positions in and return all tokens that are known now."""
        start, count = int(row["num_fed"]), len(feed)
        assert count == int(row["num_feed"]) > 0
        assert start + count <= int(row["num_computed"]), "ahead of the target"
        if row["lookup_only"]:
            return self._seen(row, feed, table, states)
        pieces = states.reshape(count, len(self.info.tap_ids), HIDDEN_BYTES)
        for position, piece, token in zip(range(start, start + count), pieces, feed, strict=True):
            self._write(table, position, ([state.tobytes() for state in piece], token))
            self.seen[table[position // self.block_size], position % self.block_size] = token
        context: list[int] = []
        for position in range(start + count):
            kept, token = self._read(table, position)
            context = context or [int(np.frombuffer(kept[0], np.uint32)[2])]  # the first token
            assert kept == [hidden_state(layer, context).tobytes() for layer in self.info.tap_ids], (
                "a wrong hidden state, or one that another token followed"
            )
            context.append(token)
        if row["num_draft_tokens"]:
            anchor = start + count
            assert anchor == row["num_computed"], "drafting without all hidden states there are"
            for position in range(anchor, anchor + self.info.lookahead):
                self._write(table, position, ([b"scribble"], -1))
        return context

    def _seen(self, row: np.void, feed: list[int], table: list[int], states: np.ndarray) -> list[int]:
        """All tokens but the first, which no drafter of its kind gets, after a feed without states."""
        assert self.info.looks_up
        assert len(states) == 0
        start = int(row["num_fed"])
        for position, token in enumerate(feed, start):
            self.seen[table[position // self.block_size], position % self.block_size] = token
        return [
            self.seen[table[position // self.block_size], position % self.block_size]
            for position in range(start + len(feed))
        ]

    def keep(self, row: np.void, table: list[int], context: list[int]) -> None:
        """It keeps no drafts."""
        raise AssertionError("drafts have no hidden states")

    def forget(self) -> None:
        """Lose all context, as a process does that is started again."""
        self.slots: dict[tuple[int, int], tuple[list[bytes], int]] = {}
        self.seen: dict[tuple[int, int], int] = {}  # the token behind each position, with a state or without

    def _write(self, table: list[int], position: int, entry: tuple[list[bytes], int]) -> None:
        self.slots[table[position // self.block_size], position % self.block_size] = entry

    def _read(self, table: list[int], position: int) -> tuple[list[bytes], int]:
        return self.slots[table[position // self.block_size], position % self.block_size]


class SimulatedDrafters:
    """Several drafters: each knows the right continuation of what it has seen, and errs now and then."""

    def __init__(self, infos: tuple[DrafterInfo, ...], block_size: int, error_rate: float, seed: int) -> None:
        kinds = [SimulatedStateDrafter if info.tap_ids else SimulatedDrafter for info in infos]
        self.drafters = [kind(info, block_size) for kind, info in zip(kinds, infos, strict=True)]
        self.error_rate = error_rate
        self.random = np.random.default_rng(seed)

    def propose(self, step: StepInput) -> DraftOutput:
        flat, lens = [], []
        rows = step.rows
        feeds = split_rows(step.feed_token_ids, rows["num_feed"])
        tables = split_rows(step.block_table, rows["num_blocks"])
        widths = np.array([*(each.info.bytes_per_token for each in self.drafters), 0])
        fed = np.where(rows["lookup_only"] == 1, 0, rows["num_feed"])
        states = split_rows(step.hidden_states, widths[rows["drafter"]] * fed)
        assert sum(map(len, states)) == len(step.hidden_states)
        self._check_no_shared_writes(rows, tables)
        known = split_rows(step.token_ids, rows["num_tokens"])
        for row, feed, table, state, newest in zip(rows, feeds, tables, states, known, strict=True):
            draft: list[int] = []
            if row["drafter"] == NO_DRAFTER:
                assert row["num_draft_tokens"] == 0
            else:
                drafter = self.drafters[row["drafter"]]
                context = drafter.feed(row, feed.tolist(), table.tolist(), state)
                if row["lookup_only"]:
                    assert context[-1] == newest[-1], "not the row's own tokens"
                    draft = self._guess(row)
                else:
                    draft = self._draft(context, row)
                if drafter.info.keeps_drafts:
                    drafter.keep(row, table.tolist(), context + draft[:-1])
            flat += draft
            lens.append(len(draft))
        return DraftOutput.of(np.array(flat, np.int32), np.array(lens, np.int32))

    def forget(self) -> None:
        """Lose all context."""
        for drafter in self.drafters:
            drafter.forget()

    def _draft(self, context: list[int], row: np.void) -> list[int]:
        draft: list[int] = []
        for _ in range(row["num_draft_tokens"]):
            token = next_token([*context, *draft], int(row["seed"]))
            wrong = self.random.random() < self.error_rate
            draft.append(int(self.random.integers(VOCAB)) if wrong else token)
        return draft

    def _guess(self, row: np.void) -> list[int]:
        """Drafts of a row that only looks up: without the first token it cannot know what follows."""
        count = int(row["num_draft_tokens"]) if self.error_rate else 0
        return self.random.integers(VOCAB, size=count).tolist()

    def _check_no_shared_writes(self, rows: np.ndarray, tables: list[np.ndarray]) -> None:
        """A block that a hidden-state drafter writes is in no other of its rows."""
        for index, drafter in enumerate(self.drafters):
            if not drafter.info.tap_ids:
                continue
            mine = [i for i in range(len(rows)) if rows["drafter"][i] == index]
            uses = np.bincount(np.concatenate([[0], *(tables[i] for i in mine)]).astype(int))
            for i in mine:
                written = tables[i][rows["num_fed"][i] // drafter.block_size :]
                assert all(uses[written] == 1), "a block that is written has another user"
