"""Limits of the loop, and what it must know of the drafters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DrafterInfo:
    """What the loop must know of a drafter."""

    name: str
    keeps_drafts: bool  # its context already holds the drafts it proposed, all but the last
    shares_blocks: bool  # its context lies in the KV blocks, so that it gains from cached prefixes


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
    max_slowdown: float = 2.2  # of steps that decode, by the prompt chunks computed in them
    prefix_caching: bool = True  # do not compute again what another sequence began with

    def __post_init__(self) -> None:
        pool = (self.num_blocks - 1) * self.block_size
        if self.max_context > pool:
            raise ValueError(f"max_context {self.max_context} exceeds the KV pool's {pool} tokens")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens {self.max_batch_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step could not give every sequence a token"
            )
