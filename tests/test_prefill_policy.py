"""How many prompt tokens a step computes beside decoding rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.prefill_policy import FIRST_CHUNK, SMALLEST_CHUNK, PrefillPolicy
from angelspec_backend.core.step_times import StepTimes
from harness import Harness, config, request


@settings(deadline=None)
@given(
    alone=st.floats(0.001, 0.1),
    token=st.floats(1e-6, 0.01),
    max_slowdown=st.floats(1.2, 5.0),
    num_decoded=st.integers(1, 64),
)
def test_steps_come_to_take_the_allowed_multiple_of_a_step_without_prompts(
    alone, token, max_slowdown, num_decoded
):
    times = StepTimes()
    policy = PrefillPolicy(times, max_slowdown)
    assert policy.limit(num_decoded) == FIRST_CHUNK
    for _ in range(30):
        times.observe(num_decoded, alone)
        chunk = policy.limit(num_decoded)
        policy.observe(num_decoded, chunk, alone + token * chunk)
    chunk = policy.limit(num_decoded)
    taken = alone + token * chunk
    assert taken <= max(alone * max_slowdown, alone + token * SMALLEST_CHUNK) * 1.001
    assert taken + 2 * token >= alone * max_slowdown  # and no less than it may


def test_chunks_shrink_as_prompt_tokens_become_dearer():
    times = StepTimes()
    policy = PrefillPolicy(times, 2.0)
    times.observe(1, 0.01)
    limits = []
    for token in (1e-4, 1e-4, 4e-4, 4e-4, 4e-4, 4e-4):
        policy.observe(1, 50, 0.01 + 50 * token)
        limits.append(policy.limit(1))
    assert limits[0] == pytest.approx(100, abs=1)
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 50


def rows_of(harness):
    rows = harness.loop.scheduler.schedule()
    return [row.num_tokens for row in rows]


def test_a_long_prompt_leaves_decoding_rows_room_and_gets_whole_steps_alone():
    limits = {"num_blocks": 200, "block_size": 4, "max_context": 400, "max_batch_tokens": 200}
    alone = Harness(config(**limits), error_rate=0.0)
    alone.submit(0, request(list(range(45)) * 5, max_tokens=5, drafts=0))
    alone.loop._receive()
    assert rows_of(alone) == [200]

    beside = Harness(config(**limits), error_rate=0.0)
    beside.submit(0, request([1, 2, 3], max_tokens=50, drafts=0))
    beside.step()
    beside.submit(1, request(list(range(45)) * 5, max_tokens=5, drafts=0))
    beside.loop._receive()
    assert rows_of(beside) == [1, FIRST_CHUNK]
