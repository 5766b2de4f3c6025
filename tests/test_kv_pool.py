"""The KV pool: where keys and values lie, and what untouched blocks cost."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from angelspec_backend.engine.kv_pool import KVPool, LayerSpec

SPECS = [LayerSpec(num_kv_heads=2, key_dim=6, value_dim=4), LayerSpec(num_kv_heads=1, key_dim=8, value_dim=8)]


def test_tokens_are_written_to_their_block_and_offset():
    pool = KVPool.allocate(SPECS, num_blocks=5, block_size=4, dtype=torch.float32)
    keys, values = torch.randn(3, 2, 6), torch.randn(3, 2, 4)
    slots = [4 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1]
    pool.write(0, keys, values, torch.tensor(slots))
    for token, slot in enumerate(slots):
        assert torch.equal(pool.keys[0][slot // 4, :, slot % 4], keys[token])
        assert torch.equal(pool.values[0][slot // 4, :, slot % 4], values[token])
    assert pool.keys[0].count_nonzero() == keys.numel()
    assert pool.keys[1].count_nonzero() == 0


def test_layers_may_differ_in_heads_and_sizes():
    pool = KVPool.allocate(SPECS, num_blocks=5, block_size=4, dtype=torch.bfloat16)
    assert [tuple(key.shape) for key in pool.keys] == [(5, 2, 4, 6), (5, 1, 4, 8)]
    assert [tuple(value.shape) for value in pool.values] == [(5, 2, 4, 4), (5, 1, 4, 8)]
    assert pool.bytes_per_token == 2 * (2 * (6 + 4) + 1 * (8 + 8))


def test_a_block_of_all_layers_is_one_piece_of_memory():
    pool = KVPool.allocate(SPECS, num_blocks=5, block_size=4, dtype=torch.bfloat16)
    caches = [cache for both in zip(pool.keys, pool.values, strict=True) for cache in both]
    begin = pool.keys[0].data_ptr()
    for cache in caches:
        assert cache[0].is_contiguous()
        assert cache.data_ptr() == begin
        assert cache[1].data_ptr() - cache[0].data_ptr() == pool.bytes_per_token * 4
        begin += cache[0].nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_untouched_blocks_take_no_memory():
    before = resident_bytes()
    spec = LayerSpec(num_kv_heads=8, key_dim=128, value_dim=128)
    pool = KVPool.allocate([spec], num_blocks=65536, block_size=16, dtype=torch.bfloat16)
    assert pool.bytes_per_token * 65536 * 16 == 4 << 30
    pool.keys[0][7] = 1
    assert pool.keys[0][6].count_nonzero() == 0
    assert resident_bytes() - before < 64 << 20


def test_a_pool_larger_than_the_machine_is_refused_with_its_size():
    spec = LayerSpec(num_kv_heads=128, key_dim=1024, value_dim=1024)
    with pytest.raises(MemoryError, match=r"16777216 blocks of 256 tokens needs .* GiB.*lower num_blocks"):
        KVPool.allocate([spec] * 100, num_blocks=1 << 24, block_size=256, dtype=torch.float32)
