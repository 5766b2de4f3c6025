"""DFlash, DFlare, DFly and DSpark in serving: they follow the target's hidden states, then draft a block.

The context keys and values of position p lie at position p of the drafter's own pool, under the target's
block table.  A block writes its own behind them, at the anchor's position A to A + block_size - 1, and the
next feed overwrites them.  In a block every slot sees every other: each is a row of attention over the
context and the whole block, all of whose keys and values are stored before the first of them attends.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.hidden_states import States
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.choice import Choice, Drafts
from angelspec_backend.drafters.network_drafter import NetworkDrafter
from angelspec_backend.drafters.packed_block import pack_block_network, store_context
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.drafters.recorded import enlarged
from angelspec_backend.drafters.recorded_block import RecordedBlocks, RecordedContext
from angelspec_backend.engine.batch import PackedBatch, pad_block_table, ragged
from angelspec_backend.engine.kv_pool import KVPool


class ContextSteps(Protocol):
    """Writes the context."""

    def store(
        self,
        positions: NDArray[np.int64],
        table: NDArray[np.int32],
        row_of: NDArray[np.int64],
        hidden_states: Tensor,
    ) -> None:
        """Store the context of some positions.

        positions: [n]; row_of: [n] index into table, [num_rows, max_blocks];
        hidden_states: [n, num_taps, target_hidden].
        """
        ...


class BlockSteps(Protocol):
    """Drafts blocks."""

    def draft(
        self,
        rows: NDArray[np.void],
        anchor_ids: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
        confident: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The drafts of one block per row and their confidences, [n, max(wanted)] each.

        rows: [n] of ROW; anchor_ids: [n] newest tokens; table: [n, max_blocks]; wanted: [n] drafts, at least
        one of each; confident: see ``choose_tokens``.
        """
        ...


class BlockDrafter(NetworkDrafter[BlockNetwork]):
    """Serves one block drafter."""

    _pack = staticmethod(pack_block_network)
    _context: RecordedContext | None = None
    _blocks: RecordedBlocks | None = None

    @torch.inference_mode()
    def draft(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
        confident: bool = True,
    ) -> Drafts:
        """See ``NetworkDrafter.draft``.  A row without room for a whole block behind its anchor gets none."""
        table = pad_block_table(block_table, rows["num_blocks"])
        if len(feed_token_ids):
            row_of, offset = ragged(rows["num_feed"])
            positions = rows["num_fed"].astype(np.int64)[row_of] + offset
            steps = self._context_steps(len(positions))
            steps.store(positions, table, row_of, self._received(hidden_states))
        spec = self.network.spec
        anchors = rows["num_fed"].astype(np.int64) + rows["num_feed"]  # [num_rows] their positions
        room = np.minimum(rows["num_blocks"] * self.pool.block_size, self.max_context + spec.block_size)
        fits = (rows["num_feed"] > 0) & (anchors + spec.block_size <= room)
        wanted = np.where(fits, np.minimum(rows["num_draft_tokens"], spec.num_drafts), 0).clip(0)
        drafts = Drafts.empty(wanted)
        chosen = np.flatnonzero(wanted)
        if len(chosen):
            last = np.cumsum(rows["num_feed"], dtype=np.int64)[chosen] - 1
            drafts.token_ids[chosen], drafts.confidence[chosen] = self._block_steps(len(chosen)).draft(
                rows[chosen], feed_token_ids[last].astype(np.int64), table[chosen], wanted[chosen], confident
            )
        return drafts

    def _context_steps(self, num_tokens: int) -> ContextSteps:
        if not self.can_record:
            return BlockModules(self.network, self.pool, self._cos_sin)
        rooms = (256,) if self._context is None else self._context.rooms
        if self._context is None or rooms != enlarged(rooms, (num_tokens,)):
            self._context = RecordedContext(
                self.network, self.pool, self._cos_sin, *enlarged(rooms, (num_tokens,))
            )
        return self._context

    def _block_steps(self, num_blocks: int) -> BlockSteps:
        if not self.can_record:
            return BlockModules(self.network, self.pool, self._cos_sin)
        rooms = (16,) if self._blocks is None else self._blocks.rooms
        if self._blocks is None or rooms != enlarged(rooms, (num_blocks,)):
            self._blocks = RecordedBlocks(
                self.network, self.pool, self._cos_sin, *enlarged(rooms, (num_blocks,))
            )
        return self._blocks


class BlockModules:
    """``ContextSteps`` and ``BlockSteps`` by the modules of the network."""

    def __init__(self, network: BlockNetwork, pool: KVPool, cos_sin: Tensor) -> None:
        self._network, self._pool, self._cos_sin = network, pool, cos_sin
        self._device = cos_sin.device

    def store(
        self,
        positions: NDArray[np.int64],
        table: NDArray[np.int32],
        row_of: NDArray[np.int64],
        hidden_states: Tensor,
    ) -> None:
        """See ``ContextSteps``."""
        batch = self._batch(positions, table[row_of], positions)
        attend = PagedAttend(self._pool, batch, self._cos_sin)
        store_context(self._network, hidden_states, batch.positions, attend)

    def draft(
        self,
        rows: NDArray[np.void],
        anchor_ids: NDArray[np.int64],
        table: NDArray[np.int32],
        wanted: NDArray[np.int64],
        confident: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See ``BlockSteps``."""
        size, network = self._network.spec.block_size, self._network
        anchors = rows["num_fed"].astype(np.int64) + rows["num_feed"]
        choice = Choice(network.vocab, rows, anchors, confident)
        positions = (anchors[:, None] + np.arange(size)).reshape(-1)
        batch = self._batch(positions, np.repeat(table, size, 0), np.repeat(anchors + size - 1, size))
        attend = PagedAttend(self._pool, batch, self._cos_sin)
        ids = self._to_device(anchor_ids)
        hidden = network.block_hidden(network.block_ids(ids).flatten(), batch.positions, attend)
        tokens, confidence = network.draft(
            hidden.unflatten(0, (-1, size)), ids, choice, self._to_device(wanted)
        )
        return tokens.cpu().numpy(), confidence.cpu().numpy()

    def _batch(
        self, positions: NDArray[np.int64], table: NDArray[np.int32], last: NDArray[np.int64]
    ) -> PackedBatch:
        """Tokens of which each is a row of its own.

        positions: [n]; table: [n, max_blocks]; last: [n] the last position that a token sees.
        """
        block, within = np.divmod(positions, self._pool.block_size)
        slots = (
            np.take_along_axis(table, block[:, None], 1)[:, 0].astype(np.int64) * self._pool.block_size
            + within
        )

        return PackedBatch(
            token_ids=self._to_device(np.zeros_like(positions)),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            query_start=self._to_device(np.arange(len(positions) + 1, dtype=np.int32)),
            context_lens=self._to_device(last.astype(np.int32)),
            block_table=self._to_device(np.ascontiguousarray(table)),
            logits_index=self._to_device(np.zeros(0, np.int64)),
        )

    def _to_device(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
