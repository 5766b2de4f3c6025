"""Optimisers with float32 masters, and learning rates."""

import copy
from itertools import pairwise

import pytest
import torch

from angelspec_backend.training.optim import MasterOptimizer, OptimizerConfig, is_hidden_matrix
from angelspec_backend.training.schedule import Schedule


def network(dtype=torch.float32):
    torch.manual_seed(0)
    parts = {"embed": torch.nn.Embedding(6, 8), "proj": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 6)}
    return torch.nn.ModuleDict(parts).to(dtype)


def descend(net, optimizer, steps, lr=0.02):
    """Losses of learning that token i is followed by token i + 1."""
    losses, ids = [], torch.arange(6)
    for _ in range(steps):
        logits = net["head"](torch.tanh(net["proj"](net["embed"](ids))))
        loss = torch.nn.functional.cross_entropy(logits.float(), (ids + 1) % 6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(lr)
        losses.append(float(loss.detach()))
    return losses


def adam(value, grads, lr, decay, b1=0.9, b2=0.999, eps=1e-8):
    """AdamW (arXiv 1711.05101, algorithm 2), one number, in float64."""
    m = v = 0.0
    for t, grad in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad * grad
        value -= lr * decay * value
        value -= lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + eps)
    return value


def test_adamw_does_what_the_paper_says_and_spares_vectors_the_decay():
    config = OptimizerConfig(weight_decay=0.1, clip=1e9)
    matrix, vector = (torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((1, 1), (1,)))
    optimizer = MasterOptimizer([("a.weight", matrix), ("norm.weight", vector)], config)
    grads = [0.3, -0.1, 0.2]
    for grad in grads:
        matrix.grad, vector.grad = torch.full((1, 1), grad), torch.full((1,), grad)
        optimizer.step(0.01)
    assert matrix.item() == pytest.approx(adam(0.5, grads, 0.01, 0.1), rel=1e-5)
    assert vector.item() == pytest.approx(adam(0.5, grads, 0.01, 0.0), rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_network_learns(name, dtype):
    net = network(dtype)
    optimizer = MasterOptimizer(net.named_parameters(), OptimizerConfig(name))
    losses = descend(net, optimizer, 120)
    assert losses[-1] < 0.1 < losses[0]


def test_masters_collect_updates_too_small_for_bfloat16():
    weight = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([("w", weight)], OptimizerConfig(weight_decay=0.0))
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step(5e-4)  # a step of bfloat16 below 1 is 0.0039
    assert weight.item() == pytest.approx(0.99, abs=0.003)


def test_the_gradient_is_clipped_to_its_global_norm():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = MasterOptimizer(zip("ab", parameters, strict=True), OptimizerConfig(clip=1.0))
    for parameter in parameters:
        parameter.grad = torch.full((2,), 3.0)
    assert optimizer.step(0.0) == pytest.approx(6.0)
    assert torch.cat([p.grad for p in parameters]).norm() == pytest.approx(1.0, rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing():
    net = network()
    before = copy.deepcopy(net.state_dict())
    optimizer = MasterOptimizer(net.named_parameters(), OptimizerConfig())
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert optimizer.step(0.1) != optimizer.step(0.1)  # nan
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name, dtype):
    config, net = OptimizerConfig(name), network(dtype)
    optimizer = MasterOptimizer(net.named_parameters(), config)
    descend(net, optimizer, 5)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    straight = descend(net, optimizer, 5)
    again = network(dtype)
    again.load_state_dict(weights)
    resumed = MasterOptimizer(again.named_parameters(), config)
    resumed.load_state_dict(saved)
    assert descend(again, resumed, 5) == straight


def test_a_state_of_another_optimiser_is_refused():
    muon = MasterOptimizer(network().named_parameters(), OptimizerConfig("muon"))
    with pytest.raises(ValueError, match="adamw, muon"):
        MasterOptimizer(network().named_parameters(), OptimizerConfig()).load_state_dict(muon.state_dict())


def test_muon_moves_hidden_matrices_by_orthogonal_steps_only():
    net, config = network(), OptimizerConfig("muon", weight_decay=0.0)
    before = net["proj"].weight.detach().clone()
    descend(net, MasterOptimizer(net.named_parameters(), config), 1, lr=1.0)
    singular = torch.linalg.svdvals(before - net["proj"].weight.detach()) / (0.2 * 8**0.5)
    assert ((singular > 0.3) & (singular < 1.6)).sum() >= 5  # the gradient has rank 6 at most, 5 centred


def test_embeddings_heads_fusion_weights_and_vectors_are_not_muons():
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    for name in (
        "embed_tokens.weight",
        "lm_head.weight",
        "markov_head.markov_w1.weight",
        "layer_fusion_weights",
    ):
        assert not is_hidden_matrix(name, matrix)
    assert is_hidden_matrix("layers.0.self_attn.q_proj.weight", matrix)
    assert not is_hidden_matrix("layers.0.input_layernorm.weight", vector)


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no parameter"):
        MasterOptimizer([("w", torch.nn.Parameter(torch.zeros(1), requires_grad=False))], OptimizerConfig())


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_every_schedule_warms_up_to_its_peak_and_never_leaves_its_range(kind):
    schedule = Schedule(kind, 1.0, total_steps=100, warmup_steps=10, floor=0.1, decay_steps=20)
    rates = [schedule.at(step) for step in range(150)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(0.1 <= rate <= 1.0 for rate in rates)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_schedules_have_their_shapes():
    def rate(kind, step, **options):
        return Schedule(kind, 1.0, total_steps=110, warmup_steps=10, **options).at(step)

    assert rate("constant", 500) == 1
    assert [rate("linear", s, floor=0.2) for s in (10, 60, 110, 200)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert [rate("cosine", s, floor=0.2) for s in (10, 35, 60, 110)] == pytest.approx(
        [1, 0.8828427, 0.6, 0.2]
    )
    assert [rate("inverse_sqrt", s) for s in (9, 39, 89)] == pytest.approx([1, 0.5, 1 / 3])
    assert [rate("wsd", s, decay_steps=20) for s in (10, 90, 100, 110)] == pytest.approx([1, 1, 0.5, 0])


@pytest.mark.parametrize(
    "wrong", [{"kind": "step"}, {"floor": 2.0}, {"warmup_steps": 11}, {"kind": "wsd", "decay_steps": 11}]
)
def test_a_schedule_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=r"kind|floor|steps"):
        Schedule(**{"kind": "linear", "peak": 1.0, "total_steps": 10, **wrong})
