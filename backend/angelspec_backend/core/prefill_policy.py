"""How many prompt tokens a step computes beside decoding rows: as many as these do not feel too much.

A prompt chunk makes the step of every decoding row longer.  The limit keeps a step within a multiple of
what it takes without the chunk (compare the chunk sizes of Sarathi-Serve, arXiv 2403.02310, section 4), by
the times of earlier steps, so it is right on any machine and shrinks as the context to attend to grows.

Without the chunk means: once all live sequences decode.  A burst of requests ends in such steps anyway, so
the first of them that decode have nothing to lose by steps that long before, and the others begin sooner.
"""

from __future__ import annotations

from angelspec_backend.core.step_times import StepTimes

FIRST_CHUNK = 64
"""Prompt tokens beside decoding rows while nothing is known."""
SMALLEST_CHUNK = 16
WEIGHT = 0.3
"""Weight of a new measurement."""
PROBE_INTERVAL = 16
"""Steps with prompt chunks after which one goes without: what decoding takes alone is not seen otherwise,
and as more rows decode, and longer texts, what is known of it becomes too little."""


class PrefillPolicy:
    """Limits prompt chunks beside decoding rows, and learns what they cost."""

    def __init__(self, times: StepTimes, max_slowdown: float) -> None:
        """times: of steps that only decode.  max_slowdown: longest step as a multiple of one of them."""
        self._times = times
        self._max_slowdown = max_slowdown
        self._token_s = 0.0  # seconds a prompt token adds to a step; 0: not known yet
        self._num_mixed = 0  # steps with prompt chunks since the last one that only decoded

    def limit(self, num_decoded: int, num_rows: int, num_waiting: int, longest: int) -> int:
        """Prompt tokens for a step that decodes.

        num_decoded: tokens it decodes, drafts included, in num_rows rows.  num_waiting: sequences that wait
        for their first token and can decode beside those.  longest: prompt tokens the step has room for.
        """
        if self._num_mixed >= PROBE_INTERVAL:
            return 0
        # Where most sequences wait, as after a burst, the others wait for them.
        if num_waiting > num_rows:
            return longest
        now_s, later_s = self._decoding(num_decoded), self._decoding(num_decoded + num_waiting)
        if now_s is None or later_s is None or not self._token_s:
            return min(FIRST_CHUNK, longest)
        chunk = int((self._max_slowdown * later_s - now_s) / self._token_s)
        return min(max(chunk, SMALLEST_CHUNK), longest)

    def observe(self, num_decoded: int, num_prompt: int, seconds: float) -> None:
        """Take in a step that computed prompt tokens beside so many decoded ones, either may be 0."""
        self._num_mixed = self._num_mixed + 1 if num_decoded and num_prompt else 0
        alone_s = self._decoding(num_decoded) if num_decoded else 0.0
        if not num_prompt or alone_s is None:
            return
        token_s = max(seconds - alone_s, 0.0) / num_prompt
        self._token_s += (WEIGHT if self._token_s else 1.0) * (token_s - self._token_s)

    def _decoding(self, num_tokens: int) -> float | None:
        """Seconds of a step that only decodes so many tokens; None while nothing is known.

        Beyond the largest step there was, each token is taken to cost as much as one of a prompt.
        """
        seconds = self._times.estimate(num_tokens)
        if seconds is None:
            return None
        return seconds + max(num_tokens - self._times.largest, 0.0) * self._token_s
