"""The scheduler and the loop against a one-sequence reference, over random traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angelspec_backend.core.loop import LocalExecutor, Recovered, ServerStopping
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import NO_DRAFTER
from angelspec_backend.core.params import GenerationRequest
from angelspec_backend.core.request import FinishReason
from harness import STATES, FailingExecutor, Harness, config, request
from simulated import HIDDEN_BYTES, reference_text

KINDS = (
    DrafterInfo("by slot", keeps_drafts=False, shares_blocks=False),
    DrafterInfo("by blocks", keeps_drafts=False, shares_blocks=True),
    DrafterInfo("by blocks, with its drafts", keeps_drafts=True, shares_blocks=True),
    STATES,
    DrafterInfo("one state", False, True, tap_ids=(2,), hidden_bytes=HIDDEN_BYTES),
    replace(STATES, looks_up=True),
)
some_drafters = st.sampled_from([*((kind,) for kind in KINDS), KINDS, (STATES, KINDS[0])])
prompts = st.one_of(
    st.lists(st.integers(0, 49), min_size=1, max_size=40),
    st.integers(1, 40).map(lambda n: list(range(n))),  # prefixes of each other
)
requests = st.builds(
    lambda prompt, count, seed, drafts, drafter: request(
        prompt, min(count, 60 - len(prompt)), seed, drafts, drafter
    ),
    prompts,
    st.integers(1, 20),
    st.integers(0, 2**64 - 1),
    st.integers(0, 8),
    st.integers(0, 9),
)
actions = st.lists(st.one_of(requests, st.just("step"), st.integers(0, 20)), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    actions=actions,
    num_blocks=st.sampled_from([16, 20, 40, 200]),
    max_batch_tokens=st.sampled_from([8, 13, 40]),
    drafters=some_drafters,
    prefix_caching=st.booleans(),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    adaptive=st.booleans(),
    max_waiting_states=st.sampled_from([0, 3, 128]),
)
def test_any_trace_of_arrivals_and_cancellations_gives_every_sequence_its_own_text(
    actions, num_blocks, max_batch_tokens, drafters, prefix_caching, error_rate, adaptive, max_waiting_states
):
    harness = Harness(
        config(
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            drafters=drafters,
            prefix_caching=prefix_caching,
            adaptive_drafts=adaptive,
            max_waiting_states=max_waiting_states,
        ),
        error_rate,
    )
    submitted: list[GenerationRequest] = []
    for action in actions:
        if isinstance(action, GenerationRequest):
            if action.drafter != NO_DRAFTER:
                action = replace(action, drafter=action.drafter % len(drafters))
            assert harness.submit(len(submitted), action)
            submitted.append(action)
        elif action == "step":
            harness.step()
        else:
            harness.loop.cancel(action)
    harness.finish()
    for request_id, wanted in enumerate(submitted):
        outcome = harness.outcomes[request_id]
        expected = reference_text(list(wanted.prompt_token_ids), wanted.sampling.seed, wanted.max_tokens)
        assert outcome.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        assert outcome.tokens == expected[: len(outcome.tokens)]
        if outcome.reason == FinishReason.LENGTH:
            assert outcome.tokens == expected
        if error_rate == 0:  # a drafter whose context is right is always right
            last = outcome.events[-1]
            assert last.num_accepted_tokens == last.num_draft_tokens


def test_a_perfect_drafter_is_accepted_whole_and_counted_so():
    harness = Harness(config(), error_rate=0.0)
    harness.submit(0, request([1, 2, 3], max_tokens=20, drafts=4))
    harness.finish()
    last = harness.outcomes[0].events[-1]
    assert [len(event.token_ids) for event in harness.outcomes[0].events] == [1, 5, 5, 5, 4]
    assert (last.num_draft_tokens, last.num_accepted_tokens) == (15, 15)


def test_the_end_of_sequence_token_ends_a_request_within_accepted_drafts():
    text = reference_text([7], 0, 20)
    eos = text[6]
    harness = Harness(config(eos_token_ids=frozenset([eos])), error_rate=0.0)
    harness.submit(0, request([7], max_tokens=20, drafts=8))
    harness.submit(1, request([7], max_tokens=20, drafts=8, ignore_eos=True))
    harness.finish()
    assert harness.outcomes[0].tokens == text[: text.index(eos) + 1]
    assert harness.outcomes[0].reason == FinishReason.EOS
    assert harness.outcomes[1].tokens == text


def test_decoding_rows_go_on_while_a_long_prompt_is_computed_in_chunks():
    harness = Harness(config(max_context=200, num_blocks=128, max_batch_tokens=8))
    harness.submit(0, request([1], max_tokens=30))
    harness.step()
    harness.submit(1, request(list(range(40)), max_tokens=2))
    before = len(harness.outcomes[0].tokens)
    for _ in range(5):
        harness.step()
    assert len(harness.outcomes[0].tokens) == before + 5
    assert harness.outcomes[1].tokens == []
    harness.finish()


def test_sequences_are_preempted_when_blocks_run_out_and_still_finish_in_full():
    harness = Harness(config(num_blocks=16, max_num_seqs=4))
    for i in range(4):
        harness.submit(i, request([i] * 8, max_tokens=40, drafts=2))
    harness.finish()
    assert harness.loop.scheduler.num_preemptions > 0
    for i in range(4):
        assert harness.outcomes[i].tokens == reference_text([i] * 8, 0, 40)


def test_a_prefix_that_is_still_cached_is_not_computed_again():
    harness = Harness(config(drafters=(DrafterInfo("simulated", True, True),)))
    computed = []
    step = harness.executor.step
    harness.executor.step = lambda message: computed.append(len(message.token_ids)) or step(message)
    prompt = list(range(24))  # six blocks
    texts = [prompt, prompt, [*prompt[:18], 7], [9, *prompt]]
    for i, text in enumerate(texts):
        computed.clear()
        harness.submit(i, request(text, max_tokens=8, seed=i, drafts=3))
        harness.finish()
        # The last token is always computed, of a block only the whole counts, and position 0 matters.
        assert computed[0] == [24, 4, 3, 25][i]
        assert harness.outcomes[i].tokens == reference_text(text, i, 8)
    assert harness.loop.scheduler.num_cached_tokens == 20 + 16


def test_generated_text_is_found_again_when_it_comes_back_as_a_prompt():
    harness = Harness(config())
    harness.submit(0, request([1, 2, 3], max_tokens=30))
    harness.finish()
    harness.submit(1, request([1, 2, 3, *harness.outcomes[0].tokens, 5], max_tokens=4))
    harness.finish()
    assert harness.loop.scheduler.num_cached_tokens == 32


def test_a_full_queue_refuses_at_once_and_takes_requests_again_later():
    harness = Harness(config(max_num_seqs=2, max_queue_size=1))
    assert [harness.submit(i, request([i])) for i in range(4)] == [True, True, True, False]
    del harness.outcomes[3]
    harness.finish()
    assert harness.submit(4, request([1]))


def test_a_deadline_ends_running_and_waiting_requests():
    harness = Harness(config(max_num_seqs=1))
    harness.submit(0, request([1], max_tokens=50, timeout_s=0.0))
    harness.submit(1, request([1], max_tokens=50, timeout_s=0.0))
    harness.submit(2, request([1], max_tokens=5))
    harness.finish()
    assert [harness.outcomes[i].reason for i in range(3)] == ["timeout", "timeout", "length"]


@settings(max_examples=100, deadline=None)
@given(
    failures=st.lists(
        st.builds(Recovered, st.booleans(), st.booleans(), st.frozensets(st.integers(0, 4))), max_size=6
    ),
    drafters=some_drafters,
    adaptive=st.booleans(),
)
def test_streams_go_on_with_the_same_tokens_after_a_model_was_restarted(failures, drafters, adaptive):
    harness = Harness(config(drafters=drafters, adaptive_drafts=adaptive), executor_type=FailingExecutor)
    harness.executor.failures = failures
    for i in range(5):
        harness.submit(i, request([i] * 5, max_tokens=30, drafts=i, drafter=i % len(drafters)))
    harness.finish()
    for i in range(5):
        assert harness.outcomes[i].tokens == reference_text([i] * 5, 0, 30)


def test_requests_end_with_an_error_when_the_target_cannot_be_brought_back():
    harness = Harness(config(), executor_type=FailingExecutor)
    harness.executor.failures = [None]
    harness.submit(0, request([1], max_tokens=30))
    harness.finish()
    assert harness.outcomes[0].reason == FinishReason.ERROR
    assert harness.outcomes[0].events[-1].error == "model target cannot be loaded"
    harness.submit(1, request([1], max_tokens=5))
    harness.finish()
    assert harness.outcomes[1].reason == FinishReason.LENGTH


class StoppingExecutor(LocalExecutor):
    def step(self, step):
        raise ServerStopping("the server is shutting down")

    def recover(self) -> Recovered:
        raise AssertionError("there is nothing to recover in a server that stops")


def test_requests_end_with_reason_shutdown_when_the_server_is_told_to_exit():
    harness = Harness(config(), executor_type=StoppingExecutor)
    harness.submit(0, request([1]))
    harness.finish()
    assert harness.outcomes[0].reason == FinishReason.SHUTDOWN


def test_limits_that_could_deadlock_are_refused():
    with pytest.raises(ValueError, match="max_context 60 exceeds the KV pool's 28 tokens"):
        config(num_blocks=8)
    with pytest.raises(ValueError, match="max_batch_tokens 4 is below max_num_seqs 8"):
        config(max_batch_tokens=4)
