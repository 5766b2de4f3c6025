"""The CPU kernels of ``native.cpp``: built once with g++, called through ctypes on tensors' addresses.

The library is left without an OpenMP runtime of its own: its GOMP symbols resolve to the one torch
has loaded, so torch, oneDNN and these kernels share one pool of threads.  Without g++, or when the
build fails, ``available()`` is False and callers use torch instead.

``python -m angelspec_backend.engine.native`` builds ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path

import torch  # loads the OpenMP runtime that the library needs
from torch import Tensor

from angelspec_backend.engine.native_args import (
    AttentionArgs,
    ForwardArgs,
    LayerArgs,
    LinearArgs,
    Op,
    RopeArgs,
    SampleArgs,
)
from angelspec_backend.engine.native_build import NativeBuildError, build

__all__ = ["AttentionArgs", "ForwardArgs", "LayerArgs", "LinearArgs", "RopeArgs", "SampleArgs"]

_log = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

MAX_HEAD_DIM = 256


LINEAR_KERNELS = ("none", "avx512", "amx")
"""LinearKernel of native_linear_parts.h, the faster ones later."""


def available() -> bool:
    """Whether the kernels can be used; builds them on the first call and logs the reason if it cannot."""
    return _library_or_none() is not None


def supports(dtype: torch.dtype, device: torch.device, *head_dims: int) -> bool:
    """Whether the kernels handle tensors of this kind, with attention heads of these sizes."""
    if device.type != "cpu" or dtype not in _DTYPES:
        return False
    return all(dim % 8 == 0 and 0 < dim <= MAX_HEAD_DIM for dim in head_dims) and available()


def paged_attention(args: AttentionArgs, dtype: torch.dtype) -> None:
    """See ``attention.paged_attention``, which checks shapes and fills in the arguments."""
    _library().angelspec_paged_attention(args, _DTYPES[dtype])


def rope_and_cache(args: RopeArgs, dtype: torch.dtype) -> None:
    """Rotate queries and keys of a fused qkv matrix in place and write keys and values to the cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; caches: [num_blocks, num_kv_heads,
    block_size, head_dim], each block dense; cos_sin: [max_positions, rotary_dim], the cosines of one half,
    then the sines; query_norm, key_norm: RMSNorm weights [head_dim] applied before the rotation, or None;
    positions, slot_mapping: [num_tokens] int64.
    """
    _library().angelspec_rope_and_cache(args, _DTYPES[dtype])


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """RMSNorm as the Hugging Face Llama module rounds it.  With a residual: residual += x, and its norm.

    x, out, residual: [num_rows, n], dense; weight: [n].  Returns ``out``.
    """
    _library().angelspec_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
        _DTYPES[x.dtype],
    )
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """silu(gate) * up.  gate_up: [num_rows, 2 * n], dense; out: [num_rows, n].  Returns ``out``."""
    rows, n = out.shape
    _library().angelspec_silu_and_mul(
        gate_up.data_ptr(), out.data_ptr(), rows, n, torch.get_num_threads(), _DTYPES[out.dtype]
    )
    return out


def argmax(logits: Tensor, probability: Tensor | None = None) -> Tensor:
    """Per row the lowest index of the largest value, NaN counting as none.

    logits: [num_rows, n] bf16 or fp32 on the CPU; probability: [num_rows] fp32, filled with that of each
    largest value under a softmax over its row, 0 where it is not finite.  Returns [num_rows] int32.
    """
    logits = logits.contiguous()
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int32)
    _library().angelspec_argmax(
        logits.data_ptr(),
        out.data_ptr(),
        None if probability is None else probability.data_ptr(),
        rows,
        n,
        torch.get_num_threads(),
        _DTYPES[logits.dtype],
    )
    return out


def forward(args: ForwardArgs) -> None:
    """See ``llama_native.NativeForward``, which fills in the arguments."""
    _library().angelspec_forward(args)


def run(ops: ctypes.Array[Op], begin: int, end: int) -> None:
    """The operations [begin, end), see ``program.Program``, which records them."""
    first = ctypes.addressof(ops) + begin * ctypes.sizeof(Op)
    _library().angelspec_run(first, end - begin, torch.get_num_threads())


def sample(args: SampleArgs, dtype: torch.dtype) -> None:
    """See ``sampler.sample_natively``, which fills in the arguments."""
    _library().angelspec_sample(args, _DTYPES[dtype])


@functools.lru_cache(maxsize=1)
def linear_kernel() -> str:
    """The fastest of LINEAR_KERNELS that this machine has: "amx", "avx512", or "none"."""
    return LINEAR_KERNELS[_library().angelspec_linear_kernel()] if available() else "none"


def linear(args: LinearArgs) -> None:
    """See ``linear_native.NativeMatmul``, which packs the weight and fills in the arguments."""
    _library().angelspec_linear(args)


@functools.lru_cache(maxsize=1)
def _library_or_none() -> ctypes.CDLL | None:
    try:
        return _load(build())
    except NativeBuildError as error:
        _log.warning("native CPU kernels are off, torch is used instead: %s", error)
        return None


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = _library_or_none()
    if library is None:
        raise NativeBuildError("the native CPU kernels are not available on this machine")
    return library


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"the built library does not load: {error}") from None
    signatures = {
        "paged_attention": [ctypes.POINTER(AttentionArgs), _int],
        "rope_and_cache": [ctypes.POINTER(RopeArgs), _int],
        "rms_norm": [_pointer, _pointer, _pointer, _pointer, _long, _long, _float, _int, _int],
        "argmax": [_pointer, _pointer, _pointer, _long, _long, _int, _int],
        "silu_and_mul": [_pointer, _pointer, _long, _long, _int, _int],
        "run": [_pointer, _long, _int],
        "sample": [ctypes.POINTER(SampleArgs), _int],
        "forward": [ctypes.POINTER(ForwardArgs)],
        "linear": [ctypes.POINTER(LinearArgs)],
    }
    for name, argtypes in signatures.items():
        function = getattr(library, f"angelspec_{name}")
        function.argtypes, function.restype = argtypes, None
    library.angelspec_linear_kernel.restype = _int
    return library


def main() -> int:
    """Build the library and say where it is; a failure is not fatal, only slower."""
    try:
        path = build()
        _load(path)
    except NativeBuildError as error:
        print(f"native CPU kernels are off, torch will be used instead: {error}", file=sys.stderr)
        return 0
    print(f"native CPU kernels: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
