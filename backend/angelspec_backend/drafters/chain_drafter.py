"""MTP and EAGLE-3 in serving: they follow the target's hidden states, then draft token after token.

Row j (the hidden states of position j, the token at j + 1) keeps its keys and values at position j of the
drafter's own pool.  The rows of drafts are written behind them and overwritten by the next feed, which brings
the target's true hidden states.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.choice import Drafts, choose_tokens
from angelspec_backend.drafters.network_drafter import NetworkDrafter
from angelspec_backend.drafters.packed import pack_network
from angelspec_backend.drafters.paged import PagedAttend
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.sampler import SamplingRows


class ChainDrafter(NetworkDrafter[ChainNetwork]):
    """Serves one MTP or EAGLE-3 network."""

    _pack = staticmethod(pack_network)

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
        batch = rows.copy()
        batch["num_computed"], batch["num_tokens"] = rows["num_fed"], rows["num_feed"]
        batch["sample"] = wanted > 0
        network = self.network
        features = network.features(self._received(hidden_states))
        state = self._step(batch, fed, feed_token_ids, block_table, features)
        active = wanted > 0
        for step in range(drafts.token_ids.shape[1]):
            ones = np.ones(np.count_nonzero(active), np.int64)
            params = SamplingRows.from_rows(rows[active], ones, newest[active] + 1 + step)
            tokens, confidence = choose_tokens(network.logits(state.output), params, network.vocab, confident)
            more = drafts.add(step, active, tokens, confidence, rows["min_chance"])
            if not more.any():
                break
            batch["num_computed"], batch["num_tokens"], batch["sample"] = newest + step, 1, 1
            keep = torch.from_numpy(np.flatnonzero(more[active])).to(self.device)
            state = self._step(batch, more, drafts.token_ids[more, step], block_table, state.hidden[keep])
            active = more
        return drafts

    def _step(
        self,
        rows: NDArray[np.void],
        which: NDArray[np.bool_],
        token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden: Tensor,
    ) -> ChainState:
        """One step for some of the rows.

        token_ids: [sum(num_tokens)]; hidden: [sum(num_tokens), hidden].
        Returns states at the last token of each row that samples, [num_sampling, hidden].
        """
        table = block_table[np.repeat(which, rows["num_blocks"])]
        chosen = rows[which]
        none = DraftOutput.empty(len(chosen))
        batch = pack(chosen, token_ids, none, table, self.pool.block_size, self.device)
        missing = batch.token_ids.shape[0] - hidden.shape[0]
        if missing:  # dummies
            hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
        network, attend = self.network, PagedAttend(self.pool, batch, self._cos_sin)
        embeddings = network.embed(batch.token_ids, batch.positions)
        state = network.step(attend, embeddings, hidden, batch.positions)
        return ChainState(state.hidden[batch.logits_index], state.output[batch.logits_index])
