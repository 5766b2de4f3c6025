"""The options of a generation, as users of the client name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """Options of a generation.  None leaves a value to the server."""

    max_tokens: int | None = None
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0: off
    top_p: float | None = None  # 1: off
    min_p: float | None = None  # 0: off
    seed: int | None = None  # 0 <= seed < 2**64; drawn and returned by the server if absent
    stop: str | Sequence[str] = ()  # strings that end the text and are not part of it
    ignore_eos: bool | None = None
    exclude_input_in_output: bool = True  # False: the text begins with the prompt
    drafter: str | None = None  # "none": plain autoregressive decoding
    num_draft_tokens: int | None = None  # 0: no speculation
    request_id: str = ""  # shown in the server's log
    parameters: Mapping[str, str | int | float | bool] = field(
        default_factory=dict
    )  # further Triton parameters
