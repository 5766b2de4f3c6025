"""The wire form of a step: one array per message, as the inner models' config.pbtxt files declare them.

A tensor costs the same time whatever its size, tens of microseconds on its way through the processes, so
all that is small lies in one array of int32.  Hidden states, which may be large and which not every model
reads, are an array of their own, left out where there are none; they may be a tensor of torch instead.  A
step of no rows asks a model to describe itself.  Decoded arrays are views of the message.

step        [5] rows and lengths of the parts behind them, then the parts: rows, token_ids, feed_token_ids,
            block_table, tap_ids
drafts      [num_rows] lens, [num_rows] looked_up, then token_ids
sampled     microseconds it took, [num_rows] lens, [num_rows] draft_lens, [num_rows] looked_up, then token_ids
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.hidden_states import States
from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import ROW, DraftOutput, StepInput, StepOutput

Arrays = Mapping[str, Any]  # arrays of numpy; hidden states may be a tensor of torch

STEP = "step"
FEED_STATES = "feed_hidden_states"  # beside it, for drafters that read them
DRAFTS = "drafts"
SAMPLED = "sampled"
HIDDEN_STATES = "hidden_states"  # beside it, of a step with taps
STATES = frozenset({FEED_STATES, HIDDEN_STATES})
INFO = "info"

NUM_PARTS = 5
ROW_INTS = ROW.itemsize // 4
MAX_INT = np.iinfo(np.int32).max


class CodecError(ValueError):
    """Arrays that are not a step; the message names the array."""


@dataclass(frozen=True)
class PoolInfo:
    """Blocks of a KV pool; target and drafter share block ids, so theirs must be equal."""

    num_blocks: int
    block_size: int  # tokens


@dataclass(frozen=True)
class TargetInfo:
    """What the target says of itself."""

    pool: PoolInfo
    max_context: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int  # decoder layers, which tap ids count
    hidden_bytes: int  # of one hidden state
    hidden_states_on: str  # the option


@dataclass(frozen=True)
class DrafterModelInfo:
    """What the drafter model says of itself; the drafters in the order of ROW["drafter"]."""

    pool: PoolInfo
    drafters: tuple[DrafterInfo, ...]
    hidden_states_on: str  # the option


def encode_step(step: StepInput) -> dict[str, Any]:
    """Inputs of `speculate`."""
    parts = (step.token_ids, step.feed_token_ids, step.block_table, step.tap_ids)
    header = np.array([len(step.rows), *map(len, parts)], np.int32)
    arrays: dict[str, Any] = {STEP: np.concatenate([header, step.rows.view(np.int32), *parts])}
    if len(step.hidden_states):
        arrays[FEED_STATES] = step.hidden_states
    return arrays


def step_outputs(step: StepInput) -> tuple[str, ...]:
    """The outputs to ask `target` or `speculate` for."""
    return (SAMPLED, HIDDEN_STATES) if len(step.tap_ids) else (SAMPLED,)


def decode_step(arrays: Arrays) -> StepInput:
    """The step in a model's inputs.

    Raises:
        CodecError: ``step`` is missing or not as long as its header says.
    """
    if STEP not in arrays:
        raise CodecError(f"{STEP} is missing")
    packed = arrays[STEP].reshape(-1)
    header = packed[:NUM_PARTS].tolist()
    lens = [header[0] * ROW_INTS, *header[1:]] if len(header) == NUM_PARTS else []
    if not lens or min(lens) < 0 or len(packed) != NUM_PARTS + sum(lens):
        raise CodecError(f"{STEP} of {len(packed)} numbers, which is not what its header says: {header}")
    ends = accumulate(lens, initial=NUM_PARTS)
    rows, token_ids, feed, table, tap_ids = (packed[begin:end] for begin, end in pairwise(ends))
    return StepInput(rows.view(ROW), token_ids, feed, table, tap_ids, _states(arrays, FEED_STATES))


def encode_drafts(drafts: DraftOutput) -> dict[str, NDArray[Any]]:
    """Outputs of `drafter`."""
    return {DRAFTS: np.concatenate([drafts.lens, drafts.looked_up, drafts.token_ids])}


def decode_drafts(arrays: Arrays, num_rows: int) -> DraftOutput:
    """The drafts in the inputs of `target`, which an autoregressive step leaves out."""
    if DRAFTS not in arrays:
        return DraftOutput.empty(num_rows)
    packed = arrays[DRAFTS].reshape(-1)
    return DraftOutput(packed[2 * num_rows :], packed[:num_rows], packed[num_rows : 2 * num_rows])


def encode_output(output: StepOutput) -> dict[str, Any]:
    """Outputs of `target` and `speculate`."""
    took = np.array([min(int(output.seconds * 1e6), MAX_INT)], np.int32)
    arrays: dict[str, Any] = {
        SAMPLED: np.concatenate([took, output.lens, output.draft_lens, output.looked_up, output.token_ids])
    }
    if len(output.hidden_states):
        arrays[HIDDEN_STATES] = output.hidden_states
    return arrays


def decode_output(arrays: Arrays, num_rows: int) -> StepOutput:
    """What the target sampled for so many rows."""
    packed = arrays[SAMPLED].reshape(-1)
    lens, draft_lens, looked_up = packed[1 : 1 + 3 * num_rows].reshape(3, num_rows)
    token_ids, states = packed[1 + 3 * num_rows :], _states(arrays, HIDDEN_STATES)
    return StepOutput(token_ids, lens, draft_lens, looked_up, states, seconds=float(packed[0]) / 1e6)


def encode_info(info: TargetInfo | DrafterModelInfo) -> dict[str, NDArray[Any]]:
    """Answer to a step of no rows: one JSON text."""
    return {INFO: np.array([json.dumps(asdict(info)).encode()], dtype=object)}


def decode_target_info(arrays: Arrays) -> TargetInfo:
    """The target's answer to a step of no rows."""
    info = json.loads(arrays[INFO].item())
    values = {"pool": PoolInfo(**info["pool"]), "eos_token_ids": tuple(info["eos_token_ids"])}
    return TargetInfo(**(info | values))


def decode_drafter_info(arrays: Arrays) -> DrafterModelInfo:
    """The drafter model's answer to a step of no rows."""
    info = json.loads(arrays[INFO].item())
    drafters = (DrafterInfo(**(each | {"tap_ids": tuple(each["tap_ids"])})) for each in info["drafters"])
    return DrafterModelInfo(PoolInfo(**info["pool"]), tuple(drafters), info["hidden_states_on"])


def _states(arrays: Arrays, name: str) -> States:
    states: States | None = arrays.get(name)
    return np.zeros(0, np.uint8) if states is None else states.reshape(-1)
