"""What is kept of a request, and when it has failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from angelspec_client import Chunk, Generation, Usage
from angelspec_client.results import assemble
from loadtest.settings import Settings


@dataclass(frozen=True)
class Record:
    """One request as its user saw it: answered, failed, or cut off because the user was stopped."""

    task: str
    sent: float  # seconds since the epoch
    duration_s: float  # until its end, however it ended
    arrivals: tuple[tuple[float, int], ...]  # of each chunk: seconds since it was sent, number of tokens
    usage: Usage | None  # None when it was not answered to the end
    error: str | None

    @classmethod
    def of(
        cls, task: str, sent: float, duration_s: float, chunks: Sequence[Chunk], error: str | None
    ) -> Record:
        """The record of a request that brought these chunks.  Times as above."""
        usage = chunks[-1].usage if chunks else None
        arrivals = tuple((chunk.time_s, len(chunk.token_ids)) for chunk in chunks)
        return cls(task, sent, duration_s, arrivals, usage, error)

    @property
    def answered(self) -> bool:
        """Whether it ended as it should."""
        return self.usage is not None and self.error is None

    @property
    def ended(self) -> float:
        """Seconds since the epoch."""
        return self.sent + self.duration_s

    def generation(self) -> Generation:
        """The answer with its times and counts; its text and tokens were not kept."""
        assert self.usage is not None
        chunks = [Chunk("", (0,) * tokens, time_s) for time_s, tokens in self.arrivals]
        chunks[-1] = Chunk("", chunks[-1].token_ids, chunks[-1].time_s, self.usage)
        return assemble(tuple(chunks))

    def to_message(self) -> dict[str, Any]:
        """The form in which a worker sends it to the master."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Record:
        """The inverse of to_message; lists may have become of tuples."""
        usage = message["usage"]
        arrivals = tuple((time_s, tokens) for time_s, tokens in message["arrivals"])
        return cls(**message | {"arrivals": arrivals, "usage": usage and Usage(**usage)})


def fault(generation: Generation, settings: Settings) -> str | None:
    """Why a complete answer counts as failed; None when it is as it should be."""
    allowed = ("length",) if settings.ignore_eos else ("length", "stop", "eos")
    if generation.finish_reason not in allowed:
        return f"the answer ended with '{generation.finish_reason}', allowed: {', '.join(allowed)}"
    if generation.num_output_tokens < settings.min_expected_tokens:
        return (
            f"the answer has {generation.num_output_tokens} tokens, "
            f"at least {settings.min_expected_tokens} were expected"
        )
    if len(generation.token_ids) != generation.num_output_tokens:
        return (
            f"{len(generation.token_ids)} tokens arrived, the server counted {generation.num_output_tokens}"
        )
    return None
