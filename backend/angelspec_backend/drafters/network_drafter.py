"""What the drafters with a trained network have in common in serving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import DraftOutput
from angelspec_backend.drafters.blocks import BlockNetwork
from angelspec_backend.drafters.chain import ChainNetwork
from angelspec_backend.drafters.choice import Drafts
from angelspec_backend.drafters.paged import rotary_table
from angelspec_backend.drafters.recorded import can_record
from angelspec_backend.engine.kv_pool import KVPool, LayerSpec
from angelspec_backend.engine.linear import PackedLinear, move_to_huge_pages

Network = TypeVar("Network", BlockNetwork, ChainNetwork)


class NetworkDrafter(ABC, Generic[Network]):
    """Serves one network that follows the target's hidden states, with a KV pool of its own.

    It samples as the target does, with the same noise at each position, so that the two agree more often
    than independent samples would.
    """

    def __init__(
        self,
        network: Network,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
        quantization: str = "none",
    ) -> None:
        """Take over a network; its weights are repacked.

        num_blocks, block_size: as the target's KV pool has; max_context: longest sequence in tokens;
        quantization: see ``pack_network``.

        Raises:
            MemoryError: the machine has no memory for the KV pool.
        """
        spec, shape = network.spec, network.spec.shape
        self.device, self.dtype = network.embed_tokens.device, network.embed_tokens.dtype
        self.max_context = max_context
        self.info = DrafterInfo(
            spec.kind,
            keeps_drafts=False,  # what it keeps of drafts is not made of the target's hidden states
            shares_blocks=True,
            tap_ids=spec.tap_ids,
            hidden_bytes=spec.target_hidden * self.dtype.itemsize,
            lookahead=spec.block_size,  # a chain's drafts lie where the target puts the drafts themselves
        )
        self.network: Network = self._pack(network.requires_grad_(False).eval(), quantization)
        self.can_record = can_record(self.network, self.dtype, shape.head_dim)
        move_to_huge_pages(each for each in self.network.modules() if isinstance(each, PackedLinear))
        layers = [LayerSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim)] * spec.num_layers
        self.pool = KVPool.allocate(layers, num_blocks, block_size, self.dtype, self.device)
        self._cos_sin = rotary_table(
            max_context + spec.block_size, shape.head_dim, shape.rope_theta, self.dtype, self.device
        )

    def propose(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
    ) -> DraftOutput:
        """See ``Drafter.propose``."""
        confident = bool((rows["min_chance"] > 0).any())
        drafts = self.draft(rows, feed_token_ids, block_table, hidden_states, confident)
        return drafts.cut(rows["min_chance"]).output()

    @abstractmethod
    def draft(
        self,
        rows: NDArray[np.void],
        feed_token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32],
        hidden_states: States,
        confident: bool = True,
    ) -> Drafts:
        """Take the fed positions in, then draft for all rows that want drafts.

        rows: [num_rows] of ROW; feed_token_ids: [sum(num_feed)] the tokens behind the fed positions;
        block_table: [sum(num_blocks)]; hidden_states: the bytes of [sum(num_feed), num_taps, target_hidden];
        confident: whether confidences are wanted, by which drafts are cut; a draft may then go on behind
        its last token that is worth verifying.
        """

    @staticmethod
    @abstractmethod
    def _pack(network: Network, quantization: str) -> Network:
        """The network made fast for serving, see ``pack_network``."""

    def _received(self, hidden_states: States) -> Tensor:
        """The bytes of hidden states as a tensor.  -> [sum(num_feed), num_taps, target_hidden]"""
        spec = self.network.spec
        if isinstance(hidden_states, np.ndarray):
            flat = torch.from_numpy(hidden_states if hidden_states.flags.writeable else hidden_states.copy())
        else:
            flat = torch.as_tensor(hidden_states)
        shape = (-1, len(spec.tap_ids), spec.target_hidden)
        return flat.view(self.dtype).view(shape).to(self.device)
