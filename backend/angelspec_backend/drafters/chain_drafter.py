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

from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.choice import Choice, Drafts
from angelspec_backend.drafters.network_drafter import NetworkDrafter
from angelspec_backend.drafters.packed import pack_network
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.drafters.recorded import enlarged
from angelspec_backend.drafters.recorded_chain import RecordedChain
from angelspec_backend.engine.batch import pack, pad_block_table
from angelspec_backend.engine.kv_pool import KVPool


class ChainSteps(Protocol):
    """What computes drafts."""

    def draft(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden_states: Tensor,
        wanted: NDArray[np.int64],
        confident: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Take the fed positions in, then draft.

        rows: [n] of ROW, all fed; token_ids: [sum(num_feed)]; table: [n, max_blocks];
        hidden_states: [sum(num_feed), num_taps, target_hidden]; wanted: [n] drafts of each;
        confident: see ``choose_tokens``.
        Returns the drafts and their confidences, [n, max(wanted)] each.
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
        hidden_states: States,
        confident: bool = True,
    ) -> Drafts:
        """See ``NetworkDrafter.draft``."""
        newest = rows["num_fed"].astype(np.int64) + rows["num_feed"]  # [num_rows] position of the anchor
        fed = rows["num_feed"] > 0
        wanted = np.where(fed, np.minimum(rows["num_draft_tokens"], self.max_context - 1 - newest), 0).clip(0)
        drafts = Drafts.empty(wanted)
        if fed.any():
            table = pad_block_table(block_table, rows["num_blocks"])[fed]
            steps = self._steps(len(feed_token_ids), len(table), drafts.token_ids.shape[1])
            drafts.token_ids[fed], drafts.confidence[fed] = steps.draft(
                rows[fed], feed_token_ids, table, self._received(hidden_states), wanted[fed], confident
            )
        return drafts

    def _steps(self, num_tokens: int, num_rows: int, num_drafts: int) -> ChainSteps:
        """By a recorded program where that is possible, else module by module."""
        if not self.can_record:
            return ChainModules(self.network, self.pool, self._cos_sin)
        needed = num_tokens, num_rows, num_drafts
        rooms = (256, 64, 4) if self._recorded is None else self._recorded.rooms
        if self._recorded is None or rooms != enlarged(rooms, needed):
            self._recorded = RecordedChain(self.network, self.pool, self._cos_sin, *enlarged(rooms, needed))
        return self._recorded


class ChainModules:
    """``ChainSteps`` by the modules of the network."""

    def __init__(self, network: ChainNetwork, pool: KVPool, cos_sin: Tensor) -> None:
        self._network, self._pool, self._cos_sin = network, pool, cos_sin

    def draft(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden_states: Tensor,
        wanted: NDArray[np.int64],
        confident: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See ``ChainSteps``."""
        network, shape = self._network, (len(rows), int(wanted.max()))
        tokens, confidence = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        newest = rows["num_fed"].astype(np.int64) + rows["num_feed"]
        choice = Choice(network.vocab, rows, newest, confident)
        batch = rows.copy()
        batch["num_computed"], batch["num_tokens"] = rows["num_fed"], rows["num_feed"]
        batch["num_blocks"], batch["sample"] = table.shape[1], wanted > 0
        state = self._step(batch, token_ids, table, network.features(hidden_states))
        active = np.flatnonzero(wanted)
        for step in range(shape[1]):
            index = torch.from_numpy(active)
            found = choice(network.logits(state.output), index, step)
            tokens[active, step], confidence[active, step] = (each.cpu().numpy() for each in found)
            likely = confidence[active, : step + 1].prod(1) >= choice.min_chance[active]
            keep = np.flatnonzero((wanted[active] > step + 1) & likely)
            if not len(keep):
                break
            active = active[keep]
            batch["num_computed"], batch["num_tokens"] = newest + step, 1
            hidden = state.hidden[torch.from_numpy(keep).to(state.hidden.device)]
            ids = tokens[active, step].astype(np.int32)
            state = self._step(batch[active], ids, table[active], hidden)
        return tokens, confidence

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
