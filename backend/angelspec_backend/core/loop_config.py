"""Limits of the loop, and what it must know of the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from angelspec_backend.core.hidden_states import IN_NUMPY, StateArrays


@dataclass(frozen=True)
class DrafterInfo:
    """What the loop must know of a drafter.

    A drafter with ``tap_ids`` is a hidden-state drafter: it is fed with the target's hidden states at
    position j together with the token at j + 1, so it is never ahead of the target.
    """

    name: str  # how requests and the configuration call it
    keeps_drafts: bool  # its context already holds the drafts it proposed, all but the last
    shares_blocks: bool  # its context lies in the KV blocks, so that a sequence may begin with cached ones
    tap_ids: tuple[int, ...] = ()  # layers of the target whose outputs it reads, counted from 0, ascending
    hidden_bytes: int = 0  # of one hidden state: the target's hidden size times its dtype's size
    lookahead: int = 0  # KV slots behind the newest token that it may write while it drafts
    looks_up: bool = False  # it can draft without a network, by looking the text up in itself
    failure: str = ""  # why it could not be loaded, if so: it never drafts

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.tap_ids, self.tap_ids[1:], strict=False)):
            raise ValueError(f"drafter '{self.name}': tap_ids must be ascending, got {self.tap_ids}")
        if self.tap_ids and (self.keeps_drafts or self.hidden_bytes <= 0):
            raise ValueError(
                f"drafter '{self.name}': with tap_ids hidden_bytes must be positive and keeps_drafts false "
                f"(drafts have no hidden states yet), got {self.hidden_bytes} and {self.keeps_drafts}"
            )

    @staticmethod
    def failed(name: str, failure: str) -> DrafterInfo:
        """Of a drafter that could not be loaded."""
        return DrafterInfo(name, keeps_drafts=False, shares_blocks=False, failure=failure)

    @property
    def looks_up_first(self) -> bool:
        """Whether it has a network, which it asks where it finds nothing."""
        return self.looks_up and bool(self.tap_ids)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of hidden states fed with each token."""
        return len(self.tap_ids) * self.hidden_bytes

    def checked(self, num_layers: int, hidden_bytes: int) -> DrafterInfo:
        """This drafter; a failed one if the target does not put out what it reads.

        num_layers: of the target; hidden_bytes: of one of its hidden states.
        """
        if max(self.tap_ids, default=0) >= num_layers:
            found = f"tap_ids are {list(self.tap_ids)}, but the target has layers 0 to {num_layers - 1}"
        elif self.tap_ids and self.hidden_bytes != hidden_bytes:
            found = (
                f"hidden_bytes is {self.hidden_bytes}, but those of the target are {hidden_bytes}; "
                "dtype must be the same for drafter and target"
            )
        else:
            return self
        return self.failed(self.name, found)


def loaded(drafters: Sequence[DrafterInfo]) -> frozenset[int]:
    """Indices of the drafters that could be loaded."""
    return frozenset(index for index, drafter in enumerate(drafters) if not drafter.failure)


@dataclass(frozen=True)
class LoopConfig:
    """Limits of the loop, put together from the configuration and what the models say of themselves."""

    num_blocks: int
    block_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    drafters: tuple[DrafterInfo, ...] = ()
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_queue_size: int = 256
    adaptive_drafts: bool = True  # shorten drafts that would cost more time than they save
    max_slowdown: float = 2.6  # of steps that decode, by the prompt chunks computed in them
    prefix_caching: bool = True  # do not compute again what another sequence began with
    max_waiting_states: int = 512  # positions of a sequence whose hidden states may wait for drafting
    state_arrays: StateArrays = IN_NUMPY  # that the executor's hidden states are in

    def __post_init__(self) -> None:
        pool = (self.num_blocks - 1) * self.block_size
        if self.max_context > pool:
            raise ValueError(f"max_context {self.max_context} exceeds the KV pool's {pool} tokens")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step could not give every sequence a token"
            )

    @property
    def max_lookahead(self) -> int:
        """The most KV slots that any drafter needs behind a sequence."""
        return max((drafter.lookahead for drafter in self.drafters), default=0)
