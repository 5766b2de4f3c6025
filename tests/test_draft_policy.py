"""How much is drafted follows what drafts cost and how likely they are to be right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.draft_policy import DraftPolicy, Option
from angelspec_backend.core.draft_records import Fared, Record, Records, Way, yields
from angelspec_backend.core.step_costs import Verified
from angelspec_backend.core.step_times import StepTimes, TokenCost

LONGEST = 8
"""Draft tokens that a request allows."""


def option(policy, records, way=Way.NETWORK, longest=LONGEST, looks_up_first=False):
    """What a way promises to sequences of these records."""
    expected = np.array([policy.expected(0, way, own, looks_up_first) for own in records])
    return Option(0, way, *expected.T, np.full(len(records), longest))


def observe(
    policy,
    num_rows,
    num_drafts,
    target_s,
    way,
    *,
    drafter=0,
    beside=0.0,
    num_drafting=None,
    num_asked=None,
    prompts=False,
):
    """Tell of a step; unless something else is said, every row drafted and none found its draft."""
    drafting = num_rows if num_drafting is None else num_drafting
    asked = drafting if num_asked is None else num_asked
    policy.costs.observe(
        Verified(num_rows, num_drafts, target_s + beside, target_s, way, drafter, drafting, asked, prompts)
    )


@given(
    rows=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.integers(0, 3)), min_size=1, max_size=6
    ),
    base=st.floats(0.1, 10.0),
    slope=st.floats(0.0, 5.0),
)
def test_the_rows_that_draft_are_the_best_of_all_choices_of_rows(rows, base, slope):
    drafted, right, limits = map(np.array, zip(*rows, strict=True))
    policy = DraftPolicy(1)
    for n in [*range(1, 32)] * 5:
        observe(policy, n, 0, base + slope * n, None)
        observe(policy, 1, n - 1, base + slope * n, Way.NETWORK)
    given = Option(0, Way.NETWORK, drafted, drafted * right, np.ones(len(rows)), limits)
    tokens, accepted = policy._expected(given, len(rows) / policy.costs.plain_seconds(len(rows)))

    def time_per_token(which) -> float:
        if not which.any():
            return policy.costs.plain_seconds(len(rows))
        num_tokens = np.full(which.sum(), len(rows) + tokens[which].sum())
        steps = np.where(which, 1 / (1 + accepted), 1.0)
        return (
            np.mean(steps)
            * policy.costs.seconds(0, Way.NETWORK, num_tokens, np.arange(1, which.sum() + 1))[-1]
        )

    choices = [np.array(which) for which in itertools.product([False, True], repeat=len(rows))]
    best = min(time_per_token(which & (limits > 0)) for which in choices)
    chosen = policy.choose([given]).lengths
    assert all(chosen <= limits)
    # Rows are taken one by one, which can miss the very best by a little.
    assert time_per_token(chosen > 0) <= best * 1.03


COSTS = {
    "waits for memory": lambda n: 10.0 + 0.01 * n,
    "computes": lambda n: 0.5 + 1.0 * n,
    "both": lambda n: 10.0 + 0.5 * n,
    "a staircase": lambda n: 15.0 + 2.0 * np.ceil(n / 16),
}


def simulate(rows: int, likely: float, found: float, cost, plan, steps: int = 1000) -> float:
    """Tokens per second of a drafter that knows how likely each of its tokens is to be right.

    likely: their mean chance; found: how often it drafts at all; ``plan(policy, records)`` gives the longest
    drafts wanted and the chance that a token must have.
    """
    rng = np.random.default_rng(0)
    policy, records = DraftPolicy(1), [Records(fading=0.9) for _ in range(rows)]
    tokens = seconds = 0.0
    for _ in range(steps):
        wanted, min_chance = plan(policy, records)
        chances = rng.beta(likely, 1 - likely, (rows, LONGEST))
        right = np.cumprod(rng.random((rows, LONGEST)) < chances, axis=1)
        inside = (np.cumprod(chances, axis=1) >= min_chance) & (rng.random((rows, 1)) < found)
        inside &= np.arange(LONGEST) < np.array(wanted)[:, None]
        drafted, accepted = inside.sum(1), (inside & (right == 1)).sum(1)
        for own, *fared in zip(records, wanted, drafted.tolist(), accepted.tolist(), strict=True):
            if fared[0]:
                policy.observe_draft(0, Way.NETWORK, own, False, False, Fared(min_chance, *fared[1:]))
        num_drafts = int(drafted.sum())
        tokens += rows + int(accepted.sum())
        spent = cost(rows + num_drafts) * rng.uniform(0.95, 1.05) * (2 if rng.random() < 0.02 else 1)
        way, num_drafting = (Way.NETWORK if any(wanted) else None), np.count_nonzero(wanted)
        observe(policy, rows, num_drafts, spent, way, num_drafting=num_drafting)
        seconds += spent
    return tokens / seconds


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize(("likely", "found"), [(0.1, 1.0), (0.5, 1.0), (0.9, 1.0), (0.8, 0.3)])
def test_it_learns_to_be_about_as_fast_as_the_best_fixed_chance(rows, likely, found, cost):
    def adaptive(policy, records):
        chosen = policy.choose([option(policy, records)])
        return chosen.lengths.tolist(), chosen.min_chance

    def fixed(min_chance, longest=LONGEST):
        return lambda policy, records: ([longest] * rows, min_chance)

    plans = [fixed(0.0, 0), *(fixed(chance) for chance in (0.02, 0.1, 0.2, 0.4, 0.6, 0.8))]
    speeds = [simulate(rows, likely, found, cost, plan, 300) for plan in plans]
    speed = simulate(rows, likely, found, cost, adaptive)
    assert speed > 0.95 * speeds[0], "slower than plain decoding"
    assert speed > 0.87 * max(speeds)


def test_a_token_must_be_the_likelier_the_more_it_costs():
    least = []
    for slope in (0.0, 0.1, 0.5):
        policy = DraftPolicy(1)
        for step in range(500):
            num_drafts = step % 8
            observe(policy, 4, num_drafts, 10.0 + slope * num_drafts, Way.NETWORK)
        expected = np.full(4, 1.0)
        least.append(
            policy.choose([Option(0, Way.NETWORK, expected, expected, np.ones(4), np.full(4, 8))]).min_chance
        )
    # 4 tokens and those accepted in 10 s and what the drafts take
    assert least == [
        pytest.approx(0.0, abs=0.01),
        pytest.approx(0.1 * 7 / 11, abs=0.03),
        pytest.approx(0.3, abs=0.1),
    ]


def test_what_a_draft_token_costs_is_found_beside_the_time_a_way_takes_and_noise():
    rng = np.random.default_rng(0)
    cost = TokenCost()
    assert cost.seconds == 0
    for _ in range(1000):
        way, num_drafts = int(rng.integers(2)), int(rng.integers(8))
        cost.observe(way, 4, num_drafts, (10 + 5 * way + 0.5 * num_drafts) * rng.uniform(0.95, 1.05))
    assert cost.seconds == pytest.approx(0.5, rel=0.25)


def test_a_first_network_step_that_is_no_example_does_not_keep_the_network_out():
    policy = DraftPolicy(1)
    for n in range(100):
        observe(policy, 1, n % 4, 10.0, Way.LOOKUP)
    observe(policy, 1, 3, 10.0, Way.NETWORK, beside=200.0)  # it was fed a whole prompt, and did all for once
    limits = np.array([8])
    lookup = Option(0, Way.LOOKUP, np.array([1.0]), np.array([0.3]), np.zeros(1), limits)
    network = Option(0, Way.NETWORK, np.array([1.0]), np.array([0.9]), np.ones(1), limits)
    assert policy.choose([lookup, network]).way is Way.NETWORK


def test_catching_up_is_not_taken_for_what_a_network_takes():
    policy, limits = DraftPolicy(1), np.full(64, 8)
    for n in range(300):
        observe(policy, 64, n % 128, 80.0, Way.LOOKUP)
        if n % 30 == 0:  # it is tried for two steps, and before the first it was fed nothing for long
            observe(policy, 64, 64, 80.0, Way.NETWORK, beside=60.0)
            observe(policy, 64, 64, 80.0, Way.NETWORK, beside=3.0)
    lookup = Option(0, Way.LOOKUP, np.full(64, 1.0), np.full(64, 0.3), np.zeros(64), limits)
    network = Option(0, Way.NETWORK, np.full(64, 1.0), np.full(64, 0.40), np.ones(64), limits)
    assert policy.choose([lookup, network]).way is Way.NETWORK


def test_what_a_network_takes_is_learnt_beside_prompts_too():
    """Under load hardly a step has none; how long they take themselves says nothing of drafts."""
    policy, limits = DraftPolicy(1), np.full(16, 8)
    for n in range(50):
        observe(policy, 16, n % 32, 10.0, Way.LOOKUP)
    lookup = Option(0, Way.LOOKUP, np.full(16, 1.0), np.full(16, 0.3), np.zeros(16), limits)
    network = Option(0, Way.NETWORK, np.full(16, 1.0), np.full(16, 0.6), np.ones(16), limits)
    assert policy.choose([lookup, network]).way is Way.NETWORK
    for _ in range(50):
        observe(policy, 16, 16, 100.0, Way.NETWORK, beside=8.0, prompts=True)
    assert policy.choose([lookup, network]).way is Way.LOOKUP


def test_a_slow_drafter_does_not_keep_a_fast_one_from_drafting():
    policy, limits = DraftPolicy(2), np.full(4, 8)
    for drafter, beside in ((0, 0.1), (1, 20.0)):
        for n in range(200):
            observe(policy, 4, n % 16, 10.0, Way.NETWORK, drafter=drafter, beside=beside)
    promise = np.full(4, 1.0), np.full(4, 0.5), np.ones(4), limits
    assert policy.choose([Option(0, Way.NETWORK, *promise)]).drafts
    assert not policy.choose([Option(1, Way.NETWORK, *promise)]).drafts


def test_a_row_that_gains_nothing_does_not_draft_beside_one_that_does():
    policy = DraftPolicy(1)
    for n in range(200):
        observe(policy, 16, n % 32, 1.0 + 0.005 * (16 + n % 32), Way.NETWORK if n % 32 else None)
    easy = np.array([2.0] + [0.0] * 15)
    lengths = policy.choose([Option(0, Way.NETWORK, easy + 1, easy, np.ones(16), np.full(16, 8))]).lengths
    assert np.flatnonzero(lengths).tolist() == [0]


def test_a_hopeless_sequence_is_tried_again_now_and_then():
    policy = DraftPolicy(1)
    for n in range(400):
        observe(policy, 1, n % 4, 1.0 + n % 4, Way.NETWORK if n % 4 else None)
    hopeless = Option(0, Way.NETWORK, np.array([1.0]), np.array([0.01]), np.ones(1), np.array([4]))
    chosen = [bool(policy.choose([hopeless]).lengths[0]) for _ in range(1000)]
    assert 2 <= sum(chosen) <= 20


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.9])
def test_what_is_learnt_at_one_least_chance_holds_at_another(chance):
    """Of a drafter whose tokens are all as likely to be right."""
    record = Record(fading=1.0)

    def draft(min_chance: float) -> tuple[int, float]:
        length = int(np.log(min_chance) / np.log(chance))
        return length, float(np.sum(chance ** np.arange(1, length + 1)))

    for min_chance in np.linspace(0.05, 0.2, 100):
        record.observe(Fared(min_chance, *draft(min_chance)))
    for least in (0.1, 0.3, 0.5):
        drafted, accepted = yields(least)
        near = np.array([draft(each) for each in np.linspace(0.7 * least, 1.3 * least, 100)]).mean(0)
        assert record.drafted.estimate(0.0, 0.0) * drafted == pytest.approx(near[0], abs=0.6)
        assert record.accepted.estimate(0.0, 0.0) * accepted == pytest.approx(near[1], abs=0.35)


def test_a_bucket_that_was_measured_while_the_machine_was_busy_does_not_make_larger_steps_look_free():
    times = StepTimes()
    for n, seconds in ((16, 1.0), (32, 9.0), (64, 3.0)):
        times.observe(n, seconds)
    assert times.predict(np.array([16.0, 32.0, 64.0])).tolist() == [1.0, 3.0, 3.0]


def test_a_pause_of_the_machine_is_forgotten():
    times = StepTimes()
    for _ in range(20):
        times.observe(8, 1.0)
    times.observe(8, 100.0)
    for _ in range(20):
        times.observe(8, 1.0)
    assert times.predict(np.array([8.0]))[0] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("rows", "best"), [(1, Way.NETWORK), (64, Way.LOOKUP)])
def test_a_network_runs_where_it_pays_and_elsewhere_drafts_are_looked_up(rows, best):
    """The network is asked where nothing is found and drafts always, but takes time for every row."""
    rng = np.random.default_rng(0)
    policy, records = DraftPolicy(1), [Records(fading=0.9) for _ in range(rows)]
    ways = []
    for _ in range(1000):
        options = [option(policy, records, way, longest=4, looks_up_first=True) for way in Way]
        chosen = policy.choose(options)
        num_drafts = num_asked = 0
        for own, wanted in zip(records, chosen.lengths.tolist(), strict=True):
            if not wanted:
                continue
            found = rng.random() < 0.3
            asks = not found and chosen.way is Way.NETWORK
            right = 0.8 if found else 0.6
            likely = right ** np.arange(1, wanted + 1) >= chosen.min_chance
            drafted = int(likely.sum()) if found or asks else 0
            accepted = int(np.argmin([*(rng.random(drafted) < right), False]))
            num_drafts, num_asked = num_drafts + drafted, num_asked + asks
            policy.observe_draft(0, chosen.way, own, True, found, Fared(chosen.min_chance, drafted, accepted))
        way = chosen.way if chosen.drafts else None
        drafting = {"num_drafting": np.count_nonzero(chosen.lengths), "num_asked": num_asked}
        seconds = 10 + 0.05 * (rows + num_drafts)
        observe(policy, rows, num_drafts, seconds, way, beside=0.2 * num_asked, **drafting)
        ways.append(way)
    assert ways[200:].count(best) > 700


def test_a_text_with_repetitions_does_not_keep_the_network_from_what_it_is_better_at():
    """Where much is found the network is hardly asked, so it costs nothing and need not be shut out."""
    policy, own = DraftPolicy(1), Records(fading=0.9)
    for step in range(400):
        way = Way.NETWORK if step % 2 else Way.LOOKUP
        found = step % 10 > 1
        asked = way is Way.NETWORK and not found
        fared = (4, 4) if found else (3, 1) if asked else (0, 0)
        policy.observe_draft(0, way, own, True, found, Fared(0.02, *fared))
        observe(policy, 1, fared[0], 10.0, way, beside=1.5 if asked else 0.0, num_asked=int(asked))
    options = [option(policy, [own], way, looks_up_first=True) for way in Way]
    assert policy.choose(options).way is Way.NETWORK
