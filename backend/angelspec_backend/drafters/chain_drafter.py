"""MTP and EAGLE-3 in serving: they follow the target's hidden states, then draft token after token.

Row j (the hidden states of position j, the token at j + 1) keeps its keys and values at position j of the
drafter's own pool.  The rows of drafts are written behind them and overwritten by the next feed, which brings
the target's true hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.chain import ChainNetwork, ChainState
from angelspec_backend.drafters.packed import pack_network
from angelspec_backend.drafters.paged import PagedAttend, rotary_table
from angelspec_backend.engine.batch import pack
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.sampler import SamplingRows, sample


@dataclass(frozen=True)
class Drafts:
    """What was drafted for some rows, and how sure the drafter is."""

    token_ids: NDArray[np.int32]  # [num_rows, width]
    confidence: NDArray[np.float32]  # [num_rows, width] probability the drafter itself gives each draft
    lens: NDArray[np.int32]  # [num_rows] drafts of each row, the rest is zero


class ChainDrafter:
    """Serves one MTP or EAGLE-3 network.

    Samples as the target does, with the same noise at each position, so that the two agree more often than
    independent samples would.
    """

    keeps_drafts = False  # what it computed from its own hidden states is computed again from the target's
    shares_blocks = True
    lookahead = 0  # rows of drafts lie where the target puts the drafts themselves

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
        self.name = name or spec.kind
        self.tap_ids = spec.tap_ids
        self.max_context = max_context
        self.network = pack_network(network.requires_grad_(False).eval(), quantization)
        layer = LayerSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        self.pool = KVPool.allocate([layer], num_blocks, block_size, self.dtype, self.device)
        self._hidden_dtype = hidden_dtype or self.dtype
        self._cos_sin = rotary_table(max_context, shape.head_dim, shape.rope_theta, self.dtype, self.device)

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
    ) -> DraftOutput:
        """See ``Drafter.propose``."""
        drafts = self.draft(rows, feed_token_ids, block_table, hidden_states)
        inside = np.arange(drafts.token_ids.shape[1]) < drafts.lens[:, None]
        return DraftOutput(drafts.token_ids[inside], drafts.lens)

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
        width = int(wanted.max(initial=0))
        drafts = Drafts(
            np.zeros((len(rows), width), np.int32),
            np.zeros((len(rows), width), np.float32),
            wanted.astype(np.int32),
        )
        if not fed.any():
            return drafts
        batch = rows.copy()
        batch["num_computed"], batch["num_tokens"] = rows["num_fed"], rows["num_feed"]
        batch["sample"] = wanted > 0
        features = self.network.features(self._received(hidden_states))
        state = self._step(batch, fed, feed_token_ids, block_table, features)
        for step in range(width):
            active, more = wanted > step, wanted > step + 1
            tokens, confidence = self._choose(rows[active], newest[active] + 1 + step, state.output)
            drafts.token_ids[active, step], drafts.confidence[active, step] = tokens, confidence
            if more.any():
                batch["num_computed"], batch["num_tokens"], batch["sample"] = newest + step, 1, 1
                keep = torch.from_numpy(np.flatnonzero(more[active])).to(self.device)
                tokens = drafts.token_ids[more, step]
                state = self._step(batch, more, tokens, block_table, state.hidden[keep])
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

    def _choose(
        self, rows: NDArray[np.void], positions: NDArray[np.int64], output: Tensor
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The next draft of each row, and its probability.

        rows: [n] of ROW; positions: [n] of the drafts; output: [n, hidden].
        """
        logits = self.network.logits(output)  # [n, draft vocabulary]
        chosen = logits.argmax(-1)
        sampling = np.flatnonzero(rows["temperature"] > 0)
        tokens = self.network.to_target(chosen).cpu().numpy().astype(np.int32)
        if len(sampling):
            ones = np.ones(len(sampling), np.int64)
            params = SamplingRows.from_rows(rows[sampling], ones, positions[sampling])
            index = torch.from_numpy(sampling).to(self.device)
            vocab, part = self.network.vocab, logits[index]
            tokens[sampling] = sample(part if vocab is None else vocab.spread(part), params)
            sampled = torch.from_numpy(tokens[sampling]).long().to(self.device)
            chosen[index] = sampled if vocab is None else vocab.draft_ids[sampled]
        picked = logits.gather(1, chosen[:, None])[:, 0].float()
        confidence = (picked - logits.float().logsumexp(-1)).exp()
        return tokens, confidence.cpu().numpy()
