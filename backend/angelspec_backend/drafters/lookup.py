"""Lookup in front of a network drafter: a text that repeats itself is its own best draft, and a free one.

The last tokens of a row are looked up in the row itself, as the n-gram drafter does.  What followed them is
proposed where more of it is expected to be accepted than has been of the network's drafts, else the network
is asked.  A row whose draft was looked up does not run the network, which only takes in what it is fed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.draft_records import Share
from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.messages import DraftOutput, split_rows
from angelspec_backend.core.params import MAX_DRAFT_TOKENS
from angelspec_backend.drafters.base import Drafter
from angelspec_backend.drafters.matches import Matches, Text
from angelspec_backend.engine.batch import pad_block_table, ragged

PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""Accepted tokens that are expected of the network while nothing is known, and the drafts this counts."""
OVERALL_WEIGHT = 4.0
"""Drafts that the record of all sequences counts beside a sequence's own."""
OVERALL_FADING, OWN_FADING = 0.99, 0.95
"""Factors per draft by which records fade."""
PROBE_INTERVAL = 64
"""Choices after which what seems worse is tried all the same: the network may have become better."""

NO_DRAFTS = DraftOutput.empty(0)


@dataclass
class Row:
    """What is known of the sequence in a slot."""

    text: Text
    accepted: Share  # tokens accepted per draft of the network
    asked: bool = False  # whether the network was for the last draft
    draft: list[int] = field(default_factory=list)  # what it drafted


class LookupDrafter:
    """Stands in front of a network drafter and looks like it to the loop.

    The tokens lie in the KV blocks, as the drafter's context does: a sequence that begins with cached blocks
    finds there what it can look up.
    """

    def __init__(
        self, drafter: Drafter, max_n: int, num_blocks: int, block_size: int, most: int = MAX_DRAFT_TOKENS
    ) -> None:
        """max_n: longest match that is looked up, in tokens; num_blocks, block_size: as the KV pools have;
        most: drafts to ask the network for, since those far beyond what it was trained for are hardly right.
        """
        self.info = replace(drafter.info, looks_up=True)
        self._drafter, self._max_n, self._most = drafter, max_n, most
        self._tokens = np.zeros((num_blocks, block_size), np.int32)  # the token behind each position
        self._rows: dict[int, Row] = {}  # by slot
        self._matches, self._accepted = Matches(), Share(OVERALL_FADING)  # of all sequences
        self._num_choices = 0

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """See ``Drafter.propose``."""
        known = self._feed(rows, feed_token_ids, block_table)
        names = ["num_draft_tokens", "min_chance", "lookup_only"]
        drafts = [
            self._look_up(row, *wanted) for row, wanted in zip(known, rows[names].tolist(), strict=True)
        ]
        looked_up = np.array([len(draft) > 0 for draft in drafts], bool)
        fed = rows["lookup_only"] == 0
        asked = rows[fed]
        asked["num_draft_tokens"] = np.minimum(asked["num_draft_tokens"], self._most)
        asked["num_draft_tokens"][looked_up[fed]] = 0
        feed = feed_token_ids[np.repeat(fed, rows["num_feed"])]
        table = block_table[np.repeat(fed, rows["num_blocks"])]
        output = self._drafter.propose(asked, feed, table, hidden_states) if len(asked) else NO_DRAFTS
        for row in known:
            row.asked = False
        by_network = split_rows(output.token_ids, output.lens)
        for index, count, draft in zip(
            np.flatnonzero(fed).tolist(), asked["num_draft_tokens"].tolist(), by_network, strict=True
        ):
            if count:
                drafts[index] = known[index].draft = draft.tolist()
                known[index].asked = True
        lens = np.array([len(draft) for draft in drafts], np.int32)
        token_ids = np.array([token for draft in drafts for token in draft], np.int32)
        return DraftOutput(token_ids, lens, looked_up.astype(np.int32))

    def _feed(
        self, rows: NDArray[np.void], feed_token_ids: NDArray[np.int32], block_table: NDArray[np.int32]
    ) -> list[Row]:
        """Take the fed tokens in, and what they say about the drafts before."""
        row_of, offset = ragged(rows["num_feed"])
        block, within = np.divmod(rows["num_fed"][row_of] + offset, self._tokens.shape[1])
        table = pad_block_table(block_table, rows["num_blocks"])
        self._tokens[table[row_of, block], within] = feed_token_ids
        feeds = [feed.tolist() for feed in split_rows(feed_token_ids, rows["num_feed"])]
        known = []
        for (slot, num_fed), feed, blocks in zip(
            rows[["slot", "num_fed"]].tolist(), feeds, table, strict=True
        ):
            row = self._row(slot, num_fed, feed, blocks)
            followed = feed[len(row.text.index) - num_fed :]  # some may have been looked up before
            if followed and row.asked:
                self._observe(row, followed)
            row.text.extend(followed)
            known.append(row)
        return known

    def _row(self, slot: int, num_fed: int, feed: list[int], blocks: NDArray[np.int32]) -> Row:
        """The slot's row; a new one where another sequence has begun, which may have cached blocks."""
        row, block_size = self._rows.get(slot), self._tokens.shape[1]
        if row is not None and num_fed <= len(row.text.index) and num_fed % block_size:
            return row  # cached blocks are whole
        before = self._tokens[blocks[: -(-num_fed // block_size)]].ravel()[:num_fed].tolist()
        if row is None or len(row.text.index) < num_fed or not row.text.index.begins([*before, *feed]):
            row = self._rows[slot] = Row(Text(1, self._max_n, self._matches), Share(OWN_FADING))
            row.text.extend(before)
        return row

    def _look_up(self, row: Row, count: int, min_chance: float, alone: bool) -> list[int]:
        """A draft of at most so many tokens, or none.  alone: the network is not to be asked"""
        draft, expected = row.text.look_up(count, min_chance)
        return draft if alone or (draft and self._prefers(row, expected)) else []

    def _prefers(self, row: Row, expected: float) -> bool:
        """Whether a match of which so many tokens are expected to be right is proposed; else the network is
        asked."""
        self._num_choices += 1
        overall = self._accepted.estimate(PRIOR, PRIOR_WEIGHT)
        better = expected >= row.accepted.estimate(overall, OVERALL_WEIGHT)
        return better != (self._num_choices % PROBE_INTERVAL == 0)

    def _observe(self, row: Row, followed: list[int]) -> None:
        """Take in what followed the network's last draft, which may have been empty."""
        agrees = [a == b for a, b in zip(row.draft, followed, strict=False)]
        num_accepted = agrees.index(False) if False in agrees else len(agrees)
        for share in (row.accepted, self._accepted):
            share.observe(num_accepted, 1)
