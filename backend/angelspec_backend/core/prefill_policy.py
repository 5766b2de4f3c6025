"""How many prompt tokens a step computes beside decoding rows: as many as these do not feel too much.

A prompt chunk makes the step of every decoding row longer.  The limit keeps a step within a multiple of
what it takes without the chunk (compare the chunk sizes of Sarathi-Serve, arXiv 2403.02310, section 4), by
the times of earlier steps, so it is right on any machine and shrinks as the context to attend to grows.
"""

from __future__ import annotations

from angelspec_backend.core.step_times import StepTimes

FIRST_CHUNK = 64
"""Prompt tokens beside decoding rows while nothing is known."""
SMALLEST_CHUNK = 16
WEIGHT = 0.3
"""Weight of a new measurement."""


class PrefillPolicy:
    """Limits prompt chunks beside decoding rows, and learns what they cost."""

    def __init__(self, times: StepTimes, max_slowdown: float) -> None:
        """times: of steps that only decode.  max_slowdown: longest step as a multiple of one of them."""
        self._times = times
        self._max_slowdown = max_slowdown
        self._token_s = 0.0  # seconds a prompt token adds to a step; 0: not known yet

    def limit(self, num_decoded: int) -> int:
        """Prompt tokens for a step that decodes so many tokens, drafts included."""
        alone_s = self._times.estimate(num_decoded)
        if alone_s is None or not self._token_s:
            return FIRST_CHUNK
        return max(int((self._max_slowdown - 1) * alone_s / self._token_s), SMALLEST_CHUNK)

    def observe(self, num_decoded: int, num_prompt: int, seconds: float) -> None:
        """Take in a step that computed prompt tokens beside so many decoded ones."""
        alone_s = self._times.estimate(num_decoded) if num_decoded else 0.0
        if alone_s is None:
            return
        token_s = max(seconds - alone_s, 0.0) / num_prompt
        self._token_s += (WEIGHT if self._token_s else 1.0) * (token_s - self._token_s)
