"""Steps survive the way through Triton's tensors, empty ones too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import ROW, DraftOutput, StepInput, StepOutput
from angelspec_backend.triton import codec

int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(lambda items: np.array(items, np.int32))
some_bytes = st.binary(max_size=30).map(lambda data: np.frombuffer(data, np.uint8))
rows = st.binary(max_size=4 * ROW.itemsize).map(
    lambda data: np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
)


def assert_same(left, right):
    for name in left.__dataclass_fields__:
        a, b = np.asarray(getattr(left, name)), np.asarray(getattr(right, name))
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
        assert a.shape == b.shape


@given(rows, int32s, int32s, int32s, int32s, some_bytes)
def test_steps_survive(rows, token_ids, feed, table, tap_ids, states):
    step = StepInput(rows, token_ids, feed, table, tap_ids, states)
    arrays = codec.encode_step(step)
    dtypes = {"step": np.int32} | ({"feed_hidden_states": np.uint8} if len(states) else {})
    assert {name: array.dtype for name, array in arrays.items()} == dtypes
    assert_same(codec.decode_step(arrays), step)


@given(int32s, int32s, some_bytes)
def test_drafts_and_outputs_survive(token_ids, lens, states):
    drafts = DraftOutput(token_ids, lens, 1 - lens)
    assert_same(codec.decode_drafts(codec.encode_drafts(drafts), len(lens)), drafts)
    output = StepOutput(token_ids, lens, lens[::-1], 1 - lens, states, seconds=0.012345)
    assert_same(codec.decode_output(codec.encode_output(output), len(lens)), output)


def test_hidden_states_are_asked_for_only_when_some_are_wanted():
    empty = np.zeros(0, np.int32)
    step = StepInput(np.zeros(1, ROW), empty, empty, empty)
    assert codec.step_outputs(step) == ("sampled",)
    tapped = replace(step, tap_ids=np.array([3], np.int32))
    assert codec.step_outputs(tapped) == ("sampled", "hidden_states")


def test_decoding_copies_nothing():
    states = np.arange(6, dtype=np.uint8)
    step = StepInput(np.zeros(3, ROW), *(np.arange(3, dtype=np.int32) for _ in range(4)), states)
    arrays = codec.encode_step(step)
    assert arrays["feed_hidden_states"] is states
    decoded = codec.decode_step(arrays)
    assert np.shares_memory(decoded.rows, arrays["step"])
    assert np.shares_memory(decoded.tap_ids, arrays["step"])


def test_hidden_states_in_a_tensor_stay_in_it():
    states = torch.arange(6, dtype=torch.uint8)
    empty = np.zeros(0, np.int32)
    step = codec.encode_step(StepInput(np.zeros(1, ROW), empty, empty, empty, hidden_states=states))
    output = codec.encode_output(StepOutput(empty, empty, empty, empty, states))
    assert step["feed_hidden_states"] is output["hidden_states"] is states
    for decoded in (codec.decode_step(step), codec.decode_output(output, 0)):
        assert decoded.hidden_states.data_ptr() == states.data_ptr()


def test_a_step_without_drafts_is_autoregressive():
    drafts = codec.decode_drafts({}, 3)
    assert len(drafts.token_ids) == 0
    assert drafts.lens.tolist() == [0, 0, 0]


def test_torn_steps_are_refused():
    whole = codec.encode_step(StepInput(np.zeros(2, ROW), *(np.arange(3, dtype=np.int32) for _ in range(3))))
    longer = np.append(whole["step"], np.int32(1))
    headers = [np.array(header, np.int32) for header in ([], [0, 0], [0, -1, 1, 0, 0])]
    for torn in (whole["step"][:-1], longer, *headers):
        with pytest.raises(codec.CodecError, match=f"step of {len(torn)} numbers, which is not what"):
            codec.decode_step({"step": torn})
    with pytest.raises(codec.CodecError, match="step is missing"):
        codec.decode_step({})


def test_descriptions_survive():
    pool = codec.PoolInfo(num_blocks=64, block_size=16)
    target = codec.TargetInfo(
        pool,
        max_context=8192,
        vocab_size=100,
        eos_token_ids=(2, 0),
        num_layers=6,
        hidden_bytes=64,
        hidden_states_on="cpu",
    )
    assert codec.decode_target_info(codec.encode_info(target)) == target
    drafter = codec.DrafterModelInfo(
        pool,
        (
            DrafterInfo("ngram", False, False),
            DrafterInfo("draft_model", True, True),
            DrafterInfo("dfly", False, True, tap_ids=(1, 3), hidden_bytes=64, lookahead=8),
        ),
        hidden_states_on="device",
    )
    assert codec.decode_drafter_info(codec.encode_info(drafter)) == drafter
