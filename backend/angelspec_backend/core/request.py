"""A live request: its tokens, how far the target and the drafter have come, and why it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from angelspec_backend.core.block_manager import BlockTable
from angelspec_backend.core.draft_records import Records
from angelspec_backend.core.hidden_queue import HiddenQueue
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest


class FinishReason(str, Enum):
    """Why a request ended; the value is what the client sees."""

    STOP = "stop"  # a stop string
    EOS = "eos"  # an end-of-sequence token
    LENGTH = "length"  # max_tokens, which the context bounds
    CANCELLED = "cancelled"  # the client left
    TIMEOUT = "timeout"  # its deadline passed
    SHUTDOWN = "shutdown"  # the server stops
    ERROR = "error"  # the model failed


@dataclass(frozen=True)
class TokenEvent:
    """News of one request: new tokens, or its end, or both.  Counts are totals so far."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class Sequence:
    """State of one request, owned by the loop thread.

    ``num_computed`` tokens have K/V in the target, ``num_fed`` have reached the drafter; both chase
    ``len(token_ids)``.  Preemption and recovery only set them back.  Under a hidden-state drafter the
    states of the positions between ``num_fed`` and ``num_computed`` wait here.
    """

    request_id: int
    request: GenerationRequest
    table: BlockTable
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_fed: int = 0
    num_seen: int = (
        0  # tokens that the drafter can look up; some of them may have to be fed with hidden states
    )
    waiting_states: HiddenQueue = field(default_factory=HiddenQueue)
    slot: int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    records: Records = field(default_factory=lambda: Records(fading=0.9))  # of its drafts
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        # The drafter's index, NO_DRAFTER when the request is decoded autoregressively.
        self.drafter = self.request.drafter if self.request.num_draft_tokens > 0 else NO_DRAFTER

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without K/V in the target: 1 while decoding, more in a prompt."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_wanted(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.num_output_tokens

    def expired(self, now: float) -> bool:
        """Whether the request's deadline has passed; ``now`` by time.monotonic()."""
        timeout = self.request.timeout_s
        return timeout is not None and now - self.arrival > timeout

    def append(self, token_ids: list[int], eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Add sampled tokens up to the one that ends the request, and say why it ended."""
        for token in token_ids:
            self.token_ids.append(token)
            if token in eos_token_ids and not self.request.ignore_eos:
                return FinishReason.EOS
            if self.num_wanted <= 0:
                return FinishReason.LENGTH
        return None

    def event(self, token_ids: list[int], reason: FinishReason | None, error: str = "") -> TokenEvent:
        """The news to report after a step."""
        return TokenEvent(
            self.request_id, tuple(token_ids), reason, error, self.num_draft_tokens, self.num_accepted_tokens
        )
