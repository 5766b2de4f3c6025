"""Paged attention: the native kernel against plain torch, and a query the same to the bit in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from angelspec_backend.engine import native
from angelspec_backend.engine.attention import (
    paged_attention,
    sdpa_paged_attention,
    torch_paged_attention,
)
from angelspec_backend.engine.batch import PackedBatch
from angelspec_backend.engine.native_build import SOURCES

DTYPES = (torch.float32, torch.bfloat16)
IMPLEMENTATIONS = [
    pytest.param(
        paged_attention, id="native", marks=pytest.mark.skipif(not native.available(), reason="no g++")
    ),
    pytest.param(torch_paged_attention, id="torch"),
]


@dataclass(frozen=True)
class Case:
    """Random caches, and a batch of rows given as (tokens before, queries)."""

    query: Tensor  # [num_tokens, num_heads, key_dim]
    keys: Tensor  # [num_blocks, num_kv_heads, block_size, key_dim]
    values: Tensor
    batch: PackedBatch
    options: dict

    def attend(self, function=paged_attention) -> Tensor:
        return function(self.query, self.keys, self.values, self.batch, 0.2, **self.options)

    def take(self, *queries: tuple[int, int, int]) -> Case:
        """Only queries [start, end) of some rows, each as a row of its own."""
        b, starts = self.batch, self.batch.query_start.tolist()
        index = torch.cat([starts[row] + torch.arange(start, end) for row, start, end in queries])
        context = torch.stack([b.context_lens[row] + start for row, start, _ in queries]).int()
        table = b.block_table[[row for row, _, _ in queries]]
        batch = _batch([end - start for _, start, end in queries], context, table)
        return replace(self, query=self.query[index], batch=batch)


def _batch(lens: list[int], context: Tensor, table: Tensor) -> PackedBatch:
    start = torch.tensor([0, *lens]).cumsum(0).int()
    unused = torch.zeros(int(start[-1]), dtype=torch.int64)
    return PackedBatch(unused, unused, unused, start, context, table, unused)


def make_case(
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    sinks: bool = False,
    seed: int = 0,
    **options,
) -> Case:
    """heads: (query, key/value); dims: (key, value) size of a head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    needed = [-(-(context + count) // block_size) for context, count in rows]
    free = (1 + torch.randperm(sum(needed), generator=generator)).int()
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for row, (own, blocks) in enumerate(zip(table, free.split(needed), strict=True)):
        own[: needed[row]] = blocks
    lens = [count for _, count in rows]
    batch = _batch(lens, torch.tensor([context for context, _ in rows]).int(), table)
    cache = (sum(needed) + 1, heads[1], block_size)
    options["sinks"] = torch.randn(heads[0], generator=generator) if sinks else None
    return Case(
        normal(sum(lens), heads[0], dims[0]), normal(*cache, dims[0]), normal(*cache, dims[1]), batch, options
    )


def brute_force(case: Case) -> Tensor:
    """Attention written out, in fp64, with nothing shared with either implementation."""
    out, starts, options = [], case.batch.query_start.tolist(), case.options
    group, block_size = case.query.shape[1] // case.keys.shape[1], case.keys.shape[2]
    for row, context in enumerate(case.batch.context_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            at = context + token - starts[row]
            window = options.get("sliding_window") or at + 1
            places = [divmod(p, block_size) for p in range(max(0, at - window + 1), at + 1)]
            blocks = [(int(case.batch.block_table[row, block]), offset) for block, offset in places]
            for head in range(case.query.shape[1]):
                keys = torch.stack([case.keys[b, head // group, o] for b, o in blocks]).double()
                values = torch.stack([case.values[b, head // group, o] for b, o in blocks]).double()
                scores = keys @ case.query[token, head].double() * 0.2
                if softcap := options.get("softcap"):
                    scores = softcap * torch.tanh(scores / softcap)
                if options["sinks"] is not None:
                    scores = torch.cat([scores, options["sinks"][head, None].double()])
                out.append(scores.softmax(0)[: len(values)] @ values)
    return torch.stack(out).view(*case.query.shape[:2], -1)


row = st.tuples(
    st.integers(0, 150) | st.sampled_from([63, 64, 511, 512, 600]), st.sampled_from([1, 1, 2, 5, 9, 40])
)
cases = st.builds(
    make_case,
    rows=st.lists(row, min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (3, 3), (6, 2), (9, 3), (8, 1), (40, 1)]),
    dims=st.sampled_from([(8, 8), (16, 16), (40, 40), (64, 64), (80, 80), (128, 128), (24, 16), (256, 256)]),
    block_size=st.sampled_from([1, 4, 7, 16, 64, 100]),
    sinks=st.booleans(),
    sliding_window=st.sampled_from([0, 0, 1, 7, 64, 130]),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    seed=st.integers(0, 99),
)


def assert_close(out: Tensor, expected: Tensor) -> None:
    rtol, atol = (1.6e-2, 4e-5) if out.dtype == torch.bfloat16 else (1e-5, 2e-5)
    torch.testing.assert_close(out.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.skipif(not native.available(), reason="no g++")
@settings(max_examples=60, deadline=None)
@given(cases)
def test_native_and_torch_agree_on_ragged_batches(case):
    assert_close(case.attend(), case.attend(torch_paged_attention))


@pytest.mark.parametrize("sliding_window", [0, 7])
def test_the_attention_of_torch_agrees_and_refuses_what_it_cannot_do(sliding_window):
    rows = [(0, 1), (70, 5), (3, 12), (600, 1)]
    case = make_case(rows, sliding_window=sliding_window)
    assert_close(case.attend(sdpa_paged_attention), case.attend(torch_paged_attention))
    for option in ({"softcap": 3.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="no softcap"):
            make_case(rows, **option).attend(sdpa_paged_attention)


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@settings(max_examples=10, deadline=None)
@given(case=cases.filter(lambda case: case.query.shape[0] * case.query.shape[1] < 200))
def test_it_is_attention(function, case):
    assert_close(case.attend(function), brute_force(case))


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@settings(max_examples=20, deadline=None)
@given(case=cases, data=st.data())
def test_a_query_is_the_same_to_the_bit_alone_and_in_any_batch(function, case, data):
    whole = case.attend(function)
    starts = case.batch.query_start.tolist()
    picks = []
    for _ in range(3):
        row = data.draw(st.integers(0, len(starts) - 2))
        start = data.draw(st.integers(0, starts[row + 1] - starts[row] - 1))
        picks.append((row, start, data.draw(st.integers(start + 1, starts[row + 1] - starts[row]))))
        row, start, _ = picks[-1]
        alone = case.take((row, start, start + 1)).attend(function)
        assert torch.equal(alone[0], whole[starts[row] + start])
    expected = torch.cat([whole[starts[row] + start : starts[row] + end] for row, start, end in picks])
    assert torch.equal(case.take(*picks).attend(function), expected)


@pytest.mark.skipif(not native.available(), reason="no g++")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [0, 70])
@pytest.mark.parametrize("heads", [(9, 3), (16, 8), (40, 4)])
def test_rows_that_are_many_are_computed_as_each_alone(heads, sliding_window, dtype):
    # So many that a thread takes all heads of a row together, where their queries fit.
    contexts = [0, 1, 15, 63, 64, 100, 511, 512, 513, 700, 1100, 30]
    rows = [(context, 1 + row % 4) for row, context in enumerate(contexts * 2)]
    case = make_case(rows, dtype, heads, sinks=heads[1] == 3, sliding_window=sliding_window)
    whole, starts = case.attend(), case.batch.query_start.tolist()
    assert_close(whole, case.attend(torch_paged_attention))
    for row, (_, count) in enumerate(rows):
        assert torch.equal(case.take((row, 0, count)).attend(), whole[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_the_blocks_of_a_cache_may_lie_apart(function):
    case = make_case([(100, 3), (20, 1)])
    shape = case.keys.shape
    both = torch.cat([case.keys.flatten(1), torch.randn(len(case.keys), 24), case.values.flatten(1)], 1)
    keys, _, values = both.split([shape[1:].numel(), 24, shape[1:].numel()], 1)
    apart = replace(case, keys=keys.unflatten(1, shape[1:]), values=values.unflatten(1, shape[1:]))
    assert torch.equal(apart.attend(function), case.attend(function))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_the_number_of_threads_changes_nothing(function, dtype):
    before = torch.get_num_threads()
    # One long row is split over its context, several rows are not.
    cases = [make_case(rows, dtype) for rows in ([(4000, 1)], [(2500, 3)], [(600, 1)] * 5 + [(0, 70)])]
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([case.attend(function) for case in cases])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_queries_inside_a_fused_matrix_and_tokens_of_no_row(function):
    case = make_case([(20, 1), (3, 4)])
    fused = torch.randn(7, 6 * 64 + 100)
    query = fused[:, : 6 * 64].view(7, 6, 64)
    query[:5] = case.query
    unused = torch.zeros(7, dtype=torch.int64)
    batch = replace(case.batch, token_ids=unused)
    out = function(query, case.keys, case.values, batch, 0.2)
    assert torch.equal(out[:5], case.attend(function))
    assert not out[5:].any()


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_give_finite_results(function, dtype):
    case = make_case([(100, 3)], dtype)
    for factor in (1e-20, 1e4):
        out = replace(case, query=case.query * factor).attend(function)
        assert out.isfinite().all()
        assert out.abs().max() <= case.values.abs().max()


@pytest.mark.skipif(not native.available(), reason="no g++")
def test_the_library_shares_the_openmp_runtime_of_torch():
    code = (
        "import torch\n"
        "from angelspec_backend.engine import native\n"
        "x = torch.randn(512, 512)\n"
        "native.rms_norm(x, torch.ones(512), 1e-5, torch.empty_like(x))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({path for path in maps if 'gomp' in path or 'iomp' in path}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_without_a_compiler_torch_is_used_and_the_reason_logged(tmp_path):
    code = (
        "import logging, torch\n"
        "logging.basicConfig(level=logging.WARNING, format='%(message)s')\n"
        "from angelspec_backend.engine import native\n"
        "print(native.available(), native.supports(torch.float32, torch.device('cpu'), 64))\n"
    )
    env = {**os.environ, "CXX": str(tmp_path / "missing-compiler")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.strip().count("\n") == 0
    assert "torch is used instead" in done.stderr


def copy_package(folder: Path) -> dict[str, str]:
    """What native.py needs, without a built library, in ``folder``; returns the environment to run it in."""
    source, target = Path(native.__file__).parent, folder / "angelspec_backend" / "engine"
    target.mkdir(parents=True)
    (target.parent / "__init__.py").touch()
    (target / "__init__.py").touch()
    for name in ("native.py", "native_args.py", "native_build.py", *SOURCES):
        (target / name).write_bytes((source / name).read_bytes())
    return {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


BUILD = "from angelspec_backend.engine import native; print(native.build(), native.available())"


@pytest.mark.skipif(not native.available(), reason="no g++")
def test_processes_that_start_together_build_one_good_library(tmp_path):
    env = copy_package(tmp_path)
    command = [sys.executable, "-c", BUILD]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path) for _ in range(2)
    ]
    answers = {tuple(process.communicate(timeout=120)[0].split()) for process in running}
    assert len(answers) == 1
    path, available = answers.pop()
    assert available == "True"
    assert [entry.name for entry in Path(path).parent.iterdir()] == [Path(path).name]


@pytest.mark.skipif(not native.available(), reason="no g++")
def test_an_installed_package_that_cannot_be_written_keeps_the_library_in_the_cache(tmp_path):
    env = copy_package(tmp_path)
    (tmp_path / "angelspec_backend" / "engine" / "_native").touch()  # no folder can be made there
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True, env=env)
    path, available = done.stdout.split()
    assert available == "True"
    assert Path(path).parent == tmp_path / "cache" / "angelspec"
