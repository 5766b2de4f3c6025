"""DFlash, DFlare and DFly in serving as recorded programs.

Of the last layer's output only the slots that draft are read, so the others only leave keys and values.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.choice import Choice, Likeliest
from angelspec_backend.drafters.packed import PackedAttention
from angelspec_backend.drafters.packed_block import PackedBlockAttention, PackedCorrection
from angelspec_backend.drafters.recorded import Queries, Tokens, norm_of, record_keys, record_output
from angelspec_backend.drafters.recorded_steps import DraftSteps
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.program import Program, Rows


class RecordedContext:
    """``ContextSteps``, with room for so many positions."""

    def __init__(self, network: BlockNetwork, pool: KVPool, cos_sin: Tensor, room: int) -> None:
        spec, self._pool, self.rooms = network.spec, pool, (room,)
        self._tokens, self._program = Tokens(room), Program()
        tokens, program, hidden = self._tokens, self._program, spec.shape.hidden
        self._received = tokens.tensor(len(spec.tap_ids) * spec.target_hidden)
        base = None
        if network.context_proj is not None:
            base = program.linear(tokens, cast(PackedLinear, network.context_proj), self._received)
        context, mixed = tokens.tensor(hidden), tokens.tensor(hidden)
        norm, fusion = norm_of(network.context_norm), network.layer_fusion_weights
        if fusion is None:
            assert base is not None
            program.rows(tokens, base, context, norm=norm)
        for index, layer in enumerate(network.layers):
            if fusion is not None:
                weights = fusion[index].float().softmax(-1).to(network.embed_tokens.dtype).float()
                program.mix(tokens, self._received, weights, mixed)
                if base is None:
                    program.rows(tokens, mixed, context, norm=norm)
                else:
                    program.rows(tokens, base, context, norm=norm, residual=mixed)
            attention = cast(PackedBlockAttention, layer.self_attn)
            record_keys(program, tokens, pool, cos_sin, index, attention, attention.context_kv, context)

    def store(
        self,
        positions: NDArray[np.int64],
        table: NDArray[np.int32],
        row_of: NDArray[np.int64],
        hidden_states: Tensor,
    ) -> None:
        """See ``ContextSteps``."""
        self._tokens.place(positions, table, row_of, self._pool.block_size)
        self._received[: len(positions)] = hidden_states.flatten(1)
        self._program.run()


class RecordedBlocks:
    """``BlockSteps``, with room for so many blocks."""

    def __init__(self, network: BlockNetwork, pool: KVPool, cos_sin: Tensor, room: int) -> None:
        self._spec, self._vocab, self.rooms = network.spec, network.vocab, (room,)
        self._pool, self._cos_sin, self._program = pool, cos_sin, Program()
        size, hidden, program = network.spec.block_size, network.spec.shape.hidden, self._program
        self._blocks, self._tokens = Queries(room, per_row=size), Tokens(room * size)
        # The slots that draft: as queries of their blocks, and where they lie among all slots.
        self._asking, self._slots = Queries(room), Rows(room * size)
        self._ids, self._slot = self._tokens.numbers(), self._slots.numbers()
        delta, stream = self._record_layers(network)
        self._hidden = self._slots.tensor(hidden)
        program.rows(self._slots, delta, self._hidden, norm=norm_of(network.final_norm), residual=stream)
        self._head = cast(PackedLinear, network.lm_head)
        if network.hidden_correction is None:
            self._logits = program.linear(self._slots, self._head, self._hidden)
            self._token_ids, self._probability = program.argmax(
                self._slots, self._logits, None if self._vocab is None else self._vocab.target_ids
            )
        else:
            # The correction of one slot a block, where it lies among those that draft.
            self._steps = DraftSteps(program, room, self._vocab)
            self._at = [np.zeros(room, np.int64) for _ in range(network.spec.num_drafts)]
            self._anchor_ids = np.zeros(room, np.int64)
            self._record_corrections(network, cast(PackedCorrection, network.hidden_correction), room)
        self._sequential = network.hidden_correction is not None

    def draft(
        self,
        rows: NDArray[np.void],
        anchor_ids: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
        confident: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See ``BlockSteps``."""
        order = np.argsort(-wanted, kind="stable")
        rows, table, falling = rows[order], table[order], wanted[order]
        anchors = rows["num_fed"].astype(np.int64) + rows["num_feed"]
        self._place(anchor_ids[order], anchors, table, falling)
        choice = Choice(self._vocab, rows, anchors, confident)
        shape = len(rows), int(falling[0])
        tokens, confidence = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        if self._sequential:
            self._anchor_ids[: len(rows)] = anchor_ids[order]
            start = np.cumsum(falling) - falling
            for step in range(shape[1]):
                self._at[step][: len(rows)] = start + step
            tokens[order], confidence[order] = self._steps.run(falling, choice)
            return tokens, confidence
        self._program.run()
        block, index = ragged(falling)
        count = len(block)
        likeliest = Likeliest(
            self._logits[:count],
            torch.from_numpy(self._token_ids[:count]),
            torch.from_numpy(self._probability[:count]),
        )
        found = choice.among(likeliest, block, index)
        tokens[order[block], index], confidence[order[block], index] = (each.numpy() for each in found)
        return tokens, confidence

    def _place(
        self,
        anchor_ids: NDArray[np.int64],
        anchors: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
    ) -> None:
        """Set what the backbone computes."""
        size, first = self._spec.block_size, 1 - self._spec.label_shift
        count, last = len(anchors), anchors + size - 1
        self._ids[: count * size] = self._spec.mask_token_id
        self._ids[: count * size : size] = anchor_ids
        positions = (anchors[:, None] + np.arange(size)).reshape(-1)
        self._tokens.place(positions, table, np.repeat(np.arange(count), size), self._pool.block_size)
        block, index = ragged(wanted)
        self._slots.count = len(block)
        self._slot[: len(block)] = block * size + first + index
        self._blocks.ask(last, table)
        self._asking.ask(last, table, wanted)

    def _record_layers(self, network: BlockNetwork) -> tuple[Tensor, Tensor]:
        """-> the last MLP's output and the residual stream, of the slots that draft"""
        program, tokens, hidden = self._program, self._tokens, network.spec.shape.hidden
        stream, normed = tokens.tensor(hidden), tokens.tensor(hidden)
        program.rows(tokens, network.embed_tokens, stream, index=self._ids)
        rows: Rows = tokens
        queries, delta = self._blocks, None
        for index, layer in enumerate(network.layers):
            norm, attention = norm_of(layer.input_layernorm), cast(PackedAttention, layer.self_attn)
            if delta is None:
                program.rows(tokens, stream, normed, norm=norm)
            else:
                program.rows(tokens, delta, normed, norm=norm, residual=stream)
            query = record_keys(
                program, tokens, self._pool, self._cos_sin, index, attention, attention.qkv, normed
            )
            if index == len(network.layers) - 1:
                rows, queries = self._slots, self._asking
                query, stream = self._only_slots(query), self._only_slots(stream)
            attended = queries.attend(program, self._pool, index, attention, query)
            delta = record_output(program, rows, layer, attended, stream)
        assert delta is not None
        return delta, stream

    def _only_slots(self, x: Tensor) -> Tensor:
        """Those that draft.  [num_tokens, n] -> [num_slots, n]"""
        out = self._slots.tensor(x.shape[1])
        self._program.rows(self._slots, x, out, index=self._slot)
        return out

    def _record_corrections(self, network: BlockNetwork, correction: PackedCorrection, room: int) -> None:
        """DFly's head, slot after slot, see ``HiddenCorrection``."""
        program, hidden, mlp = self._program, self._spec.shape.hidden, correction.mlp
        before = program.linear(self._slots, self._head, self._hidden) if correction.folded else self._hidden
        previous = self._anchor_ids
        for at in self._at:
            rows = Rows(room)
            if self._steps.steps:
                self._steps.begin(rows)
                previous = self._steps.last_token_ids
            both = rows.tensor(2 * hidden)
            halves = both[:, :hidden], both[:, hidden:]
            program.rows(rows, self._hidden, halves[0], norm=norm_of(correction.hidden_norm), index=at)
            program.rows(
                rows, network.embed_tokens, halves[1], norm=norm_of(correction.embed_norm), index=previous
            )
            corrected = program.linear(rows, mlp.down, program.linear(rows, mlp.gate_up, both))
            program.rows(rows, before, None, index=at, residual=corrected)
            logits = corrected if correction.folded else program.linear(rows, self._head, corrected)
            self._steps.end(rows, logits)
