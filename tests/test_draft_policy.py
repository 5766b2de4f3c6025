"""The draft length follows what drafts cost and how often they are right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.draft_policy import MIN_GAIN, Acceptance, DraftPolicy, StepTimes


def expected_tokens(rate: float, k: int) -> float:
    """Tokens a row emits in a step: one, and every draft that is reached and right."""
    return 1 + sum(rate**i for i in range(1, k + 1))


@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    base=st.floats(0.1, 10.0),
    slope=st.floats(0.0, 5.0),
    data=st.data(),
)
def test_the_choice_is_the_best_of_all_draft_lengths(rates, base, slope, data):
    limits = [data.draw(st.integers(0, 3)) for _ in rates]
    policy = DraftPolicy(1)
    for n in range(1, 16):
        policy.observe_step(n, base + slope * n)

    def speed(lengths) -> float:
        gain = np.prod([expected_tokens(rate, k) for rate, k in zip(rates, lengths, strict=True)])
        return gain ** (1 / len(rates)) / policy._times.predict(np.array([len(rates) + sum(lengths)]))[0]

    chosen = policy.choose(np.array(rates), np.array(limits))
    best = max(speed(lengths) for lengths in itertools.product(*(range(limit + 1) for limit in limits)))
    assert all(chosen <= limits)
    assert speed(chosen) * np.exp(MIN_GAIN) >= best * 0.999


COSTS = {
    "waits for memory": lambda n: 10.0 + 0.01 * n,
    "computes": lambda n: 0.5 + 1.0 * n,
    "both": lambda n: 10.0 + 0.5 * n,
    "a staircase": lambda n: 15.0 + 2.0 * np.ceil(n / 16),
}


def simulate(rows: int, rate: float, cost, lengths, steps: int = 600) -> float:
    """Tokens per second; ``lengths(policy, sequences)`` gives the draft lengths."""
    rng = np.random.default_rng(0)
    policy, sequences = DraftPolicy(1), [Acceptance(fading=0.9) for _ in range(rows)]
    tokens = seconds = 0.0
    for _ in range(steps):
        chosen = lengths(policy, sequences)
        for own, k in zip(sequences, chosen, strict=True):
            accepted = int(np.argmin([*(rng.random(k) < rate), False]))
            tokens += 1 + accepted
            if k:
                policy.observe_draft(0, own, int(k), accepted)
        spent = cost(rows + int(sum(chosen))) * rng.uniform(0.95, 1.05)
        policy.observe_step(rows + int(sum(chosen)), spent)
        seconds += spent
    return tokens / seconds


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_it_learns_to_be_about_as_fast_as_the_best_fixed_length(rows, rate, cost):
    def adaptive(policy, sequences):
        rates = np.array([policy.rate(0, own) for own in sequences])
        return policy.choose(rates, np.full(rows, 8))

    fixed = {
        k: simulate(rows, rate, cost, lambda policy, sequences, k=k: [k] * rows) for k in (0, 1, 2, 4, 8)
    }
    speed = simulate(rows, rate, cost, adaptive)
    assert speed > 0.95 * fixed[0], "slower than plain decoding"
    assert speed > 0.9 * max(fixed.values())


def test_a_row_that_gains_nothing_does_not_pay_much_for_one_that_does():
    policy = DraftPolicy(1)
    for n in range(1, 40):
        policy.observe_step(n, 1.0 + 0.1 * n)
    easy_alone = policy.choose(np.array([0.9]), np.array([8]))[0]
    easy_among_others = policy.choose(np.array([0.9] + [0.0] * 15), np.array([8] * 16))[0]
    assert easy_alone > easy_among_others


def test_a_hopeless_sequence_is_tried_again_now_and_then():
    policy = DraftPolicy(1)
    for n in (1, 2, 4):
        policy.observe_step(n, float(n))
    chosen = [int(policy.choose(np.array([0.01]), np.array([4]))[0]) for _ in range(1000)]
    assert 2 <= sum(chosen) <= 20


def test_acceptance_counts_only_tokens_that_were_put_to_the_test():
    record = Acceptance(fading=1.0)
    record.observe(num_drafted=4, num_accepted=4)
    record.observe(num_drafted=4, num_accepted=1)
    assert (record.accepted, record.tried) == (5, 6)
    assert record.rate(prior=0.5) == pytest.approx(5.5 / 7)


def test_a_pause_of_the_machine_is_forgotten():
    times = StepTimes()
    for _ in range(20):
        times.observe(8, 1.0)
    times.observe(8, 100.0)
    for _ in range(20):
        times.observe(8, 1.0)
    assert times.predict(np.array([8]))[0] == pytest.approx(1.0, rel=0.02)
