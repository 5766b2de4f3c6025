"""The sampler: the right distribution, a pure function of the row, and as fast as it is right."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from angelspec_backend.core.messages import ROW
from angelspec_backend.engine import native, sampler, sampling_heads
from angelspec_backend.engine.device_sampler import sample_on_device
from angelspec_backend.engine.noise import TAIL_GUMBEL, gumbel, stream_keys, uniform
from angelspec_backend.engine.sampler import SamplingRows, sample
from angelspec_backend.engine.sampling_rule import kept_tokens, sample_row

PARAMETERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 500, "top_p": 0.8, "min_p": 0.01},
]


def sample_by_torch(logits, rows):
    """What machines without the native kernels do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "supports", lambda *_: False)
        return sample(logits, rows)


SAMPLERS = pytest.mark.parametrize(
    "sample", [sample, sample_by_torch, sample_on_device], ids=["host", "torch", "device"]
)


def make_rows(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    """n rows of equal parameters at consecutive positions."""
    return SamplingRows(
        seed=np.full(n, seed, np.uint64),
        position=np.arange(position, position + n),
        temperature=np.full(n, temperature, np.float32),
        top_k=np.full(n, top_k, np.int32),
        top_p=np.full(n, top_p, np.float32),
        min_p=np.full(n, min_p, np.float32),
    )


def random_rows(rng, n):
    """n rows of all kinds."""
    return SamplingRows(
        seed=rng.integers(0, 2**64, n, dtype=np.uint64),
        position=rng.integers(0, 4096, n),
        temperature=rng.choice(np.array([0, 0, 0.2, 0.7, 1, 1, 1.5, 4], np.float32), n),
        top_k=rng.choice(np.array([0, 0, 0, 1, 5, 128, 129, 1000, 10**6], np.int32), n),
        top_p=rng.choice(np.array([1, 1, 1, 0.95, 0.5, 0.01, 0.9999], np.float32), n),
        min_p=rng.choice(np.array([0, 0, 0, 0.1, 0.001, 1], np.float32), n),
    )


def random_logits(rng, n, vocab, dtype=torch.bfloat16):
    """Rows from nearly flat to peaked; bfloat16 gives many ties."""
    scale = rng.choice([0.01, 1.0, 2.5, 6.0], (n, 1))
    logits = rng.standard_normal((n, vocab)) * scale
    logits[:, rng.integers(vocab)] += rng.choice([0.0, 10.0])
    return torch.tensor(logits).to(dtype)


def brute_force_bound(values):
    """Where the head ends: token t is in fine class t mod F, fine class f in coarse class f mod C."""
    vocab = len(values)
    num_fine = -(-vocab // sampling_heads.FINE)
    num_coarse = -(-num_fine // sampling_heads.COARSE)
    if num_coarse < sampling_heads.HEAD_SIZE:
        return float(np.finfo(np.float32).min)
    maxima = np.full(num_coarse, -np.inf)
    np.maximum.at(maxima, np.arange(vocab) % num_fine % num_coarse, values)
    return float(np.sort(maxima)[::-1][sampling_heads.HEAD_SIZE - 1])


def by_the_rule(logits, rows):
    """Row by row: argmax, or the rule as it is written down."""
    tokens = []
    for i, values in enumerate(logits.float().numpy()):
        if rows.temperature[i] == 0:
            tokens.append(int(np.argmax(values)))
        else:
            tokens.append(sample_row(values, brute_force_bound(values), rows[i : i + 1]))
    return tokens


def processed(values, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by transformers' own processors.  [vocab] -> [vocab] probabilities"""
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        steps.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1:
        steps.append(TopPLogitsWarper(float(top_p)))
    if min_p:
        steps.append(MinPLogitsWarper(float(min_p)))
    scores = torch.tensor(values, dtype=torch.float32)[None]
    return steps(torch.zeros(1, 1, dtype=torch.long), scores)[0].double().softmax(-1).numpy()


# ------------------------------------------------------------------------ distribution


def chi_square_p(tokens, probabilities, num_bins=60):
    """The smaller p-value of two pools of equally likely runs of tokens: by likelihood, and by id."""
    assert (probabilities[tokens] > 0).all(), "a token outside the kept set was drawn"
    return min(
        binned_chi_square_p(tokens, probabilities, order, num_bins)
        for order in (np.argsort(-probabilities, kind="stable"), np.arange(len(probabilities)))
    )


def binned_chi_square_p(tokens, probabilities, order, num_bins):
    preceding = np.cumsum(probabilities[order]) - probabilities[order]
    bin_of = np.empty(len(order), int)
    bin_of[order] = np.clip(preceding * num_bins, 0, num_bins - 1).astype(int)
    expected = np.bincount(bin_of, probabilities, num_bins) * len(tokens)
    observed = np.bincount(bin_of[tokens], minlength=num_bins)
    used = expected > 0
    return stats.chisquare(observed[used], expected[used] * observed.sum() / expected[used].sum()).pvalue


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("vocab", [97, 9001])
def test_tokens_follow_the_processed_distribution(parameters, vocab):
    logits = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32) * 2.5
    probabilities = processed(logits, **parameters)
    batch = torch.tensor(logits).expand(1000, -1)
    tokens = np.concatenate(
        [sample(batch, make_rows(1000, **parameters, seed=seed, position=9 * seed)) for seed in range(4)]
    )
    assert chi_square_p(tokens, probabilities) > 0.001


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.7}, {"top_k": 3000}, {"min_p": 0.5}])
def test_tokens_follow_a_flat_distribution_whose_mass_is_in_the_tail(parameters):
    vocab = 9001
    logits = np.random.default_rng(1).uniform(0, 1, vocab).astype(np.float32)
    tokens = sample(torch.tensor(logits).expand(3000, -1), make_rows(3000, **parameters, seed=7))
    assert chi_square_p(tokens, processed(logits, **parameters)) > 0.001
    assert (logits[tokens] < brute_force_bound(logits)).mean() > 0.8


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.8}])
def test_the_tail_wins_as_often_as_its_mass_says(parameters):
    logits = (np.random.default_rng(0).standard_normal(9001) * 2).astype(np.float32)
    probabilities = processed(logits, **parameters)
    in_tail = logits < brute_force_bound(logits)
    share = probabilities[in_tail].sum()
    tokens = sample(torch.tensor(logits).expand(5000, -1), make_rows(5000, **parameters, seed=11))
    assert 0.2 < share < 0.8
    assert abs(in_tail[tokens].mean() - share) < 3 * np.sqrt(share * (1 - share) / 5000)


def test_consecutive_tokens_are_independent():
    logits = torch.zeros(8000, 4)
    tokens = sample(logits, make_rows(8000, seed=3))
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(pairs).pvalue > 0.001


def test_noise_is_uniform_and_uncorrelated_over_seeds_positions_and_tokens():
    seeds, positions = np.meshgrid(np.arange(40, dtype=np.uint64), np.arange(40), indexing="ij")
    keys = stream_keys(seeds.ravel(), positions.ravel()).reshape(40, 40, 1)
    noise = uniform(keys, np.arange(40))  # [seed, position, token]
    assert noise.min() > 0
    assert noise.max() < 1
    assert stats.kstest(noise.ravel(), "uniform").pvalue > 0.001
    for axis in range(3):
        first, second = np.take(noise, range(39), axis), np.take(noise, range(1, 40), axis)
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 4 / np.sqrt(first.size)
    assert len(np.unique(noise)) == noise.size
    assert np.isfinite(gumbel(keys, np.array([TAIL_GUMBEL]))).all()


# ------------------------------------------------------------------------ processing


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10**6))
def test_kept_tokens_and_probabilities_equal_those_of_transformers(seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(700) * rng.choice([0.5, 2.5, 6])).astype(np.float32)
    parameters = {
        "temperature": rng.choice([0.3, 1.0, 1.8]),
        "top_k": int(rng.choice([0, 1, 7, 200, 5000])),
        "top_p": float(rng.choice([1, 0.95, 0.5, 0.05])),
        "min_p": float(rng.choice([0, 0.02, 0.3])),
    }
    expected = processed(values, **parameters)
    kept = kept_tokens(values, make_rows(1, **parameters))
    assert kept.tolist() == (expected > 0).tolist()
    logits = (values - values.max()).astype(np.float64) / parameters["temperature"]
    weights = np.where(kept, np.exp(logits), 0)
    np.testing.assert_allclose(weights / weights.sum(), expected, rtol=1e-5, atol=1e-12)


def test_tokens_tied_with_the_kth_are_all_kept():
    values = np.array([1, 3, 2, 2, 0, 2], np.float32)
    assert kept_tokens(values, make_rows(1, top_k=2)).tolist() == [False, True, True, True, False, True]
    assert (processed(values, top_k=2) > 0).tolist() == [False, True, True, True, False, True]


def test_of_tokens_tied_at_the_nucleus_the_lower_ids_are_kept():
    values = np.zeros(10, np.float32)
    assert np.flatnonzero(kept_tokens(values, make_rows(1, top_p=0.35))).tolist() == [0, 1, 2, 3]


def test_the_likeliest_token_is_always_kept():
    values = np.array([0, 0.1, -2], np.float32)
    for parameters in ({"top_p": 1e-9}, {"top_p": 0}, {"min_p": 1}, {"top_k": 1}):
        assert np.flatnonzero(kept_tokens(values, make_rows(1, **parameters))).tolist() == [1]


# ------------------------------------------------------------------------ greedy


@SAMPLERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 300, 8193, 50257])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_on_ties(sample, dtype, vocab):
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[3, vocab // 2 :] = logits[3].max()
    logits[4] = 0
    expected = [int(np.argmax(row)) for row in logits.float().numpy()]
    assert sample(logits, make_rows(12, temperature=0)).tolist() == expected


@SAMPLERS
def test_negative_zero_ties_with_zero(sample):
    logits = torch.tensor([[-1.0, -0.0, 0.0]])
    assert sample(logits, make_rows(1, temperature=0)).tolist() == [1]


# ------------------------------------------------------------------------ a pure function of the row


@SAMPLERS
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_fast_sampling_gives_the_tokens_of_the_rule(sample, seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([5, 64, 1000, 8192, 8200, 9001, 12288]))
    dtype = [torch.bfloat16, torch.float32, torch.float16][rng.integers(3)]
    logits, rows = random_logits(rng, 48, vocab, dtype), random_rows(rng, 48)
    if rng.random() < 0.3:
        logits[torch.tensor(rng.random((48, vocab)) < 0.99)] = -torch.inf
        logits[:, 0] = 0
    assert sample(logits, rows).tolist() == by_the_rule(logits, rows)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6))
def test_a_token_does_not_depend_on_batch_mates(seed):
    rng = np.random.default_rng(seed)
    logits, rows = random_logits(rng, 40, 9001), random_rows(rng, 40)
    together = sample(logits, rows)
    for size in (1, 3, 17):
        some = rng.permutation(40)[:size]
        assert sample(logits[some], rows[some]).tolist() == together[some].tolist()


@pytest.mark.skipif(not native.available(), reason="no g++")
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_native_kernel_decides_nearly_every_row_by_the_rule(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([1, 5, 64, 300, 1000, 8176, 8193, 9001, 50257]))
    dtype = [torch.bfloat16, torch.float32][rng.integers(2)]
    logits, rows = random_logits(rng, 12, vocab, dtype), random_rows(rng, 12)
    logits[3] = logits[3, 0]  # all in the head
    logits[4, 1:] = -torch.inf
    tokens, expected = sampler.sample_natively(logits, rows), np.array(by_the_rule(logits, rows))
    decided = tokens != sampler.UNDECIDED
    assert tokens[decided].tolist() == expected[decided].tolist()
    # Ties in logits may be ties of a weight with min_p, or of a sum with top_p, but not where both are off.
    assert decided[~rows.restricted].all()
    assert decided.sum() >= 9


@pytest.mark.skipif(not native.available(), reason="no g++")
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_logits_of_some_tokens_are_sampled_as_if_the_others_were_impossible(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([5, 300, 9001, 50257]))
    ids = np.sort(rng.permutation(vocab)[: rng.integers(1, vocab + 1)])
    dtype = [torch.bfloat16, torch.float32][rng.integers(2)]
    logits, rows = random_logits(rng, 12, len(ids), dtype), random_rows(rng, 12)
    everywhere = torch.full((12, vocab), -torch.inf, dtype=dtype)
    everywhere[:, torch.from_numpy(ids)] = logits
    tokens = sampler.sample_natively(logits, rows, sampler.Columns.of(ids, vocab))
    decided = tokens != sampler.UNDECIDED
    assert tokens[decided].tolist() == np.array(by_the_rule(everywhere, rows))[decided].tolist()
    assert decided[~rows.restricted].all()
    assert decided.sum() >= 9


@pytest.mark.skipif(not native.available(), reason="no g++")
@pytest.mark.parametrize("scale", [0.1, 1, 2.5])
@pytest.mark.parametrize(
    "parameters", [{}, {"top_p": 0.95}, {"min_p": 1e-3}, {"top_k": 4000}, {"top_k": 6000, "top_p": 0.9}]
)
def test_the_native_kernel_decides_rows_whose_token_lies_in_the_tail(parameters, scale):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 9001, generator=generator) * scale
    rows = make_rows(200, **parameters, seed=3)
    expected = by_the_rule(logits, rows)
    assert sampler.sample_natively(logits, rows).tolist() == expected
    in_tail = [
        row[token] < brute_force_bound(row) for row, token in zip(logits.numpy(), expected, strict=True)
    ]
    assert np.mean(in_tail) > 0.1


@pytest.mark.skipif(not native.available(), reason="no g++")
def test_the_native_kernel_leaves_close_calls_to_the_rule():
    in_head = torch.zeros(40, 2)  # is the second token preceded by less than half of the mass?
    in_tail = torch.zeros(40, 16384)  # nearly flat at a high temperature: is token 8192?
    in_tail[:, :200] = 1
    for logits, temperature in ((in_head, 1), (in_tail, 1e10)):
        rows = make_rows(40, temperature, top_p=0.5)
        undecided = sampler.sample_natively(logits, rows) == sampler.UNDECIDED
        assert 5 < undecided.sum() <= 40
        assert sample(logits, rows).tolist() == by_the_rule(logits, rows)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_a_finite_maximum_have_no_heads(odd):
    logits = torch.zeros(3, 9001)
    logits[1, 17 if odd > 0 or odd != odd else slice(None)] = odd
    assert sampler.torch_heads(logits, np.ones(3, np.float32)) is None
    if native.available():
        undecided = sampler.sample_natively(logits, make_rows(3)) == sampler.UNDECIDED
        assert undecided.tolist() == [False, True, False]


def test_equal_rows_sample_equal_tokens_and_other_seeds_or_positions_other_ones():
    logits = torch.zeros(400, 1000)
    first = sample(logits, make_rows(400, seed=5))
    assert first.tolist() == sample(logits, make_rows(400, seed=5)).tolist()
    assert (first != sample(logits, make_rows(400, seed=6))).mean() > 0.98
    assert first[1:].tolist() == sample(logits[1:], make_rows(399, seed=5, position=1)).tolist()
    assert len(np.unique(first)) > 250


# ------------------------------------------------------------------------ odd logits


@SAMPLERS
@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"temperature": 0}])
@pytest.mark.parametrize("vocab", [50, 9001])
def test_masked_and_nan_tokens_are_never_sampled(sample, parameters, vocab):
    logits = torch.zeros(60, vocab, dtype=torch.bfloat16)
    logits[:, :] = -torch.inf
    allowed = [3, 8, vocab - 1]
    logits[:, allowed] = torch.tensor([1.0, 1.0, 0.5], dtype=torch.bfloat16)
    logits[30:, 5] = torch.nan
    tokens = sample(logits, make_rows(60, **parameters))
    assert set(tokens.tolist()) <= set(allowed)


@SAMPLERS
def test_rows_without_any_finite_logit_still_give_a_valid_id_and_leave_others_alone(sample):
    logits = random_logits(np.random.default_rng(0), 6, 9001, torch.float32)
    expected = sample(logits, make_rows(6))
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[4, 77] = torch.inf
    tokens = sample(logits, make_rows(6))
    assert tokens[[0, 3, 5]].tolist() == expected[[0, 3, 5]].tolist()
    assert tokens.min() >= 0
    assert tokens.max() < 9001
    assert tokens[4] == 77


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 10), make_rows(0)).shape == (0,)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e3])
def test_extreme_temperatures_are_finite(temperature):
    logits = random_logits(np.random.default_rng(2), 8, 9001)
    tokens = sample(logits, make_rows(8, temperature=temperature))
    assert tokens.tolist() == by_the_rule(logits, make_rows(8, temperature=temperature))
    if temperature == 1e-6:
        assert (logits.float()[range(8), tokens] == logits.float().amax(-1)).all()


# ------------------------------------------------------------------------ parameters of sequences


def test_parameters_spread_over_the_logits_rows_of_their_sequence():
    rows = np.zeros(3, ROW)
    rows["seed"] = [2**64 - 1, 5, 6]
    rows["temperature"] = [0, 0.5, 1]
    rows["top_k"], rows["top_p"], rows["min_p"] = [0, 1, 2], [1, 0.5, 0.25], [0, 0.125, 0.5]
    spread = SamplingRows.from_rows(rows, np.array([1, 0, 3]), np.array([10, 20, 30]))
    assert spread.seed.tolist() == [2**64 - 1, 6, 6, 6]
    assert spread.position.tolist() == [10, 30, 31, 32]
    assert spread.temperature.tolist() == [0, 1, 1, 1]
    assert spread.top_k.tolist() == [0, 2, 2, 2]
    assert spread.top_p.tolist() == [1, 0.25, 0.25, 0.25]
    assert spread.min_p.tolist() == [0, 0.5, 0.5, 0.5]


@pytest.mark.skipif(not native.available(), reason="no g++")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 5),
    st.sampled_from([1, 7, 15, 16, 17, 100, 4099]),
    st.integers(0, 10_000),
)
def test_the_native_argmax_is_the_first_of_the_largest(dtype, rows, n, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (rows, n), generator=generator).to(dtype)
    logits[torch.rand(rows, n, generator=generator) < 0.3] = float("nan")
    logits[0] = -torch.inf if seed % 3 == 0 else logits[0]
    expected = np.nan_to_num(logits.float().numpy(), nan=-np.inf, neginf=-np.inf).argmax(1)
    assert native.argmax(logits).tolist() == expected.tolist()


@pytest.mark.skipif(not native.available(), reason="no g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_native_argmax_knows_the_probability_of_what_it_takes(dtype):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 15, 17, 49, 8192, 49152):
        logits = (5 * torch.randn(4, n, generator=generator)).to(dtype)
        logits[1, ::2] = -torch.inf
        logits[2, 1::3] = torch.nan
        logits[1, -1] = 3
        logits[3] = -torch.inf
        probability = torch.empty(4)
        taken = native.argmax(logits, probability)
        wide = torch.where(logits.isnan(), -torch.inf, logits.double())
        expected = wide.softmax(-1).gather(1, taken.long()[:, None])[:, 0].nan_to_num(0)
        torch.testing.assert_close(probability.double(), expected, rtol=1e-5, atol=0)
