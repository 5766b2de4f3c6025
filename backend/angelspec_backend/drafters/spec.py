"""What a trained drafter is: its kind, its sizes, and each convention it was trained in as a field."""

from __future__ import annotations

from dataclasses import dataclass

from angelspec_backend.drafters.layers import LayerShape
from angelspec_backend.drafters.moe import MoeShape

BLOCK_KINDS = ("dflash", "dflare", "dfly", "dspark")
"""Draft a whole block in one pass."""
CHAIN_KINDS = ("mtp", "eagle3")
"""Draft token after token."""
UNTRAINED_STEPS = 2
"""Drafts of a chain beyond the steps it was trained for: each is made like the one before, and while drafts
are likely, which decides whether there are more, they are right about as often."""
MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class TargetIdentity:
    """Which target, in which mode, a drafter was trained for; empty: the checkpoint does not say."""

    name: str = ""
    revision: str = ""
    chat_template_sha256: str = ""
    mode: str = ""  # e.g. "thinking" or "no_think"


@dataclass(frozen=True)
class DrafterSpec:
    """Everything that a drafter's weights alone do not say."""

    kind: str  # of BLOCK_KINDS or CHAIN_KINDS
    shape: LayerShape
    num_layers: int
    vocab_size: int  # rows of the target's embedding
    target_hidden: int  # width of the target's hidden states
    tap_ids: tuple[int, ...]  # id l: output of decoder layer l of the target, from 0, before its final norm
    target_num_layers: int = 0  # depth of the target; 0: the checkpoint does not say
    draft_vocab_size: int = 0  # rows of a pruned draft vocabulary; 0: the target's vocabulary
    max_context: int = 0  # positions it was made for; 0: the checkpoint does not say

    # Block drafters.
    block_size: int = 0  # slots, the anchor's included
    mask_token_id: int = -1  # fills the slots behind the anchor
    label_shift: int = 0  # slot k predicts the token at anchor + k (0) or at anchor + k + 1 (1)
    correction_size: int = 0  # DFly: intermediate size of the hidden correction; 0: none
    markov_rank: int = 0  # DSpark; 0: no Markov head
    markov_kind: str = "vanilla"  # of MARKOV_KINDS
    confidence_head: bool = False  # DSpark
    confidence_with_markov: bool = True  # the confidence head also sees the Markov embedding

    # Chain drafters.
    num_steps: int = 0  # drafts it was trained for; 0: the checkpoint does not say
    postnorm_input: bool = True  # MTP: reads the last hidden state behind the target's final norm
    moe: MoeShape | None = None  # MTP: a mixture of experts in place of the MLP
    fc_norm: bool = False  # EAGLE-3: an RMSNorm on each tap
    norm_before_fc: bool = False  # EAGLE-3: an RMSNorm on all taps together
    norm_before_residual: bool = False  # EAGLE-3: the residual stream begins behind hidden_norm
    norm_output: bool = False  # EAGLE-3: the next step is fed the output behind the final norm

    target: TargetIdentity = TargetIdentity()

    def __post_init__(self) -> None:
        """Refuse what no drafter can be.

        Raises:
            ValueError: names the field, its value and what is allowed.
        """
        if self.kind not in BLOCK_KINDS + CHAIN_KINDS:
            raise ValueError(f"kind is '{self.kind}', allowed: {', '.join(BLOCK_KINDS + CHAIN_KINDS)}")
        if list(self.tap_ids) != sorted(set(self.tap_ids)) or min(self.tap_ids, default=0) < 0:
            raise ValueError(f"tap_ids are {list(self.tap_ids)}, but must be ascending layer ids from 0")
        depth = self.target_num_layers
        if depth and max(self.tap_ids, default=0) >= depth:
            raise ValueError(f"tap_ids are {list(self.tap_ids)}, but the target has layers 0 to {depth - 1}")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}, allowed: 0 to {self.vocab_size}")
        if self.kind in BLOCK_KINDS:
            self._check_block()

    def _check_block(self) -> None:
        if self.label_shift not in (0, 1):
            raise ValueError(
                f"label_shift is {self.label_shift}, allowed: 0 (same position) or 1 (next token)"
            )
        if self.block_size < 2 - self.label_shift:
            raise ValueError(
                f"block_size is {self.block_size}, but with label_shift {self.label_shift} "
                f"it must be at least {2 - self.label_shift}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, but the target's embedding has "
                f"rows 0 to {self.vocab_size - 1}"
            )
        if self.markov_kind not in MARKOV_KINDS:
            raise ValueError(f"markov_kind is '{self.markov_kind}', allowed: {', '.join(MARKOV_KINDS)}")
        if not self.tap_ids:
            raise ValueError("tap_ids are empty, but a block drafter reads hidden states of the target")

    @property
    def num_drafts(self) -> int:
        """Tokens one block gives: in the same-position convention slot 0, the anchor's, gives none.

        For a chain drafter, the steps it was trained for.
        """
        if self.kind in CHAIN_KINDS:
            return self.num_steps
        return self.block_size - 1 + self.label_shift

    @property
    def most_drafts(self) -> int:
        """Tokens that are worth asking for; 0: nothing is known."""
        return self.num_drafts + (UNTRAINED_STEPS if self.kind in CHAIN_KINDS and self.num_steps else 0)
