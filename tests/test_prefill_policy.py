"""How many prompt tokens a step computes beside decoding rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.prefill_policy import (
    FIRST_CHUNK,
    PROBE_INTERVAL,
    SMALLEST_CHUNK,
    PrefillPolicy,
)
from angelspec_backend.core.request import Sequence
from angelspec_backend.core.scheduler import Scheduler
from angelspec_backend.core.step import build_step
from angelspec_backend.core.step_times import StepTimes
from harness import Harness, config, request

ROOM = 10**9  # prompt tokens that a step has room for


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
    assert policy.limit(num_decoded, num_decoded, 1, ROOM) == FIRST_CHUNK
    for _ in range(30):
        times.observe(num_decoded, alone)
        policy.observe(num_decoded, 0, alone)
        chunk = policy.limit(num_decoded, num_decoded, 1, ROOM)
        policy.observe(num_decoded, chunk, alone + token * chunk)
    chunk = policy.limit(num_decoded, num_decoded, 1, ROOM)
    taken = alone + token * chunk
    allowed = (alone + token) * max_slowdown  # the sequence that waits will decode as well
    assert taken <= max(allowed, alone + token * SMALLEST_CHUNK) * 1.001
    assert taken + 2 * token >= allowed  # and no less than it may


def test_chunks_shrink_as_prompt_tokens_become_dearer():
    times = StepTimes()
    policy = PrefillPolicy(times, 2.0)
    times.observe(1, 0.01)
    limits = []
    for token in (1e-4, 1e-4, 4e-4, 4e-4, 4e-4, 4e-4):
        policy.observe(1, 50, 0.01 + 50 * token)
        limits.append(policy.limit(1, 1, 1, ROOM))
    assert limits[0] == pytest.approx(100, abs=3)
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 50


def test_the_more_sequences_wait_the_longer_a_step_may_take():
    times = StepTimes()
    policy = PrefillPolicy(times, 2.0)
    for rows in (8, 16):
        times.observe(rows, 0.001 * rows)
    policy.observe(8, 100, 0.008 + 100 * 1e-4)
    assert policy.limit(8, 8, 1, ROOM) == pytest.approx((2 * 0.009 - 0.008) / 1e-4, abs=2)
    assert policy.limit(8, 8, 8, ROOM) == pytest.approx((2 * 0.016 - 0.008) / 1e-4, abs=2)
    assert policy.limit(8, 8, 9, ROOM) == ROOM  # most wait


def test_a_step_now_and_then_goes_without_prompts_so_that_its_time_is_known():
    times = StepTimes()
    policy = PrefillPolicy(times, 2.0)
    times.observe(1, 0.01)
    for _ in range(PROBE_INTERVAL):
        assert policy.limit(40, 40, 10, ROOM) > 0
        policy.observe(40, 100, 0.1)
    assert policy.limit(40, 40, 10, ROOM) == policy.limit(10, 10, 40, ROOM) == 0
    policy.observe(40, 0, 0.05)
    assert policy.limit(40, 40, 10, ROOM) > 0


def seconds_of(num_decoded: int, num_prompt: int, context: int) -> float:
    """Of a step of the default target on two cores, about; context: tokens that decoding rows attend to."""
    return 0.010 + 2e-4 * num_decoded + 1e-6 * context + 1.7e-4 * num_prompt


class Clocked:
    """A scheduler over the simulated target, with steps that take the time above."""

    def __init__(self) -> None:
        limits = {"num_blocks": 2000, "block_size": 16, "max_context": 1000, "max_batch_tokens": 512}
        self.config = config(**limits, max_num_seqs=64, drafters=())
        self.executor = Harness(self.config).executor
        self.scheduler = Scheduler(self.config)
        self.now = 0.0
        self.first: dict[int, float] = {}  # times of first tokens
        self.steps: list[tuple[int, int, float, float]] = []  # rows, prompt tokens, seconds, if all decoded

    def add(self, *ids: int, prompt: int, max_tokens: int) -> None:
        """Requests with so long prompts arrive."""
        for seq_id in ids:
            tokens = [(seq_id * 31 + at * 7) % 50 for at in range(prompt)]
            wanted = request(tokens, max_tokens, drafts=0)
            self.scheduler.add(Sequence(seq_id, wanted, self.scheduler.new_table()))

    def step(self) -> None:
        """One step."""
        rows = self.scheduler.schedule()
        output = self.executor.step(build_step(rows))
        decoding = [row for row in rows if row.num_tokens == 1]
        num_prompt = sum(row.num_tokens for row in rows) - len(decoding)
        context = sum(len(row.seq.token_ids) for row in decoding)
        live = list(self.scheduler)
        later = seconds_of(len(live), 0, sum(len(seq.token_ids) for seq in live))
        seconds = seconds_of(len(decoding), num_prompt, context)
        self.steps.append((len(decoding), num_prompt, seconds, later))
        self.now += seconds
        for event in self.scheduler.apply(rows, output, seconds):
            self.first.setdefault(event.request_id, self.now)

    def run(self) -> None:
        """Until nothing is left."""
        while list(self.scheduler):
            self.step()


@pytest.mark.parametrize("num_requests", [8, 32, 64])
def test_a_burst_is_taken_in_at_nearly_the_speed_of_its_prompts_alone(num_requests):
    clocked = Clocked()
    clocked.add(1000, 1001, prompt=30, max_tokens=8)  # all that is known of decoding is the time of two rows
    clocked.run()
    begin = clocked.now
    clocked.add(*range(num_requests), prompt=200, max_tokens=60)
    clocked.run()
    alone = -(-num_requests * 200 // 512) * seconds_of(0, 512, 0)
    assert max(clocked.first[i] for i in range(num_requests)) - begin < 1.3 * alone + 0.05


def test_rows_that_decode_beside_a_long_prompt_wait_no_longer_than_allowed():
    clocked = Clocked()
    clocked.add(*range(4), prompt=20, max_tokens=120)
    for _ in range(40):
        clocked.step()
    clocked.steps.clear()
    clocked.add(100, prompt=900, max_tokens=2)
    clocked.run()
    mixed = [step for step in clocked.steps if step[0] and step[1]]
    assert len(mixed) > 5
    for _, _, seconds, later in mixed[2:]:  # the first ones show what a prompt token costs here
        assert seconds < 1.15 * clocked.config.max_slowdown * later


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
