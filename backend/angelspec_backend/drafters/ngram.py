"""The n-gram drafter: what followed the last time these tokens appeared will follow again.

No weights.  The end of the text is looked up in the text before it, prompt included, and what came
after its latest earlier occurrence is proposed (Saxena: Prompt lookup decoding, 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import DraftOutput, split_rows
from angelspec_backend.drafters.matches import Matches, Text


class NgramDrafter:
    """Looks the suffix of each sequence up in the sequence itself."""

    info = DrafterInfo("ngram", keeps_drafts=False, shares_blocks=False, looks_up=True)

    def __init__(self, min_n: int, max_n: int, max_num_seqs: int) -> None:
        """min_n, max_n: shortest and longest suffix to look up, in tokens."""
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram sizes must satisfy 1 <= min <= max, got min {min_n} and max {max_n}")
        self._sizes = min_n, max_n
        self._overall = Matches()
        self._slots = [self._new_text() for _ in range(max_num_seqs)]

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """Feed each row's slot, then look up.  Shapes as in ``Drafter.propose``.

        Raises:
            ValueError: a row claims more tokens than its slot was fed.
        """
        token_ids: list[int] = []
        lens = np.zeros(len(rows), np.int32)
        feeds = split_rows(feed_token_ids, rows["num_feed"])
        names = ["slot", "num_fed", "num_draft_tokens", "min_chance"]
        for i, (slot, fed, wanted, min_chance) in enumerate(rows[names].tolist()):
            text = self._rolled_back(slot, fed)
            text.extend(feeds[i].tolist())
            draft, _ = text.look_up(wanted, min_chance)
            token_ids += draft
            lens[i] = len(draft)
        return DraftOutput.of(np.array(token_ids, np.int32), lens)

    def _new_text(self) -> Text:
        return Text(*self._sizes, self._overall)

    def _rolled_back(self, slot: int, num_fed: int) -> Text:
        """The slot's text, cut to the tokens that still hold."""
        text = self._slots[slot]
        if num_fed > len(text.index):
            raise ValueError(f"slot {slot} was fed {len(text.index)} tokens, but the row says {num_fed}")
        if num_fed == 0:
            text = self._slots[slot] = self._new_text()
        elif num_fed < len(text.index):
            text.truncate(num_fed)
        return text
