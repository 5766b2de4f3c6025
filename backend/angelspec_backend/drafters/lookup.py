"""Lookup in front of a network drafter: a text that repeats itself is its own best draft, and a free one.

The last tokens of a row are looked up in the row itself, as the n-gram drafter does.  Whether what followed
them is proposed, or the network is asked, is learnt: a draft is taken from the source of whose drafts more
tokens have been accepted, where the network is one source and matches of n tokens are another one for each n.
A row whose draft was looked up does not run the network, which only takes in what it is fed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.draft_policy import Share
from angelspec_backend.core.messages import DraftOutput, split_rows
from angelspec_backend.core.params import MAX_DRAFT_TOKENS
from angelspec_backend.drafters.base import Drafter
from angelspec_backend.drafters.ngram import NgramIndex
from angelspec_backend.engine.batch import pad_block_table, ragged

NETWORK = 0
"""The source of the network's drafts; a source n > 0 is a match of n tokens."""

PRIOR, PRIOR_WEIGHT = 1.0, 2.0
"""Accepted tokens that are expected of a draft while nothing is known, and the drafts that this counts."""
OVERALL_WEIGHT = 4.0
"""Drafts that the record of all sequences counts beside a sequence's own."""
OVERALL_FADING, OWN_FADING = 0.99, 0.95
"""Factors per draft by which records fade."""
PROBE_INTERVAL = 64
"""Choices after which the source that seems worse is tried all the same: it may have become better."""


@dataclass
class Row:
    """What is known of the sequence in a slot."""

    index: NgramIndex
    accepted: list[Share]  # by source: tokens accepted per draft
    source: int = NETWORK  # of the draft that was proposed last
    draft: list[int] = field(default_factory=list)


class LookupDrafter:
    """Stands in front of a network drafter and looks like it to the loop.

    The tokens lie in the KV blocks, as the drafter's context does: a sequence that begins with cached blocks
    finds there what it can look up.
    """

    def __init__(
        self, drafter: Drafter, max_n: int, num_blocks: int, block_size: int, most: int = MAX_DRAFT_TOKENS
    ) -> None:
        """max_n: longest match that is looked up, in tokens; num_blocks, block_size: as the KV pools have;
        most: drafts to ask the network for, since those beyond what it was trained for are hardly right.
        """
        self.info = replace(drafter.info, looks_up=True)
        self._drafter, self._max_n, self._most = drafter, max_n, most
        self._tokens = np.zeros((num_blocks, block_size), np.int32)  # the token behind each position
        self._rows: dict[int, Row] = {}  # by slot
        self._overall = self._shares(OVERALL_FADING)
        self._num_choices = 0

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
    ) -> DraftOutput:
        """See ``Drafter.propose``."""
        known = self._feed(rows, feed_token_ids, block_table)
        lookup_only, wanted = rows["lookup_only"] == 1, rows["num_draft_tokens"].tolist()
        found = [
            self._look_up(row, count, alone)
            for row, count, alone in zip(known, wanted, lookup_only.tolist(), strict=True)
        ]
        asked = rows.copy()
        asked["num_draft_tokens"] = np.minimum(rows["num_draft_tokens"], self._most)
        asked["num_draft_tokens"][lookup_only | [len(draft) > 0 for draft in found]] = 0
        output = self._drafter.propose(asked, feed_token_ids, block_table, hidden_states)
        drafted = split_rows(output.token_ids, output.lens)
        for row, looked_up, by_network in zip(known, found, drafted, strict=True):
            row.draft = looked_up or by_network.tolist()
        lens = np.array([len(row.draft) for row in known], np.int32)
        return DraftOutput(np.array([token for row in known for token in row.draft], np.int32), lens)

    def _feed(
        self, rows: NDArray[np.void], feed_token_ids: NDArray[np.int32], block_table: NDArray[np.int32]
    ) -> list[Row]:
        """Take the fed tokens in, and what they say about the drafts before."""
        table = pad_block_table(block_table, rows["num_blocks"])
        known = [
            self._row(slot, fed, blocks)
            for slot, fed, blocks in zip(rows["slot"].tolist(), rows["num_fed"].tolist(), table, strict=True)
        ]
        for row, feed in zip(known, split_rows(feed_token_ids, rows["num_feed"]), strict=True):
            followed = feed.tolist()
            if row.draft:
                self._observe(row, followed)
            row.index.extend(followed)
        row_of, offset = ragged(rows["num_feed"])
        block, within = np.divmod(rows["num_fed"][row_of] + offset, self._tokens.shape[1])
        self._tokens[table[row_of, block], within] = feed_token_ids
        return known

    def _row(self, slot: int, num_fed: int, blocks: NDArray[np.int32]) -> Row:
        """The slot's row; a new one where another sequence has begun, which may have cached blocks."""
        row, block_size = self._rows.get(slot), self._tokens.shape[1]
        if row is not None and len(row.index) == num_fed and num_fed % block_size:
            return row  # cached blocks are whole
        token_ids = self._tokens[blocks[: -(-num_fed // block_size)]].ravel()[:num_fed].tolist()
        if row is None or not row.index.holds(token_ids):
            row = self._rows[slot] = Row(NgramIndex(1, self._max_n), self._shares(OWN_FADING))
            row.index.extend(token_ids)
        return row

    def _look_up(self, row: Row, count: int, alone: bool) -> list[int]:
        """A draft of so many tokens, or none.  alone: the network is not to be asked"""
        draft, size = row.index.continuation(count) if count > 0 else ([], 0)
        row.source = size if draft and (alone or self._prefers(row, size)) else NETWORK
        return draft if row.source else []

    def _prefers(self, row: Row, size: int) -> bool:
        """Whether a match of so many tokens is to be tried, and not the network."""
        self._num_choices += 1
        better = self._expected(row, size) >= self._expected(row, NETWORK)
        return better != (self._num_choices % PROBE_INTERVAL == 0)

    def _expected(self, row: Row, source: int) -> float:
        overall = self._overall[source].estimate(PRIOR, PRIOR_WEIGHT)
        return row.accepted[source].estimate(overall, OVERALL_WEIGHT)

    def _observe(self, row: Row, followed: list[int]) -> None:
        agrees = [a == b for a, b in zip(row.draft, followed, strict=False)]
        num_accepted = agrees.index(False) if False in agrees else len(agrees)
        for shares in (row.accepted, self._overall):
            shares[row.source].observe(num_accepted, 1)

    def _shares(self, fading: float) -> list[Share]:
        return [Share(fading) for _ in range(self._max_n + 1)]
