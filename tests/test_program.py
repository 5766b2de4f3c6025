"""The operations of a recorded program against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from angelspec_backend.engine import native
from angelspec_backend.engine.program import Norm, Program, Rows

pytestmark = pytest.mark.skipif(native.linear_kernel() == "none", reason="no native layers")

ROOM, WIDTH = 6, 40


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def test_rows_are_picked_added_and_normed():
    program, rows, x = Program(), Rows(ROOM), normal(9, WIDTH)
    index, nonzero = np.array([8, 3, 3, 0, 1, 2]), np.array([1, 0, 1, 1, 1, 1])
    residual, norm = normal(ROOM, WIDTH), Norm(normal(WIDTH)[:, None][:, 0], 1e-5)
    before, wide = residual.clone(), torch.full((ROOM, 2 * WIDTH), 7, dtype=torch.bfloat16)
    copy, total, zeroed = rows.tensor(WIDTH), residual.clone(), rows.tensor(WIDTH)
    program.rows(rows, x, copy, index=index)
    program.rows(rows, x, None, residual=total, index=index)
    program.rows(rows, x, wide[:, WIDTH:], norm=norm, residual=residual, index=index)
    program.rows(rows, x, zeroed, norm=norm, nonzero=nonzero)
    rows.count = 5
    program.run()
    summed = x[index] + before
    assert torch.equal(copy[:5], x[index][:5])
    assert torch.equal(total[:5], summed[:5])
    assert torch.equal(total[5], before[5])  # not one of the five
    assert torch.equal(residual[:5], summed[:5])
    normed = native.rms_norm(summed, norm.weight, norm.eps, torch.empty_like(summed))
    assert torch.equal(wide[:5, WIDTH:], normed[:5])
    assert bool((wide[:, :WIDTH] == 7).all())
    assert bool((zeroed[1] == 0).all())
    assert bool((zeroed[0] != 0).any())


def test_a_mixture_is_a_weighted_sum():
    program, rows, out = Program(), Rows(ROOM), torch.empty(ROOM, WIDTH, dtype=torch.bfloat16)
    x, weight = normal(ROOM, 3 * WIDTH), torch.tensor([0.5, -1.0, 0.25])
    program.mix(rows, x, weight, out)
    rows.count = ROOM
    program.run()
    wanted = (x.float().view(ROOM, 3, WIDTH) * weight[:, None]).sum(1)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)


def test_the_likeliest_is_put_out_by_its_name_with_its_probability():
    program, rows, logits = Program(), Rows(ROOM), 3 * normal(ROOM, 97)
    names = torch.arange(97) * 5
    token_ids, probability = program.argmax(rows, logits, names)
    rows.count = ROOM
    program.run()
    assert token_ids.tolist() == (5 * logits.argmax(-1)).tolist()
    np.testing.assert_allclose(probability, logits.float().softmax(-1).amax(-1), rtol=1e-5)


def test_a_cut_ends_behind_the_last_row_that_is_likely_enough():
    program, rows = Program(), [Rows(ROOM) for _ in range(4)]
    probabilities = np.random.default_rng(0).random((3, ROOM)).astype(np.float32)
    least, product = np.zeros(ROOM, np.float32), None
    for step in range(3):
        product = program.cut(rows[step], probabilities[step], product, least, rows[step + 1])
    for seed in range(200):
        rng = np.random.default_rng(seed)
        counts = sorted(rng.integers(0, ROOM + 1, 4).tolist(), reverse=True)
        least[:] = rng.random(ROOM) ** 3
        for each, count in zip(rows, counts, strict=True):
            each.count = count
        program.run()
        end = counts[0]
        for step in range(3):
            alive = np.cumprod(probabilities[: step + 1], axis=0)[-1][:end] >= least[:end]
            end = int(np.flatnonzero(alive[: counts[step + 1]]).max(initial=-1)) + 1
            assert rows[step + 1].count == end
