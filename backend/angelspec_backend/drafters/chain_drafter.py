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

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.choice import Drafts, choose_tokens
from angelspec_backend.drafters.packed import pack_network
from angelspec_backend.drafters.paged import PagedAttend, rotary_table
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.sampler import SamplingRows


class ChainDrafter:
    """Serves one MTP or EAGLE-3 network.

    Samples as the target does, with the same noise at each position, so that the two agree more often than
    independent samples would.
    """

    def __init__(
        self,
        network: ChainNetwork,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
        name: str = "",
        hidden_dtype: torch.dtype | None = None,
        quantization: str = "none",
    ) -> None:
        """Take over a network; its weights are repacked.

        num_blocks, block_size: as the target's KV pool has; max_context: longest sequence in tokens;
        name: the drafter's kind if empty; hidden_dtype: of the target's hidden states, that of the network if
        None; quantization: see ``pack_network``.

        Raises:
            MemoryError: the machine has no memory for the KV pool.
        """
        spec, shape = network.spec, network.spec.shape
        self.device, self.dtype = network.embed_tokens.device, network.embed_tokens.dtype
        self._hidden_dtype = hidden_dtype or self.dtype
        self.info = DrafterInfo(
            name or spec.kind,
            keeps_drafts=False,  # rows made of its own hidden states are computed again from the target's
            shares_blocks=True,
            tap_ids=spec.tap_ids,
            hidden_bytes=spec.target_hidden * self._hidden_dtype.itemsize,
            lookahead=0,  # rows of drafts lie where the target puts the drafts themselves
        )
        self.max_context = max_context
        self.network = pack_network(network.requires_grad_(False).eval(), quantization)
        layer = LayerSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        self.pool = KVPool.allocate([layer], num_blocks, block_size, self.dtype, self.device)
        self._cos_sin = rotary_table(max_context, shape.head_dim, shape.rope_theta, self.dtype, self.device)

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
    ) -> DraftOutput:
        """See ``Drafter.propose``."""
        return self.draft(rows, feed_token_ids, block_table, hidden_states).output()

    @torch.inference_mode()
    def draft(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
    ) -> Drafts:
        """Take the fed positions in, then draft for all rows that want some.

        rows: [num_rows] of ROW; feed_token_ids: [sum(num_feed)] the tokens behind the fed positions;
        block_table: [sum(num_blocks)]; hidden_states: the bytes of [sum(num_feed), num_taps, hidden].
        """
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
        for step in range(drafts.token_ids.shape[1]):
            active, more = wanted > step, wanted > step + 1
            ones = np.ones(np.count_nonzero(active), np.int64)
            params = SamplingRows.from_rows(rows[active], ones, newest[active] + 1 + step)
            tokens, confidence = choose_tokens(network.logits(state.output), params, network.vocab)
            drafts.token_ids[active, step] = tokens.cpu().numpy()
            drafts.confidence[active, step] = confidence.cpu().numpy()
            if more.any():
                batch["num_computed"], batch["num_tokens"], batch["sample"] = newest + step, 1, 1
                keep = torch.from_numpy(np.flatnonzero(more[active])).to(self.device)
                ids = drafts.token_ids[more, step]
                state = self._step(batch, more, ids, block_table, state.hidden[keep])
        return drafts

    def _received(self, hidden_states: NDArray[np.uint8]) -> Tensor:
        """The bytes of hidden states as a tensor.  -> [sum(num_feed), num_taps, target_hidden]"""
        spec = self.network.spec
        flat = torch.from_numpy(hidden_states if hidden_states.flags.writeable else hidden_states.copy())
        shape = (-1, len(spec.tap_ids), spec.target_hidden)
        return flat.view(self._hidden_dtype).view(shape).to(self.device, self.dtype)

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
