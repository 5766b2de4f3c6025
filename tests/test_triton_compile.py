"""The kernels in the Triton language compile for GPUs that are not there, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from angelspec_backend.engine.triton_attention import KEYS, SPLIT
from angelspec_backend.engine.triton_kernels import attend_split, fold_splits
from angelspec_backend.engine.triton_linear import SUM_BLOCK, linear_kernel, sum_kernel, tiles

INTEGERS = ("block_table", "query_start", "context_lens")
NUMBERS = ("num_rows", "first_tile", "max_blocks", "num_splits", "stride_token", "stride_head")
SPECIAL = {**dict.fromkeys(INTEGERS, "*i32"), **dict.fromkeys(NUMBERS, "i32")}
SPECIAL |= {"partial": "*fp32", "scale": "fp32"}

def compile(kernel, dtype, **constants):
    options = {name: constants.pop(name) for name in ("num_stages",) if name in constants}
    types = {n: "constexpr" if n in constants else SPECIAL.get(n, "*" + dtype) for n in kernel.arg_names}
    index = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    values = {index[name]: value for name, value in constants.items()}
    aligned = {index[n]: [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or "stride" in n}
    for capability in (80, 90):
        source = ASTSource(kernel, types, values, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        products = [name for name in ("wgmma.mma_async", "mma.sync") if name in compiled.asm["ptx"]]
        print(json.dumps([kernel.__name__, dtype, capability, compiled.metadata.shared, products]))

for dtype, dim, window, softcap, sinks in (
    ("bf16", 64, 0, 0.0, {"sinks": None}), ("bf16", 256, 128, 30.0, {}), ("fp32", 128, 0, 0.0, {})
):
    layout = dict(GROUP=3, QUERIES=5, TILE=16, VALUE_DIM=dim, VALUE_PAD=dim, SPLIT=SPLIT, WINDOW=window)
    reads = dict(KEY_DIM=dim, KEY_PAD=dim, KEYS=KEYS, BLOCK_SIZE=16, UPCAST=False, SOFTCAP=softcap)
    compile(attend_split, dtype, **layout, **reads)
    compile(fold_splits, dtype, **layout, **sinks)
for dtype, out, bias in (("bf16", 4096, {"bias": None}), ("bf16", 151936, {}), ("fp32", 4096, {})):
    sizes = tiles(out, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    compile(linear_kernel, dtype, OUT=out, IN=576, UPCAST=False, **sizes, **bias)
compile(sum_kernel, "fp32", COLUMNS=576, DIVISOR=576, BLOCK=SUM_BLOCK)
"""
SMALLEST_SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on any GPU since Ampere."""


def test_the_kernels_compile_for_gpus_that_are_not_there(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 20
    for name, dtype, capability, shared, products in kernels:
        assert shared <= SMALLEST_SHARED_MEMORY
        expected = []
        if dtype == "bf16" and name == "attend_split":
            expected = ["mma.sync"]
        if dtype == "bf16" and name == "linear_kernel":
            expected = ["wgmma.mma_async"] if capability == 90 else ["mma.sync"]
        assert products == expected  # bf16 on the tensor cores, fp32 exact
