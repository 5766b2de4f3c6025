"""Looking up how a text may go on in the text itself, and how likely that is to be right.

A draft token behind a match of n tokens and j draft tokens is, if these are right, one behind a match of
n + j tokens.  So one chance per number of matching tokens says it all, and a text that is fed shows
whether what was found would have been right, whether it was wanted as a draft or not.
"""

from __future__ import annotations

from angelspec_backend.core.draft_records import Share

LONGEST = 16
"""Matching tokens beyond which a match is no surer."""
PRIOR, PRIOR_WEIGHT = 0.5, 4.0
"""Chance while nothing is known, and the tokens that this counts."""
OVERALL_WEIGHT = 4.0
"""Tokens that the record of all sequences counts beside a sequence's own."""
OVERALL_FADING, OWN_FADING = 0.998, 0.95
"""Factors per token by which records fade."""


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


class Matches:
    """How often the token behind a match was the same again, by number of matching tokens."""

    def __init__(self, overall: Matches | None = None) -> None:
        """overall: of all sequences, which leads this one of a single sequence."""
        fading = OVERALL_FADING if overall is None else OWN_FADING
        self._overall = overall
        self._shares = [Share(fading) for _ in range(LONGEST + 1)]

    def chance(self, size: int) -> float:
        """That the token behind a match of so many tokens is right."""
        share = self._shares[min(size, LONGEST)]
        if self._overall is None:
            return share.estimate(PRIOR, PRIOR_WEIGHT)
        return share.estimate(self._overall.chance(size), OVERALL_WEIGHT)

    def observe(self, size: int, right: bool) -> None:
        """Take in whether the token behind a match of so many tokens was right."""
        self._shares[min(size, LONGEST)].observe(right, 1)
        if self._overall is not None:
            self._overall.observe(size, right)


class Text:
    """The tokens of one sequence, what is looked up in them, and how right that has been."""

    def __init__(self, min_n: int, max_n: int, overall: Matches) -> None:
        """min_n, max_n: shortest and longest match, in tokens; overall: of all sequences."""
        self.index, self.matches = NgramIndex(min_n, max_n), Matches(overall)
        self._continuation: list[int] = []  # found last, wanted or not
        self._size = 0  # of its match

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens, which show how right the last continuation was."""
        for behind, (token, found) in enumerate(zip(token_ids, self._continuation, strict=False)):
            self.matches.observe(self._size + behind, token == found)
            if token != found:
                break
        self.index.extend(token_ids)
        self._continuation = []

    def truncate(self, length: int) -> None:
        """Keep the first tokens only."""
        self.index, self._continuation = self.index.truncated(length), []

    def look_up(self, count: int, min_chance: float) -> tuple[list[int], float]:
        """At most so many tokens that are likely to follow, and how many of them are expected to be right.

        min_chance: of being accepted, which only happens if all before are right; 0: all
        """
        self._continuation, self._size = self.index.continuation(count) if count > 0 else ([], 0)
        chance, expected = 1.0, 0.0
        for behind in range(len(self._continuation)):
            chance *= self.matches.chance(self._size + behind)
            if chance < min_chance:
                return self._continuation[:behind], expected
            expected += chance
        return self._continuation, expected
