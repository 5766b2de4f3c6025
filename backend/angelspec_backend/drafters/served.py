"""From a checkpoint to a drafter that serves: loaded, checked against the target, with its own KV pool."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoConfig

from angelspec_backend.core.params import MAX_DRAFT_TOKENS
from angelspec_backend.drafters.base import Drafter
from angelspec_backend.drafters.block_drafter import BlockDrafter
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.chain_drafter import ChainDrafter
from angelspec_backend.drafters.checkpoint import load_drafter
from angelspec_backend.drafters.lookup import LookupDrafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.linear_native import QuantizationError, resolve_quantization
from angelspec_backend.engine.loader import LoadError, load_tokenizer, model_max_context

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedTarget:
    """What drafters must know of the target that is served beside them."""

    path: str  # folder or Hugging Face id
    dtype: torch.dtype  # of its hidden states
    device: str
    num_blocks: int  # of its KV pool
    block_size: int
    max_context: int = 0  # longest sequence in tokens; 0: what the target supports

    @cached_property
    def parts(self) -> TargetParts:
        """The tensors that drafters share, loaded once.  Raises LoadError."""
        return TargetParts.load(self.path, self.dtype, self.device)

    @cached_property
    def longest(self) -> int:
        """The longest sequence there can be, in tokens."""
        supported = model_max_context(AutoConfig.from_pretrained(self.path))
        return min(self.max_context or supported, supported, (self.num_blocks - 1) * self.block_size)

    @cached_property
    def chat_template_sha256(self) -> str:
        """Names the chat template, "" without one.  Raises LoadError."""
        template = load_tokenizer(self.path).chat_template
        return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else ""


def load_served(
    name: str, path: str, target: ServedTarget, quantization: str = "none", lookup: int = 0
) -> Drafter:
    """Load the drafter of a kind for a target.

    name: the kind, a drafter's name; path: folder or Hugging Face id of its checkpoint; lookup: longest match
    that is looked up before the network is asked, in tokens, see ``LookupDrafter``; 0: always the network.
    quantization: "none", "int8", or "auto" for int8 where it can be computed.

    Raises:
        LoadError: the checkpoint is broken, of another kind, or does not fit the target; says what differs.
    """
    spec, network = load_drafter(path, target.parts, dtype=target.dtype)
    if spec.kind != name:
        raise LoadError(
            f"{name}: '{path}' is a checkpoint of kind '{spec.kind}'; name it in the option {spec.kind}, "
            f"and '{spec.kind}' in drafters"
        )
    found, expected = spec.target.chat_template_sha256, target.chat_template_sha256
    if found and expected and found != expected:
        raise LoadError(
            f"{name}: '{path}' was trained for another chat template: chat_template_sha256 is {found[:12]}…, "
            f"expected {expected[:12]}…, that of '{target.path}'"
        )
    serving = BlockDrafter if isinstance(network, BlockNetwork) else ChainDrafter
    try:
        drafter: Drafter = serving(
            network,  # type: ignore[arg-type]  # the class serves this one
            num_blocks=target.num_blocks,
            block_size=target.block_size,
            max_context=target.longest,
            quantization=resolve_quantization(quantization, target.dtype, target.device),
        )
    except (MemoryError, QuantizationError) as error:
        raise LoadError(f"{name}: {error}") from None
    logger.info("%s: %s, %d layers, taps %s", name, path, spec.num_layers, list(spec.tap_ids))
    if not lookup:
        return drafter
    most = spec.most_drafts or MAX_DRAFT_TOKENS
    return LookupDrafter(drafter, lookup, target.num_blocks, target.block_size, most)
