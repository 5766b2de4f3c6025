"""MTP and EAGLE-3 in serving: they follow the target's hidden states, then draft token after token.

Row j (the hidden states of position j, the token at j + 1) keeps its keys and values at position j of the
drafter's own pool.  The rows of drafts are written behind them and overwritten by the next feed, which brings
the target's true hidden states.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.choice import Drafts, Likeliest, choose
from angelspec_backend.drafters.network_drafter import NetworkDrafter, room_for
from angelspec_backend.drafters.packed import pack_network
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.drafters.recorded_chain import RecordedChain
from angelspec_backend.engine.batch import pack, pad_block_table
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.sampler import SamplingRows


class ChainSteps(Protocol):
    """The steps of one draft."""

    def feed(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden_states: Tensor,
        drafting: NDArray[np.int64],
    ) -> Likeliest:
        """Take the fed positions in: what may follow the last token of the rows ``drafting``.

        rows: [n] of ROW, all fed; token_ids: [sum(num_feed)]; table: [n, max_blocks];
        hidden_states: [sum(num_feed), num_taps, target_hidden].
        """
        ...

    def go_on(self, token_ids: NDArray[np.int32], keep: NDArray[np.int64]) -> Likeliest:
        """What may follow one more token.

        keep: [n] indices of the rows that go on, among those of the step before; token_ids: [n] behind them.
        """
        ...


class ChainDrafter(NetworkDrafter[ChainNetwork]):
    """Serves one MTP or EAGLE-3 network."""

    _pack = staticmethod(pack_network)
    _recorded: RecordedChain | None = None

    @torch.inference_mode()
    def draft(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
        confident: bool = True,
    ) -> Drafts:
        """See ``NetworkDrafter.draft``."""
        newest = rows["num_fed"].astype(np.int64) + rows["num_feed"]  # [num_rows] position of the anchor
        fed = rows["num_feed"] > 0
        wanted = np.where(fed, np.minimum(rows["num_draft_tokens"], self.max_context - 1 - newest), 0).clip(0)
        drafts = Drafts.empty(wanted)
        if not fed.any():
            return drafts
        active = np.flatnonzero(wanted)
        drafting = (np.cumsum(fed) - 1)[active]  # among the rows that are fed
        steps = self._steps(len(feed_token_ids), int(fed.sum()), confident)
        table = pad_block_table(block_table, rows["num_blocks"])[fed]
        likeliest = steps.feed(rows[fed], feed_token_ids, table, self._received(hidden_states), drafting)
        for step in range(drafts.token_ids.shape[1]):
            params = None
            if (rows["temperature"] > 0).any():
                ones = np.ones(len(active), np.int64)
                params = SamplingRows.from_rows(rows[active], ones, newest[active] + 1 + step)
            tokens, confidence = choose(likeliest, params, self.network.vocab)
            drafts.token_ids[active, step] = tokens.cpu().numpy()
            drafts.confidence[active, step] = confidence.cpu().numpy()
            keep = np.flatnonzero(wanted[active] > step + 1)
            if len(keep):
                active = active[keep]
                likeliest = steps.go_on(drafts.token_ids[active, step], keep)
        return drafts

    def _steps(self, num_tokens: int, num_rows: int, confident: bool) -> ChainSteps:
        """What computes a draft: one native call a step where that is possible, else module by module."""
        network, pool = self.network, self.pool
        if not self.can_record:
            return ChainModules(network, pool, self._cos_sin, confident)
        recorded = self._recorded
        if recorded is None or num_tokens > recorded.tokens.room or num_rows > recorded.rows.room:
            rooms = room_for(num_tokens), room_for(num_rows)
            recorded = self._recorded = RecordedChain(network, pool, self._cos_sin, *rooms)
        return recorded


class ChainModules:
    """``ChainSteps`` by the modules of the network."""

    def __init__(self, network: ChainNetwork, pool: KVPool, cos_sin: Tensor, confident: bool) -> None:
        self._network, self._pool, self._cos_sin, self._confident = network, pool, cos_sin, confident

    def feed(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden_states: Tensor,
        drafting: NDArray[np.int64],
    ) -> Likeliest:
        """See ``ChainSteps``."""
        batch = rows.copy()
        batch["num_computed"], batch["num_tokens"], batch["num_blocks"] = (
            rows["num_fed"],
            rows["num_feed"],
            table.shape[1],
        )
        batch["sample"] = 0
        batch["sample"][drafting] = 1
        self._state = self._step(batch, token_ids, table, self._network.features(hidden_states))
        batch["num_computed"] += batch["num_tokens"]
        batch["num_tokens"] = 1
        self._rows, self._table = batch[drafting], table[drafting]
        return self._likeliest()

    def go_on(self, token_ids: NDArray[np.int32], keep: NDArray[np.int64]) -> Likeliest:
        """See ``ChainSteps``."""
        rows, self._table = self._rows[keep], self._table[keep]
        hidden = self._state.hidden[torch.from_numpy(keep).to(self._state.hidden.device)]
        self._state = self._step(rows, token_ids, self._table, hidden)
        rows["num_computed"] += 1
        self._rows = rows
        return self._likeliest()

    def _likeliest(self) -> Likeliest:
        return Likeliest.of(self._network.logits(self._state.output), self._confident)

    def _step(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden: Tensor,
    ) -> ChainState:
        """One step.  rows: [n] of ROW; token_ids: [sum(num_tokens)]; hidden: [sum(num_tokens), hidden].

        Returns states at the last token of each row that samples, [num_sampling, hidden].
        """
        none = DraftOutput.empty(len(rows))
        batch = pack(rows, token_ids, none, table.ravel(), self._pool.block_size, hidden.device)
        missing = batch.token_ids.shape[0] - hidden.shape[0]
        if missing:  # dummies
            hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
        network, attend = self._network, PagedAttend(self._pool, batch, self._cos_sin)
        embeddings = network.embed(batch.token_ids, batch.positions)
        state = network.step(attend, embeddings, hidden, batch.positions)
        return ChainState(state.hidden[batch.logits_index], state.output[batch.logits_index])
