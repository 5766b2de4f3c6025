"""What the target knows of training documents: hidden states at some layers, and its last one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.drafters.layers import RMSNorm
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.batch import PackedBatch, pack
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.training.corpus import Corpus


@dataclass(frozen=True)
class Features:
    """Of all tokens of some documents, one after the other, in the target's dtype."""

    taps: Tensor  # [n, num_taps, hidden] outputs of decoder layers, before the final norm
    last: Tensor  # [n, hidden] what the target's LM head reads


class TargetFeatures:
    """The target in this process; it computes documents as the engine serves them."""

    def __init__(
        self,
        path: str,
        parts: TargetParts,
        tap_ids: Sequence[int],
        max_tokens: int,
        block_size: int = 16,
    ) -> None:
        """path: of the target; parts: of it, on the device and in the dtype that is computed in;
        max_tokens: computed at a time, at least those of the longest document.

        Raises:
            LoadError: the target cannot be loaded, has no final RMSNorm, or no such layer.
        """
        self.parts, weights = parts, parts.embed_tokens
        if parts.norm is None:
            raise LoadError(f"{path}: its final norm is no RMSNorm, so drafters cannot be trained for it")
        for tap in tap_ids:
            if not 0 <= tap < self.parts.num_layers:
                raise LoadError(f"tap_ids: {tap}, but {path} has layers 0 to {self.parts.num_layers - 1}")
        self.tap_ids, self._max_tokens, self._block_size = tuple(tap_ids), max_tokens, block_size
        self._norm = RMSNorm(self.parts.hidden_size, self.parts.eps).requires_grad_(False).to(weights)
        self._norm.weight.copy_(parts.norm)
        # Documents are short, so the pool holds one batch of them and a partly filled block for each.
        self.runner = ModelRunner.from_pretrained(
            path,
            dtype=weights.dtype,
            device=str(weights.device),
            num_blocks=2 + 2 * max_tokens // block_size,
            block_size=block_size,
            batch_invariant=weights.device.type == "cpu",  # costs nothing there
            cuda_graphs=False,
        )

    @property
    def bytes_per_token(self) -> int:
        """Of features."""
        return (len(self.tap_ids) + 1) * self.parts.hidden_size * self.parts.embed_tokens.element_size()

    @torch.no_grad()
    def compute(self, documents: Sequence[NDArray[np.int32]]) -> Features:
        """Features of some documents.  documents: token ids, [n] each."""
        wanted = (*self.tap_ids, self.parts.num_layers - 1)
        parts: list[list[Tensor]] = []
        for group in self._groups(documents):
            hidden = self.runner.forward_with_taps(self._pack(group), wanted)[1]
            count = sum(map(len, group))  # a batch of a single token is padded
            parts.append([tensor[:count] for tensor in hidden])
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        taps = torch.stack(joined[:-1], 1) if self.tap_ids else joined[-1][:, None][:, :0]
        return Features(taps, self._norm(joined[-1]))

    def _groups(self, documents: Sequence[NDArray[np.int32]]) -> list[list[NDArray[np.int32]]]:
        groups: list[list[NDArray[np.int32]]] = []
        room = 0
        for document in documents:
            size = -(-len(document) // self._block_size) * self._block_size
            if not groups or size > room:
                groups.append([])
                room = max(self._max_tokens, size)
            groups[-1].append(document)
            room -= size
        return groups

    def _pack(self, documents: Sequence[NDArray[np.int32]]) -> PackedBatch:
        rows = np.zeros(len(documents), ROW)
        rows["num_tokens"] = [len(document) for document in documents]
        rows["num_blocks"] = -(-rows["num_tokens"] // self._block_size)
        rows["sample"] = 1
        table = np.arange(1, 1 + rows["num_blocks"].sum(), dtype=np.int32)
        tokens = np.concatenate(documents)
        return pack(rows, tokens, DraftOutput.empty(len(rows)), table, self._block_size, self.runner.device)


class FeatureCache:
    """Features of a corpus on disk: computed when first asked for, read afterwards."""

    def __init__(self, target: TargetFeatures, corpus: Corpus, folder: Path) -> None:
        """Open or begin a cache.

        Raises:
            LoadError: the disk has too little room.
        """
        self._target, self._corpus = target, corpus
        dtype = target.parts.embed_tokens.dtype
        self._dtype = dtype
        integer: Any = np.int16 if dtype.itemsize == 2 else np.int32
        shape = (corpus.num_tokens, len(target.tap_ids) + 1, target.parts.hidden_size)
        folder.mkdir(parents=True, exist_ok=True)
        taps = "-".join(map(str, target.tap_ids))
        name = f"{corpus.fingerprint()}_{taps}_{str(dtype).removeprefix('torch.')}"
        data, done = folder / f"{name}.features", folder / f"{name}.done"
        self.size = corpus.num_tokens * target.bytes_per_token
        new = not data.exists()
        if new and self.size > shutil.disk_usage(folder).free:
            free = shutil.disk_usage(folder).free
            raise LoadError(
                f"{folder}: features of {corpus.num_tokens} tokens take {self.size / 1e9:.1f} GB, "
                f"but only {free / 1e9:.1f} GB are free"
            )
        mode: Literal["w+", "r+"] = "w+" if new else "r+"
        self._data = np.memmap(data, integer, mode, shape=shape)
        self._done = np.memmap(done, np.uint8, mode, shape=(len(corpus.documents),))
        self._starts = np.concatenate([[0], np.cumsum(corpus.lengths)])

    def features(self, documents: Sequence[int]) -> Features:
        """Features of documents of the corpus, by index."""
        missing = [index for index in documents if not self._done[index]]
        if missing:
            made = self._target.compute([self._corpus.documents[index].token_ids for index in missing])
            both = torch.cat([made.taps, made.last[:, None]], 1).cpu()
            lens = [len(self._corpus.documents[index]) for index in missing]
            for index, part in zip(missing, both.split(lens), strict=True):
                view = torch.int16 if self._data.dtype == np.int16 else torch.int32
                self._data[self._starts[index] : self._starts[index + 1]] = (
                    part.contiguous().view(view).numpy()
                )
                self._done[index] = 1
        slices = [self._data[self._starts[index] : self._starts[index + 1]] for index in documents]
        both = torch.from_numpy(np.concatenate(slices)).view(self._dtype).to(self._target.runner.device)
        return Features(both[:, :-1], both[:, -1])
