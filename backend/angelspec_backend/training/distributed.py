"""Several training processes as one: blocks are joined before the loss, gradients added after it.

Every process computes the objective of all blocks, but only its own carry gradients; so the sum of the
gradients is that of one process with all rows, whatever the objective averages over.
"""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from angelspec_backend.training.draft_step import DraftTerms, each


class Processes:
    """The processes that ``torchrun`` started, or this one alone."""

    def __init__(self, device: str) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def join(self, drafts: DraftTerms) -> DraftTerms:
        """The blocks of all processes; the gradients stay those of this one."""
        if self.world_size == 1:
            return drafts
        count = torch.tensor([len(drafts.valid)], device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)

        def joined(value: Tensor) -> Tensor:
            missing = value.new_zeros(int(count) - len(value), *value.shape[1:])
            own = torch.cat([value, missing]).contiguous()
            sent = own.detach().to(torch.uint8) if own.dtype == torch.bool else own.detach()
            parts = [torch.empty_like(sent) for _ in range(self.world_size)]
            dist.all_gather(parts, sent)
            parts = [part.to(own.dtype) for part in parts]
            parts[self.rank] = own
            return torch.cat(parts)

        confidence = None if drafts.confidence is None else joined(drafts.confidence)
        return DraftTerms(
            each(joined, drafts.terms), joined(drafts.valid), joined(drafts.documents), confidence
        )

    def shard(self, step: nn.Module, sharding: Literal["none", "full"], dtype: torch.dtype) -> None:
        """Prepare the parameters: in ``dtype``, or in fp32 shards that are gathered in ``dtype``."""
        for module in step.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))
        if sharding == "none" or self.world_size == 1:
            step.to(dtype)
            return
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # One unit: block drafters project the context with weights of layers that are not called for it.
        fully_shard(step, mp_policy=policy, reshard_after_forward=True)

    def add_gradients(self, step: nn.Module) -> None:
        """Sum gradients over the processes; ``backward`` has averaged those of sharded parameters."""
        if self.world_size == 1:
            return
        gradients = [parameter.grad for parameter in step.parameters() if parameter.grad is not None]
        plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        if plain:
            flat = torch.cat([gradient.flatten().float() for gradient in plain])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in plain])
            for gradient, part in zip(plain, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        for gradient in gradients:
            if isinstance(gradient, DTensor):
                gradient.mul_(self.world_size)
