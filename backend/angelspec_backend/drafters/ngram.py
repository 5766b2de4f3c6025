"""The n-gram drafter: what followed the last time these tokens appeared will follow again.

No weights.  The end of the text is looked up in the text before it, prompt included, and what came
after its latest earlier occurrence is proposed (Saxena: Prompt lookup decoding, 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import DraftOutput, split_rows


class NgramIndex:
    """The tokens of one sequence, and where each n-gram in them ended last.

    Adding a token and looking one up take the same time whatever the length of the text.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(min_n, max_n + 1)
        self._token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its latest occurrence

    def __len__(self) -> int:
        return len(self._token_ids)

    def holds(self, token_ids: list[int]) -> bool:
        """Whether its tokens are these."""
        return self._token_ids == token_ids

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens.  The n-grams at the very end stay out of the index, lest they find themselves."""
        start = len(self._token_ids)
        self._token_ids += token_ids
        for end in range(start, len(self._token_ids)):
            for size in self._sizes:
                if size > end:
                    break
                self._ends[tuple(self._token_ids[end - size : end])] = end

    def truncated(self, length: int) -> NgramIndex:
        """An index of the first ``length`` tokens, built anew: this is rare and n-grams keep one position."""
        index = NgramIndex(self._sizes.start, self._sizes.stop - 1)
        index.extend(self._token_ids[:length])
        return index

    def continuation(self, count: int) -> tuple[list[int], int]:
        """What followed the longest known suffix at its latest earlier occurrence, and the suffix's size.

        ``count`` tokens, or none where no suffix is known.  Where they reach the end of the text they go on
        with themselves: periodic text stays periodic.
        """
        length = len(self._token_ids)
        for size in reversed(self._sizes):
            if size >= length:
                continue
            end = self._ends.get(tuple(self._token_ids[length - size :]))
            if end is not None:
                known = self._token_ids[end : end + count]
                return [known[i % (length - end)] for i in range(count)], size
        return [], 0


class NgramDrafter:
    """Looks the suffix of each sequence up in the sequence itself."""

    info = DrafterInfo("ngram", keeps_drafts=False, shares_blocks=False, looks_up=True)

    def __init__(self, min_n: int, max_n: int, max_num_seqs: int) -> None:
        """min_n, max_n: shortest and longest suffix to look up, in tokens."""
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram sizes must satisfy 1 <= min <= max, got min {min_n} and max {max_n}")
        self._min_n, self._max_n = min_n, max_n
        self._slots = [NgramIndex(min_n, max_n) for _ in range(max_num_seqs)]

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: NDArray[np.uint8],
    ) -> DraftOutput:
        """Feed each row's slot, then look up.  Shapes as in ``Drafter.propose``.

        Raises:
            ValueError: a row claims more tokens than its slot was fed.
        """
        token_ids: list[int] = []
        lens = np.zeros(len(rows), np.int32)
        feeds = split_rows(feed_token_ids, rows["num_feed"])
        wanted = rows["num_draft_tokens"].tolist()
        for i, (slot, fed) in enumerate(zip(rows["slot"].tolist(), rows["num_fed"].tolist(), strict=True)):
            index = self._rolled_back(slot, fed)
            index.extend(feeds[i].tolist())
            draft = index.continuation(wanted[i])[0] if wanted[i] > 0 else []
            token_ids += draft
            lens[i] = len(draft)
        return DraftOutput(np.array(token_ids, np.int32), lens)

    def _rolled_back(self, slot: int, num_fed: int) -> NgramIndex:
        """The slot's index, cut to the tokens that still hold."""
        index = self._slots[slot]
        if num_fed > len(index):
            raise ValueError(f"slot {slot} was fed {len(index)} tokens, but the row says {num_fed}")
        if num_fed == 0:
            index = NgramIndex(self._min_n, self._max_n)
        elif num_fed < len(index):
            index = index.truncated(num_fed)
        self._slots[slot] = index
        return index
