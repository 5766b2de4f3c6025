"""DFlash, DFlare, DFly and DSpark in serving: they follow the target's hidden states, then draft a block.

The context keys and values of position p lie at position p of the drafter's own pool, under the target's
block table.  A block writes its own behind them, at the anchor's position A to A + block_size - 1, and the
next feed overwrites them.  In a block every slot sees every other: each is a row of attention over the
context and the whole block, all of whose keys and values are stored before the first of them attends.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.choice import Drafts, choose_tokens
from angelspec_backend.drafters.network_drafter import NetworkDrafter
from angelspec_backend.drafters.packed_block import pack_block_network, store_context
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.engine.batch import PackedBatch, pad_block_table, ragged
from angelspec_backend.engine.sampler import SamplingRows


class BlockDrafter(NetworkDrafter[BlockNetwork]):
    """Serves one block drafter."""

    _pack = staticmethod(pack_block_network)

    @torch.inference_mode()
    def draft(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
        confident: bool = True,
    ) -> Drafts:
        """See ``NetworkDrafter.draft``.  A row without room for a whole block behind its anchor gets none."""
        table = pad_block_table(block_table, rows["num_blocks"])
        if len(feed_token_ids):
            self._feed(rows, table, hidden_states)
        spec = self.network.spec
        anchors = rows["num_fed"].astype(np.int64) + rows["num_feed"]  # [num_rows] their positions
        room = np.minimum(rows["num_blocks"] * self.pool.block_size, self.max_context + spec.block_size)
        fits = (rows["num_feed"] > 0) & (anchors + spec.block_size <= room)
        wanted = np.where(fits, np.minimum(rows["num_draft_tokens"], spec.num_drafts), 0).clip(0)
        drafts = Drafts.empty(wanted)
        chosen = np.flatnonzero(wanted)
        if len(chosen):
            last = np.cumsum(rows["num_feed"], dtype=np.int64)[chosen] - 1
            anchor_ids = torch.from_numpy(feed_token_ids[last].astype(np.int64)).to(self.device)
            hidden = self._block_hidden(anchor_ids, anchors[chosen], table[chosen])
            tokens, confidence = self.network.draft(
                hidden,
                anchor_ids,
                _Choice(self.network, rows[chosen], anchors[chosen], confident),
                torch.from_numpy(wanted[chosen]).to(self.device),
            )
            drafts.token_ids[chosen] = tokens.cpu().numpy()
            drafts.confidence[chosen] = confidence.cpu().numpy()
        return drafts

    def _feed(
        self, rows: NDArray[np.void], table: NDArray[np.int32], hidden_states: NDArray[np.uint8]
    ) -> None:
        """Store the context of the fed positions."""
        row_of, offset = ragged(rows["num_feed"])
        positions = rows["num_fed"].astype(np.int64)[row_of] + offset
        batch = self._batch(positions, table[row_of], positions)
        attend = PagedAttend(self.pool, batch, self._cos_sin)
        store_context(self.network, self._received(hidden_states), batch.positions, attend)

    def _block_hidden(
        self, anchor_ids: Tensor, anchors: NDArray[np.int64], table: NDArray[np.int32]
    ) -> Tensor:
        """The backbone over one block per row.

        anchor_ids, anchors (positions): [n]; table: [n, max_blocks] -> [n, block_size, hidden]
        """
        size = self.network.spec.block_size
        positions = (anchors[:, None] + np.arange(size)).reshape(-1)
        batch = self._batch(positions, np.repeat(table, size, 0), np.repeat(anchors + size - 1, size))
        attend = PagedAttend(self.pool, batch, self._cos_sin)
        ids = self.network.block_ids(anchor_ids).flatten()
        return self.network.block_hidden(ids, batch.positions, attend).unflatten(0, (-1, size))

    def _batch(
        self, positions: NDArray[np.int64], table: NDArray[np.int32], last: NDArray[np.int64]
    ) -> PackedBatch:
        """Tokens of which each is a row of its own.

        positions: [n]; table: [n, max_blocks]; last: [n] the last position that a token sees.
        """
        block, within = np.divmod(positions, self.pool.block_size)
        slots = (
            np.take_along_axis(table, block[:, None], 1)[:, 0].astype(np.int64) * self.pool.block_size
            + within
        )

        def to_device(array: NDArray) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        return PackedBatch(
            token_ids=to_device(np.zeros_like(positions)),
            positions=to_device(positions),
            slot_mapping=to_device(slots),
            query_start=to_device(np.arange(len(positions) + 1, dtype=np.int32)),
            context_lens=to_device(last.astype(np.int32)),
            block_table=to_device(np.ascontiguousarray(table)),
            logits_index=to_device(np.zeros(0, np.int64)),
        )


class _Choice:
    """Chooses tokens with the parameters and the noise of their rows; see ``Choose``."""

    def __init__(
        self, network: BlockNetwork, rows: NDArray[np.void], anchors: NDArray[np.int64], confident: bool
    ) -> None:
        """rows: [n] of ROW; anchors: [n] their positions; confident: see ``choose_tokens``"""
        self._vocab, self._confident = network.vocab, confident
        self._rows = SamplingRows.from_rows(rows, np.ones(len(rows), np.int64), anchors + 1)

    def __call__(self, logits: Tensor, block: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """logits: [m, draft_vocab]; block: [m]; index: [m] or one for all -> [m] twice"""
        rows = self._rows[block.cpu().numpy()]
        rows.position[:] += index if isinstance(index, int) else index.cpu().numpy()
        return choose_tokens(logits, rows, self._vocab, self._confident)
