"""MTP and EAGLE-3 in serving as recorded programs.

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
from angelspec_backend.drafters.choice import Choice
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
from angelspec_backend.drafters.recorded_steps import DraftSteps
from angelspec_backend.engine.batch import ragged
from angelspec_backend.engine.kv_pool import KVPool
from angelspec_backend.engine.linear import PackedLinear
from angelspec_backend.engine.program import Program


class RecordedChain:
    """``ChainSteps`` of one network, with room for so many tokens, rows and drafts."""

    def __init__(
        self,
        network: ChainNetwork,
        pool: KVPool,
        cos_sin: Tensor,
        num_tokens: int,
        num_rows: int,
        num_drafts: int,
    ) -> None:
        spec, self._pool, self._cos_sin, self._network = network.spec, pool, cos_sin, network
        self.rooms = num_tokens, num_rows, num_drafts
        self._program = Program()
        self._steps = DraftSteps(self._program, num_rows, network.vocab)
        self._tokens, self._rows = [Tokens(num_tokens)], [Queries(num_rows)]
        self._ids = self._tokens[0].numbers()
        self._last = self._rows[0].numbers()  # the token that each row drafts behind
        self._received = self._tokens[0].tensor(len(spec.tap_ids) * spec.target_hidden)
        features = self._eagle3_features if isinstance(network, Eagle3) else self._mtp_features
        hidden = self._record_step(self._ids, features(), self._last)
        for _ in range(1, num_drafts):
            self._tokens.append(Tokens(num_rows))
            self._rows.append(Queries(num_rows, self._tokens[-1]))
            self._steps.begin(self._rows[-1])
            hidden = self._record_step(self._steps.last_token_ids, hidden, None)

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
        row_of, offset = ragged(rows["num_feed"])
        count, size = len(token_ids), self._pool.block_size
        self._received[:count] = hidden_states.flatten(1)
        self._ids[:count] = token_ids
        self._tokens[0].place(rows["num_fed"][row_of] + offset, table, row_of, size)
        order = np.argsort(-wanted, kind="stable")[: np.count_nonzero(wanted)]
        shape = len(rows), int(wanted.max())
        tokens, confidence = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        if not len(order):
            self._rows[0].count = 0
            self._program.run(0, self._steps.steps[0].end)
            return tokens, confidence
        self._last[: len(order)] = (np.cumsum(rows["num_feed"]) - 1)[order]
        newest, table = (rows["num_fed"] + rows["num_feed"]).astype(np.int64)[order], table[order]
        self._rows[0].ask(newest - 1, table)
        each = np.arange(len(order))
        for step in range(1, shape[1]):
            count = np.count_nonzero(wanted > step)  # the others may have no block there
            positions = newest[:count] + (step - 1)
            self._tokens[step].place(positions, table, each[:count], size)
            self._rows[step].ask(positions, table[:count])
        choice = Choice(self._network.vocab, rows[order], newest, confident)
        tokens[order], confidence[order] = self._steps.run(wanted[order], choice)
        return tokens, confidence

    def _record_step(self, ids: NDArray[np.int64], hidden: Tensor, last: NDArray[np.int64] | None) -> Tensor:
        """One step of the newest tokens and rows.

        ids: [num_tokens]; hidden: [num_tokens, hidden] features, or what the step before returned;
        last: see ``_record_layer``.  -> [num_rows, hidden] what the next step is fed
        """
        record = self._eagle3_step if isinstance(self._network, Eagle3) else self._mtp_step
        output, feedback = record(ids, hidden, last)
        head = cast(PackedLinear, self._network.lm_head)
        self._steps.end(self._rows[-1], self._program.linear(self._rows[-1], head, output))
        return feedback

    def _mtp_features(self) -> Tensor:
        network = cast(MTP, self._network)
        if not network.spec.postnorm_input:
            return self._received
        features = torch.empty_like(self._received)
        self._program.rows(self._tokens[0], self._received, features, norm=norm_of(network.target_norm))
        return features

    def _mtp_step(
        self, ids: NDArray[np.int64], fed: Tensor, last: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor]:
        """-> what the head reads of each row, and what the next step is fed"""
        network, program = cast(MTP, self._network), self._program
        tokens, rows = self._tokens[-1], self._rows[-1]
        hidden = network.spec.shape.hidden
        both, normed, output = tokens.tensor(2 * hidden), tokens.tensor(hidden), rows.tensor(hidden)
        nonzero = tokens.positions  # as MTP.embed
        embedded, given = norm_of(network.enorm), norm_of(network.hnorm)
        program.rows(
            tokens, network.embed_tokens, both[:, :hidden], norm=embedded, index=ids, nonzero=nonzero
        )
        program.rows(tokens, fed, both[:, hidden:], norm=given)
        x = program.linear(tokens, cast(PackedLinear, network.eh_proj), both)
        program.rows(tokens, x, normed, norm=norm_of(network.midlayer.input_layernorm))
        delta, residual = self._record_layer(network, normed, x, last)
        program.rows(rows, delta, output, norm=norm_of(network.final_layernorm), residual=residual)
        return output, output

    def _eagle3_features(self) -> Tensor:
        network = cast(Eagle3, self._network)
        program, tokens, spec, received = self._program, self._tokens[0], network.spec, self._received
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
        return program.linear(tokens, cast(PackedLinear, network.fc), received)

    def _eagle3_step(
        self, ids: NDArray[np.int64], fed: Tensor, last: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor]:
        """-> what the head reads of each row, and what the next step is fed"""
        network, program = cast(Eagle3, self._network), self._program
        tokens, rows = self._tokens[-1], self._rows[-1]
        spec, layer, hidden = network.spec, network.midlayer, network.spec.shape.hidden
        both, output = tokens.tensor(2 * hidden), rows.tensor(hidden)
        embedded, given = norm_of(layer.input_layernorm), norm_of(layer.hidden_norm)
        program.rows(tokens, network.embed_tokens, both[:, :hidden], norm=embedded, index=ids)
        program.rows(tokens, fed, both[:, hidden:], norm=given)
        before = both[:, hidden:] if spec.norm_before_residual else fed
        delta, residual = self._record_layer(network, both, before, last)
        program.rows(rows, delta, output, norm=norm_of(network.norm), residual=residual)
        return output, output if spec.norm_output else residual

    def _record_layer(
        self, network: MTP | Eagle3, x: Tensor, before: Tensor, last: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor]:
        """x, before: [num_tokens, ...] what attention reads, and the residual stream; last: [num_rows] the
        token each row goes on from, None: its own -> the MLP's output and the residual stream, of each row"""
        program, rows, layer = self._program, self._rows[-1], network.midlayer
        attention = cast(PackedAttention, layer.self_attn)
        query = record_keys(
            program, self._tokens[-1], self._pool, self._cos_sin, 0, attention, attention.qkv, x
        )
        if last is not None:
            chosen = rows.tensor(attention.num_heads * attention.head_dim)
            program.rows(rows, query[:, : chosen.shape[1]], chosen, index=last)
            query = chosen
        residual = rows.tensor(network.spec.shape.hidden)
        program.rows(rows, before, residual, index=last)
        attended = rows.attend(program, self._pool, 0, attention, query)
        return record_output(program, rows, layer, attended, residual), residual
