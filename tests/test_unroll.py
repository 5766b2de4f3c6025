"""The training forward of chain drafters: who sees whom, documents, drafts of its own."""

import pytest
import torch

from angelspec_backend.drafters.unroll import UnrolledAttention, document_positions, shifted, unroll
from angelspec_backend.training.masks import step_mask
from chains import VOCAB, random_chain

DOCUMENTS = torch.tensor([0] * 5 + [1] * 7 + [2] * 1 + [-1] * 3)


def inputs(kind: str, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [length, num_taps, hidden] and tokens [length]."""
    spec, generator = random_chain(kind).spec, torch.Generator().manual_seed(seed)
    states = torch.randn(length, len(spec.tap_ids), spec.target_hidden, generator=generator)
    return states, torch.randint(VOCAB, (length,), generator=generator)


def test_attention_over_steps_is_dense_attention_under_the_mask():
    generator = torch.Generator().manual_seed(0)
    attend, keys, values = UnrolledAttention(DOCUMENTS), [], []
    for step in range(3):
        query, key, value = (torch.randn(16, heads, 8, generator=generator) for heads in (4, 2, 2))
        keys.append(key.repeat_interleave(2, 1))
        values.append(value.repeat_interleave(2, 1))
        mask = step_mask(16, step, DOCUMENTS)
        scores = torch.einsum("qhd,khd->hqk", query, torch.cat(keys)) / 8**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, torch.cat(values))
        found, inside = attend(0, query, key, value), DOCUMENTS >= 0
        torch.testing.assert_close(found[inside], expected[inside])


@pytest.mark.parametrize("kind", ["mtp", "mtp_moe", "eagle3"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_packed_documents_do_not_see_each_other(kind, on_policy):
    network, (states, tokens) = random_chain(kind), inputs(kind, 16)
    packed = unroll(network, states, tokens, 3, document_ids=DOCUMENTS, on_policy=on_policy)
    for document in (0, 1, 2):
        own = document == DOCUMENTS
        alone = unroll(network, states[own], tokens[own], 3, on_policy=on_policy)
        for one, other in zip(packed, alone, strict=True):
            torch.testing.assert_close(one.logits[own], other.logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mtp_pruned", "eagle3_flags"])
def test_on_policy_steps_read_what_the_step_before_drafted(kind):
    network, (states, tokens) = random_chain(kind), inputs(kind, 9)
    drafted = unroll(network, states, tokens, 2, on_policy=True)
    row = 3  # a text in which the draft of this row is what follows
    tokens = tokens.clone()
    tokens[row + 2] = network.to_target(drafted[0].logits[row].argmax())
    forced = unroll(network, states, tokens, 2)
    torch.testing.assert_close(drafted[1].logits[row], forced[1].logits[row])


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_every_step_trains_every_parameter(kind):
    network, (states, tokens) = random_chain(kind), inputs(kind, 8)
    for step in unroll(network, states, tokens, 3):
        network.zero_grad()
        step.logits.square().sum().backward(retain_graph=True)
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_logits_can_be_left_to_the_caller():
    network, (states, tokens) = random_chain("mtp"), inputs("mtp", 8)
    with_logits = unroll(network, states, tokens, 2, on_policy=True)
    without = unroll(network, states, tokens, 2, on_policy=True, with_logits=False)
    for one, other in zip(with_logits, without, strict=True):
        assert other.logits is None
        assert torch.equal(network.logits(other.output), one.logits)


def test_only_position_0_is_embedded_as_zero_unless_the_first_row_is_blank_at_every_step():
    network, (states, tokens) = random_chain("mtp"), inputs("mtp", 6)
    usual = unroll(network, states, tokens, 2)
    blank = unroll(network, states, tokens, 2, blank_first_row=True)
    assert torch.equal(usual[0].logits, blank[0].logits)
    same = (usual[1].logits == blank[1].logits).all(-1).tolist()
    assert same == [False, True, True, True, True, True]


def test_shifting_stays_within_documents():
    values = torch.arange(1, 17)
    expected = [3, 4, 5, 0, 0, 8, 9, 10, 11, 12, 0, 0, 0, 16, 0, 0]
    assert shifted(values, 2, DOCUMENTS).tolist() == expected
    assert document_positions(DOCUMENTS).tolist() == [*range(5), *range(7), 0, *range(3)]
