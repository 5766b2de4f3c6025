"""DFlash, DFlare and DFly in serving as recorded programs: a native call for the block, one per draft token.

Of the last layer's output only the slots that draft are read, so the others only leave keys and values.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.choice import BlockChoice, Likeliest
from angelspec_backend.drafters.packed import PackedAttention
from angelspec_backend.drafters.packed_block import PackedBlockAttention, PackedCorrection
from angelspec_backend.drafters.recorded import Queries, Tokens, norm_of, record_keys, record_output
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.program import Program, Rows


class RecordedContext:
    """Writes context keys and values to the pool, with room for so many positions."""

    def __init__(self, network: BlockNetwork, pool: KVPool, cos_sin: Tensor, room: int) -> None:
        spec, self._pool = network.spec, pool
        self.tokens, self._program = Tokens(room), Program()
        tokens, program, hidden = self.tokens, self._program, spec.shape.hidden
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
        """See ``BlockSteps``."""
        self.tokens.place(positions, table, row_of, self._pool.block_size)
        self._received[: len(positions)] = hidden_states.flatten(1)
        self._program.run()


class RecordedBlocks:
    """Drafts blocks, with room for so many."""

    def __init__(self, network: BlockNetwork, pool: KVPool, cos_sin: Tensor, room: int) -> None:
        self._spec = spec = network.spec
        self._pool, self._cos_sin, self._program = pool, cos_sin, Program()
        size, hidden, program = spec.block_size, spec.shape.hidden, self._program
        self.blocks, self._tokens = Queries(room), Tokens(room * size)
        # The slots that draft: as queries of their blocks, and where they lie among all slots.
        self._asking, self._slots = Queries(room), Rows(room * size)
        self._ids, self._slot = self._tokens.numbers(), self._slots.numbers()
        delta, stream = self._record_layers(network)
        self._hidden = self._slots.tensor(hidden)
        program.rows(self._slots, delta, self._hidden, norm=norm_of(network.final_norm), residual=stream)
        # The head of one slot a block: where it lies among those that draft, and the token before it.
        self._heads = Rows(room)
        self._at, self._previous = self._heads.numbers(), self._heads.numbers()
        correction, head = network.hidden_correction, cast(PackedLinear, network.lm_head)
        self._sequential, rows = correction is not None, self._heads
        if correction is None:
            self._head, rows = len(program), self._slots
            self._logits = program.linear(rows, head, self._hidden)
        else:
            self._logits = self._record_correction(network, cast(PackedCorrection, correction), head)
        self._draft_ids, self._probability = program.argmax(rows, self._logits)

    def draft(
        self,
        anchor_ids: NDArray[np.int64],
        anchors: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
        choice: BlockChoice,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See ``BlockSteps``."""
        self._run_block(anchor_ids, anchors, table, wanted)
        shape = len(wanted), int(wanted.max())
        tokens, confidence = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        if not self._sequential:
            block, index = ragged(wanted)
            tokens[block, index], confidence[block, index] = self._choose(choice, block, index)
            return tokens, confidence
        start, previous = np.cumsum(wanted) - wanted, anchor_ids
        for step in range(shape[1]):
            block = np.flatnonzero(wanted > step)
            self._heads.count = count = len(block)
            self._at[:count] = start[block] + step
            self._previous[:count] = previous[block]
            tokens[block, step], confidence[block, step] = self._choose(choice, block, step)
            previous = tokens[:, step]
        return tokens, confidence

    def _run_block(
        self,
        anchor_ids: NDArray[np.int64],
        anchors: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
    ) -> None:
        """The backbone: leaves the hidden states of the slots that draft."""
        size, first = self._spec.block_size, 1 - self._spec.label_shift
        count, last = len(anchors), anchors + size - 1
        self._ids[: count * size] = self._spec.mask_token_id
        self._ids[: count * size : size] = anchor_ids
        positions = (anchors[:, None] + np.arange(size)).reshape(-1)
        self._tokens.place(positions, table, np.repeat(np.arange(count), size), self._pool.block_size)
        block, index = ragged(wanted)
        self._slots.count = len(block)
        self._slot[: len(block)] = block * size + first + index
        self.blocks.ask(np.full(count, size), last, table)
        self._asking.ask(wanted, last, table)
        self._program.run(0, self._head)

    def _choose(
        self, choice: BlockChoice, block: NDArray[np.int64], index: NDArray[np.int64] | int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Run the head and choose.  block, index: [n] of the rows of the head"""
        self._program.run(self._head)
        count = len(block)
        found = Likeliest(self._logits[:count], self._draft_ids[:count], self._probability[:count])
        tokens, probability = choice.among(found, block, index)
        return tokens.numpy(), probability.numpy()

    def _record_layers(self, network: BlockNetwork) -> tuple[Tensor, Tensor]:
        """-> the last MLP's output and the residual stream, of the slots that draft"""
        program, tokens, hidden = self._program, self._tokens, network.spec.shape.hidden
        stream, normed = tokens.tensor(hidden), tokens.tensor(hidden)
        program.rows(tokens, network.embed_tokens, stream, index=self._ids)
        rows: Rows = tokens
        queries, delta = self.blocks, None
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

    def _record_correction(
        self, network: BlockNetwork, correction: PackedCorrection, head: PackedLinear
    ) -> Tensor:
        """DFly's head, see ``HiddenCorrection``.  -> logits"""
        program, rows, hidden = self._program, self._heads, self._spec.shape.hidden
        before = program.linear(self._slots, head, self._hidden) if correction.folded else self._hidden
        self._head = len(program)
        both = rows.tensor(2 * hidden)
        for part, x, index, norm in (
            (both[:, :hidden], self._hidden, self._at, correction.hidden_norm),
            (both[:, hidden:], network.embed_tokens, self._previous, correction.embed_norm),
        ):
            program.rows(rows, x, part, norm=norm_of(norm), index=index)
        corrected = program.swiglu(rows, correction.mlp.gate_up, correction.mlp.down, both)
        program.rows(rows, before, None, index=self._at, residual=corrected)
        return corrected if correction.folded else program.linear(rows, head, corrected)
