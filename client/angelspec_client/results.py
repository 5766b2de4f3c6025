"""What a generation returns: chunks while it runs, and the whole at its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """How a generation ended and what it took; comes with the last chunk."""

    finish_reason: str  # stop, eos, length; or cancelled, timeout, shutdown, error
    num_input_tokens: int
    num_output_tokens: int
    seed: int  # repeats the generation
    total_draft_tokens: int
    total_accepted_draft_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Mean number of output tokens per step of the target, the bonus token included.

        A step emits its accepted draft tokens and one more token, so there were
        num_output_tokens - total_accepted_draft_tokens steps.  1.0 without speculation; 0.0 without output.
        """
        return acceptance_length(self.num_output_tokens, self.total_accepted_draft_tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one response brought.  Text and tokens need not end at the same place."""

    text: str
    token_ids: tuple[int, ...]
    time_s: float  # when it arrived: seconds since the request was sent, by the client's clock
    usage: Usage | None = None  # only in the last chunk


@dataclass(frozen=True)
class Generation(Usage):
    """A complete generation."""

    text: str
    token_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]  # one, unless it was streamed

    @property
    def ttft_s(self) -> float:
        """Time to the first token in seconds; that of the whole answer if it came in one piece."""
        return next((chunk.time_s for chunk in self.chunks if chunk.token_ids), self.duration_s)

    @property
    def duration_s(self) -> float:
        """Seconds from sending the request to its last chunk."""
        return self.chunks[-1].time_s


def acceptance_length(num_output_tokens: int, num_accepted_draft_tokens: int) -> float:
    """Output tokens per step of the target, of one generation or summed over many; 0.0 without output."""
    num_steps = num_output_tokens - num_accepted_draft_tokens
    return num_output_tokens / num_steps if num_steps > 0 else 0.0


def assemble(chunks: tuple[Chunk, ...]) -> Generation:
    """Join the chunks of one generation, the last one carrying the usage."""
    usage = chunks[-1].usage
    assert usage is not None
    return Generation(
        **vars(usage),
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        chunks=chunks,
    )
