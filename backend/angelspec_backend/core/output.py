"""From token ids to text a client may see: valid UTF-8, whole characters, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.core.request import FinishReason, TokenEvent

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are not, or not yet, a character."""

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Text of a growing list of tokens, holding back a character until all its bytes are there.

    Only a window of tokens is decoded, so the work per token does not grow with the text. The window
    starts one group of tokens back, since a decoder may treat the first token of a text differently.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_shown_ids = 0  # ids at the window's start whose text is out
        self._shown = ""  # text of the window that is out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that has become certain."""
        self._window += token_ids
        text = self._decode(self._window)
        new = self._advance(text.rstrip(REPLACEMENT))
        if not text.endswith(REPLACEMENT):
            tail = self._window[self._num_shown_ids :]
            if shown := self._decode(tail):  # a tail without text would be no context for what follows
                self._window, self._num_shown_ids, self._shown = tail, len(tail), shown
        return new

    def flush(self) -> str:
        """The rest, bytes that never became a character included."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        if len(text) <= len(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


class StopMatcher:
    """Finds the first stop string in a growing text and holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that may be shown, whether a stop string was met)."""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Chunk:
    """One response: text and tokens that are new, and at the end why and how much.  Counts are totals."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class OutputStream:
    """Turns a request's token events into chunks; owned by the output thread.

    Tokens whose text is held back wait for the next chunk.  Without ``stream`` everything does.
    """

    def __init__(self, request: GenerationRequest, decode: Decode) -> None:
        self._stream = request.stream
        self._decoder = IncrementalDecoder(decode)
        self._stop = StopMatcher(request.stop) if request.stop else None
        self._text = request.prompt_text if request.echo else ""
        self._token_ids: list[int] = []
        self._num_output_tokens = 0
        self.finished = False

    def push(self, event: TokenEvent) -> Chunk | None:
        """The next chunk, None when there is nothing to show yet or the stream has ended.

        A chunk with finish reason STOP on an event without one means that a stop string was met here:
        the request is to be cancelled in the loop.
        """
        if self.finished:
            return None
        taken, stopped = self._take(event.token_ids)
        reason = FinishReason.STOP if stopped else event.finish_reason
        if reason and not stopped:
            self._flush()
        if not reason and not (self._stream and self._text):
            return None
        self.finished = reason is not None
        chunk = Chunk(
            self._text,
            tuple(self._token_ids),
            reason,
            event.error,
            self._num_output_tokens,
            event.num_draft_tokens,
            # Accepted drafts behind the stop string were not shown, so they do not count.
            event.num_accepted_tokens - (len(event.token_ids) - taken),
        )
        self._text, self._token_ids = "", []
        return chunk

    def _take(self, token_ids: tuple[int, ...]) -> tuple[int, bool]:
        """Add tokens up to the one that completes a stop string; (tokens taken, stop string met)."""
        # One by one only where it matters: the same token must end the text however many came at once.
        groups = [token_ids] if self._stop is None else [(token,) for token in token_ids]
        taken = 0
        for group in groups:
            self._token_ids += group
            taken += len(group)
            self._num_output_tokens += len(group)
            text, stopped = self._decoder.push(group), False
            if self._stop is not None:
                text, stopped = self._stop.push(text)
            self._text += text
            if stopped:
                return taken, True
        return taken, False

    def _flush(self) -> None:
        rest = self._decoder.flush()
        if self._stop is not None:
            rest, stopped = self._stop.push(rest)
            if not stopped:
                rest += self._stop.flush()
        self._text += rest
