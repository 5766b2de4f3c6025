"""MTP and EAGLE-3 in serving as recorded programs: a step is one native call.

Of a layer's output only the last token of each row that drafts is read, so the tokens that are fed otherwise
only leave their keys and values behind.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.choice import Likeliest
from angelspec_backend.drafters.eagle3 import Eagle3
from angelspec_backend.drafters.mtp import MTP
from angelspec_backend.drafters.packed import PackedAttention
from angelspec_backend.drafters.recorded import (
    Queries,
    Tokens,
    norm_of,
    record_keys,
    record_output,
)
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.program import Program


class RecordedChain:
    """``ChainSteps`` of one network, with room for so many tokens and rows."""

    def __init__(
        self, network: ChainNetwork, pool: KVPool, cos_sin: Tensor, num_tokens: int, num_rows: int
    ) -> None:
        spec, self._pool, self._network = network.spec, pool, network
        self.tokens, self.rows = Tokens(max(num_tokens, num_rows)), Queries(num_rows)
        self._ids, self._source = self.tokens.numbers(), self.tokens.numbers()
        self._last = self.rows.numbers()  # the token that each row drafts behind
        self._received = self.tokens.tensor(len(spec.tap_ids) * spec.target_hidden)
        # What is fed beside tokens: features of the target, later what the rows of the step before put out.
        self._fed = self.tokens.tensor(spec.shape.hidden)
        self._program = program = Program()
        if isinstance(network, Eagle3):
            self._eagle3_features(network)
            self._step = len(program)
            output = self._eagle3_step(network, cos_sin)
        else:
            mtp = cast(MTP, network)
            self._mtp_features(mtp)
            self._step = len(program)
            output = self._mtp_step(mtp, cos_sin)
        self._logits = program.linear(self.rows, cast(PackedLinear, network.lm_head), output)
        self._draft_ids, self._probability = program.argmax(self.rows, self._logits)
        self._table = np.zeros((0, 0), np.int32)

    def feed(
        self,
        rows: NDArray[np.void],
        token_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        hidden_states: Tensor,
        drafting: NDArray[np.int64],
    ) -> Likeliest:
        """See ``ChainSteps``."""
        row_of, offset = ragged(rows["num_feed"])
        count = len(token_ids)
        self._received[:count] = hidden_states.flatten(1)
        self._source[:count] = np.arange(count)
        self.tokens.place(rows["num_fed"][row_of] + offset, table, row_of, self._pool.block_size)
        self._last[: len(drafting)] = np.cumsum(rows["num_feed"])[drafting] - 1
        self._table = table[drafting]
        newest = rows["num_fed"] + rows["num_feed"] - 1
        return self._run(0, token_ids, newest[drafting])

    def go_on(self, token_ids: NDArray[np.int32], keep: NDArray[np.int64]) -> Likeliest:
        """See ``ChainSteps``."""
        count = len(keep)
        positions = self.rows.seen[keep] + np.int64(1)
        self._table = self._table[keep]
        self._source[:count] = keep
        self._last[:count] = index = np.arange(count)
        self.tokens.place(positions, self._table, index, self._pool.block_size)
        return self._run(self._step, token_ids, positions)

    def _run(self, begin: int, token_ids: NDArray[np.int32], seen: NDArray[np.integer]) -> Likeliest:
        self._ids[: len(token_ids)] = token_ids
        self.rows.ask(np.ones(len(seen), np.int32), seen, self._table)
        self._program.run(begin)
        count = len(seen)
        return Likeliest(self._logits[:count], self._draft_ids[:count], self._probability[:count])

    def _mtp_features(self, network: MTP) -> None:
        norm = norm_of(network.target_norm) if network.spec.postnorm_input else None
        self._program.rows(self.tokens, self._received, self._fed, norm=norm)

    def _mtp_step(self, network: MTP, cos_sin: Tensor) -> Tensor:
        """-> what the head reads of each row"""
        program, tokens, rows, hidden = self._program, self.tokens, self.rows, network.spec.shape.hidden
        both, normed = tokens.tensor(2 * hidden), tokens.tensor(hidden)
        program.rows(
            tokens,
            network.embed_tokens,
            both[:, :hidden],
            norm=norm_of(network.enorm),
            index=self._ids,
            nonzero=tokens.positions,  # as MTP.embed
        )
        program.rows(tokens, self._fed, both[:, hidden:], norm=norm_of(network.hnorm), index=self._source)
        x = program.linear(tokens, cast(PackedLinear, network.eh_proj), both)
        program.rows(tokens, x, normed, norm=norm_of(network.midlayer.input_layernorm))
        delta, residual = self._record_layer(network, cos_sin, normed, x)
        program.rows(rows, delta, self._fed, norm=norm_of(network.final_layernorm), residual=residual)
        return self._fed

    def _eagle3_features(self, network: Eagle3) -> None:
        program, tokens, spec, received = self._program, self.tokens, network.spec, self._received
        if spec.fc_norm:
            normed = torch.empty_like(received)
            for index, norm in enumerate(network.fc_norm):
                chunk = slice(index * spec.target_hidden, (index + 1) * spec.target_hidden)
                program.rows(tokens, received[:, chunk], normed[:, chunk], norm=norm_of(norm))
            received = normed
        if spec.norm_before_fc:
            normed = torch.empty_like(received)
            program.rows(tokens, received, normed, norm=norm_of(network.input_norm))
            received = normed
        features = program.linear(tokens, cast(PackedLinear, network.fc), received)
        program.rows(tokens, features, self._fed)

    def _eagle3_step(self, network: Eagle3, cos_sin: Tensor) -> Tensor:
        """-> what the head reads of each row"""
        program, tokens, rows, spec = self._program, self.tokens, self.rows, network.spec
        hidden, layer = spec.shape.hidden, network.midlayer
        both, x = tokens.tensor(2 * hidden), tokens.tensor(hidden)
        input_norm, hidden_norm = norm_of(layer.input_layernorm), norm_of(layer.hidden_norm)
        program.rows(tokens, network.embed_tokens, both[:, :hidden], norm=input_norm, index=self._ids)
        program.rows(tokens, self._fed, x, index=self._source)
        program.rows(tokens, x, both[:, hidden:], norm=hidden_norm)
        delta, residual = self._record_layer(
            network, cos_sin, both, both[:, hidden:] if spec.norm_before_residual else x
        )
        output = rows.tensor(hidden)
        program.rows(rows, delta, output, norm=norm_of(network.norm), residual=residual)
        program.rows(rows, output if spec.norm_output else residual, self._fed)
        return output

    def _record_layer(
        self, network: MTP | Eagle3, cos_sin: Tensor, x: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: what attention reads of each token; before: the residual stream of each token
        -> the MLP's output and the residual stream, of each row"""
        program, rows, layer = self._program, self.rows, network.midlayer
        attention = cast(PackedAttention, layer.self_attn)
        qkv = record_keys(program, self.tokens, self._pool, cos_sin, 0, attention, attention.qkv, x)
        query = rows.tensor(attention.num_heads * attention.head_dim)
        residual = rows.tensor(network.spec.shape.hidden)
        program.rows(rows, qkv[:, : query.shape[1]], query, index=self._last)
        program.rows(rows, before, residual, index=self._last)
        attended = rows.attend(program, self._pool, 0, attention, query)
        return record_output(program, rows, layer, attended, residual), residual
