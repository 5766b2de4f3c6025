"""How a hidden-state drafter is fed; that each state it gets is the right one is asserted by the drafter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.draft_policy import Choice
from angelspec_backend.core.draft_records import Way
from angelspec_backend.core.hidden_queue import HiddenQueue
from angelspec_backend.core.loop import Recovered
from angelspec_backend.core.messages import StepInput
from angelspec_backend.triton.device_states import IN_TORCH
from harness import STATES, FailingExecutor, Harness, config, request
from simulated import HIDDEN_BYTES, reference_text


class Watched(Harness):
    """Keeps all steps."""

    def __init__(self, error_rate: float = 0.3, executor_type: type = FailingExecutor, **limits) -> None:
        super().__init__(config(**({"drafters": (STATES,)} | limits)), error_rate, executor_type)
        self.steps: list[StepInput] = []
        step = self.executor.step
        self.executor.step = lambda message: self.steps.append(message) or step(message)

    def generate(self, request_id: int, prompt: list[int], drafts: int = 3, count: int = 8) -> int:
        """Run one request and check its text.  Returns the known tokens that were computed."""
        self.steps.clear()
        self.submit(request_id, request(prompt, max_tokens=count, seed=request_id, drafts=drafts))
        self.finish()
        assert self.outcomes[request_id].tokens == reference_text(prompt, request_id, count)
        return sum(len(step.token_ids) for step in self.steps)


runs = st.lists(st.tuples(st.sampled_from(["append", "drop"]), st.integers(0, 9)))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
@given(actions=runs)
def test_the_queue_gives_back_what_it_was_given_in_order(kind, actions):
    queue, expected, count = HiddenQueue(), [], 0
    for action, number in actions:
        if action == "append":
            states = np.arange(count, count + 2 * number, dtype=np.uint8).reshape(number, 2)
            count += 2 * number
            queue.append(kind(states))
            expected += states.tolist()
        else:
            number = min(number, len(expected))
            given_back = queue.first(number)
            assert sum(map(len, given_back)) == 2 * number
            assert [byte for run in given_back for byte in run] == [
                b for row in expected[:number] for b in row
            ]
            queue.drop(number)
            del expected[:number]
        assert len(queue) == len(expected)
    queue.clear()
    assert (len(queue), queue.first(3)) == (0, [])


class InTensors(Watched):
    """The loop gets and gives states in tensors of torch; the simulated models know of arrays alone."""

    def __init__(self, **limits) -> None:
        super().__init__(state_arrays=IN_TORCH, **limits)
        self.outputs: list[torch.Tensor] = []
        step = self.executor.step

        def with_tensors(message: StepInput):
            assert isinstance(message.hidden_states, torch.Tensor) == (len(message.hidden_states) > 0)
            output = step(replace(message, hidden_states=np.asarray(message.hidden_states)))
            self.outputs.append(torch.from_numpy(output.hidden_states))
            return replace(output, hidden_states=self.outputs[-1])

        self.executor.step = with_tensors


@pytest.mark.parametrize("losing", [False, True])
def test_states_in_tensors_are_kept_and_fed_as_those_in_arrays_are(losing):
    harness = InTensors(num_blocks=18, max_batch_tokens=8, max_num_seqs=4)
    alive = frozenset([0])
    harness.executor.failures = [Recovered(False, True, alive), Recovered(True, False, alive)] * losing
    prompts = [[i, *range(20)] for i in range(6)]
    for i, prompt in enumerate(prompts):
        harness.submit(i, request(prompt, max_tokens=25, seed=i, drafts=3))
    harness.finish()
    assert [harness.outcomes[i].tokens for i in range(6)] == [
        reference_text(prompt, i, 25) for i, prompt in enumerate(prompts)
    ]
    assert harness.loop.scheduler.num_preemptions > 0
    assert any(len(message.hidden_states) for message in harness.steps)


def test_states_that_wait_do_not_keep_the_message_that_brought_them():
    harness = InTensors()
    harness.submit(0, request([1, 2, 3], drafts=2))
    harness.step()
    [seq] = harness.loop.scheduler.running
    [waiting] = seq.waiting_states.first(3)
    [brought] = harness.outputs
    assert waiting.tolist() == brought.tolist()
    assert waiting.untyped_storage().data_ptr() != brought.untyped_storage().data_ptr()


def test_states_are_asked_for_only_by_requests_that_need_them():
    harness = Watched()
    harness.generate(0, [1, 2, 3], drafts=0)
    assert all(len(step.tap_ids) == len(step.hidden_states) == 0 for step in harness.steps)
    harness.generate(1, [4, 5, 6], drafts=2)
    assert all(step.tap_ids.tolist() == [0, 2, 5] for step in harness.steps)
    assert harness.steps[0].rows["num_feed"].tolist() == [0]  # the prompt's states are only made in this step
    assert harness.steps[1].rows["num_feed"].tolist() == [3]
    assert len(harness.steps[1].hidden_states) == 3 * 3 * HIDDEN_BYTES


def test_every_chunk_of_a_prompt_reaches_the_drafter_even_if_nothing_is_drafted_yet():
    harness = Watched(max_batch_tokens=8, max_waiting_states=10, max_num_seqs=2)
    harness.submit(0, request(list(range(40)), max_tokens=6, drafts=2))
    while harness.loop.num_live:
        harness.step()
        for seq in harness.loop.scheduler.running:
            assert len(seq.waiting_states) <= 10 + 8
    fed = [int(step.rows["num_feed"][0]) for step in harness.steps]
    assert fed[:6] == [0, 0, 10, 10, 10, 10]  # at most 8 + 2 in a step
    assert harness.steps[5].rows["num_draft_tokens"].tolist() == [2]


def test_states_wait_while_drafts_are_only_looked_up_and_are_fed_in_bulk():
    harness = Watched(drafters=(replace(STATES, looks_up=True),), max_waiting_states=12, adaptive_drafts=True)
    policy = harness.loop.scheduler._drafting._policy
    policy.choose = lambda options: Choice(Way.LOOKUP, options[0].limits, 0.0, 0.0)
    harness.generate(0, [1, 2, 3], drafts=2, count=30)
    bulk = []
    for step in harness.steps[1:]:
        [row] = step.rows
        if row["lookup_only"]:
            assert len(step.hidden_states) == 0
            assert row["num_fed"] + row["num_feed"] == row["num_computed"]  # every token, once
        elif row["num_feed"]:
            assert row["num_draft_tokens"] == 0
            assert len(step.hidden_states) == row["num_feed"] * 3 * HIDDEN_BYTES
            bulk.append(int(row["num_feed"]))
    assert bulk
    assert all(12 < count <= 15 for count in bulk)


def test_a_drafter_far_behind_catches_up_in_pieces_and_drafts_then():
    harness = Watched(max_batch_tokens=8, max_num_seqs=2, max_waiting_states=100)
    harness.generate(0, list(range(30)))
    decoding = [step.rows[0] for step in harness.steps if step.rows["sample"][0]][1:]
    assert [int(row["num_feed"]) for row in decoding[:4]] == [10, 10, 10, 3]
    assert [int(row["num_draft_tokens"]) for row in decoding[:4]] == [0, 0, 0, 3]


def test_a_prefix_the_drafter_has_seen_is_shared_whole_when_the_same_token_follows():
    harness = Watched()
    prompt = list(range(24))  # six blocks
    assert harness.generate(0, prompt, count=1) == 24  # nothing was fed
    assert harness.generate(1, prompt) > 24
    computed = [harness.generate(i, prompt, count=1) for i in (2, 3)]
    assert computed == [4, 4]  # the last token is always computed, of a block only the whole counts


def test_a_block_is_computed_again_when_another_token_follows_it():
    """What the drafter keeps of a block's last position depends on the next token."""
    harness = Watched()
    first, second = [*range(8), 10, 11, 12, 13, 14], [*range(8), 20, 21, 22, 23, 24]
    harness.generate(0, first)
    assert harness.generate(1, second, count=1) == len(second) - 4
    harness.generate(2, second)
    assert harness.generate(3, second, count=1) == 1
    harness.generate(4, first)
    assert harness.generate(5, first, count=1) == 1


def test_blocks_of_requests_without_the_drafter_are_computed_again_once():
    harness = Watched()
    prompt = list(range(21))
    harness.generate(0, prompt, drafts=0)
    assert harness.generate(1, prompt, drafts=0, count=1) == 1
    assert harness.generate(2, prompt) >= 21
    assert harness.generate(3, prompt, count=1) == 1
    assert harness.generate(4, prompt, drafts=0, count=1) == 1


@pytest.mark.parametrize("drafting", [True, False])
def test_sequences_are_computed_again_when_the_drafter_lost_its_context(drafting):
    harness = Watched()
    alive = frozenset([0]) if drafting else frozenset()
    harness.executor.failures = [Recovered(target=False, drafter=drafting, drafters=alive)]
    harness.executor.countdown = 4
    computed = harness.generate(0, list(range(20)), count=20)
    assert harness.loop.scheduler.num_preemptions == int(drafting)
    assert (computed > 45) == drafting  # without any drafter there is nothing to compute again for
    after = harness.steps[4:]
    assert any(step.speculative for step in after) == drafting
    assert all(len(step.tap_ids) == (3 if drafting else 0) for step in after)


def test_a_drafter_that_comes_back_is_fed_from_the_start():
    harness = Watched()
    gone, back = Recovered(False, False, frozenset()), Recovered(False, False, frozenset([0]))
    harness.executor.failures = [gone, back]
    harness.generate(0, list(range(20)), count=25)
    assert harness.loop.scheduler.num_preemptions == 1
    assert not any(step.speculative for step in harness.steps[3:6])
    assert any(step.speculative for step in harness.steps[6:])


def test_near_the_end_of_the_context_there_is_room_for_what_the_drafter_writes_behind_it():
    harness = Watched(drafters=(replace(STATES, lookahead=16),), num_blocks=40)
    harness.generate(0, list(range(30)), drafts=4, count=30)  # up to the context's last token


@pytest.mark.parametrize("change", [lambda states: states[:0], lambda states: states[:-1]])
def test_hidden_states_that_are_missing_are_noticed(change):
    harness = Watched()
    step = harness.executor.step

    def losing(message: StepInput):
        output = step(message)
        return replace(output, hidden_states=change(output.hidden_states))

    harness.executor.step = losing
    harness.submit(0, request([1, 2, 3], drafts=2))
    with pytest.raises(ValueError, match="hidden_states: expected 144 bytes for a row"):
        harness.step()
