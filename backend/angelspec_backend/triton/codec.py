"""The wire form of a step: named flat arrays, as the inner models' config.pbtxt files declare them.

Arrays are views wherever numpy allows it.  Zero-length arrays are ordinary: a step without drafts
has empty draft arrays, and an empty ``rows`` asks a model to describe itself.  What has to do with
hidden states is left out where there are none, so that other drafters do not pay for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.core.loop_config import DrafterInfo
from angelspec_backend.core.messages import ROW, DraftOutput, StepInput, StepOutput

Arrays = Mapping[str, NDArray[Any]]

STEP_OUTPUTS = ("sampled_token_ids", "sampled_lens", "verified_lens")
HIDDEN_STATES = "hidden_states"  # an output too, of a step with taps
DRAFT_OUTPUTS = ("draft_token_ids", "draft_lens")
INFO_OUTPUTS = ("info",)


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


@dataclass(frozen=True)
class DrafterModelInfo:
    """What the drafter model says of itself; the drafters in the order of ROW["drafter"]."""

    pool: PoolInfo
    drafters: tuple[DrafterInfo, ...]


def encode_step(step: StepInput) -> dict[str, NDArray[Any]]:
    """Inputs of `speculate`; also of `drafter` and `target`, which take the part they need."""
    arrays: dict[str, NDArray[Any]] = {
        "rows": step.rows.view(np.uint8),  # [num_rows * ROW.itemsize]
        "token_ids": step.token_ids,
        "feed_token_ids": step.feed_token_ids,
        "block_table": step.block_table,
    }
    if len(step.tap_ids):
        arrays["tap_ids"] = step.tap_ids
    if len(step.hidden_states):
        arrays["feed_hidden_states"] = step.hidden_states
    return arrays


def step_outputs(step: StepInput) -> tuple[str, ...]:
    """The outputs to ask `target` or `speculate` for."""
    return (*STEP_OUTPUTS, HIDDEN_STATES) if len(step.tap_ids) else STEP_OUTPUTS


def decode_step(arrays: Arrays) -> StepInput:
    """The step in a model's inputs; an absent array is empty.

    Raises:
        CodecError: ``rows`` is missing or is no whole number of records.
    """
    if "rows" not in arrays:
        raise CodecError("rows is missing")
    rows = np.ascontiguousarray(arrays["rows"].reshape(-1))
    if rows.nbytes % ROW.itemsize:
        raise CodecError(f"rows of {rows.nbytes} bytes; each record has {ROW.itemsize}")
    return StepInput(
        rows=rows.view(ROW),
        token_ids=_flat(arrays, "token_ids"),
        feed_token_ids=_flat(arrays, "feed_token_ids"),
        block_table=_flat(arrays, "block_table"),
        tap_ids=_flat(arrays, "tap_ids"),
        hidden_states=_flat(arrays, "feed_hidden_states", np.uint8),
    )


def encode_drafts(drafts: DraftOutput) -> dict[str, NDArray[Any]]:
    """Outputs of `drafter`."""
    return {"draft_token_ids": drafts.token_ids, "draft_lens": drafts.lens}


def decode_drafts(arrays: Arrays, num_rows: int) -> DraftOutput:
    """The drafts in the inputs of `target`, which an autoregressive step leaves out."""
    if "draft_lens" not in arrays:
        return DraftOutput.empty(num_rows)
    return DraftOutput(_flat(arrays, "draft_token_ids"), _flat(arrays, "draft_lens"))


def encode_output(output: StepOutput) -> dict[str, NDArray[Any]]:
    """Outputs of `target` and `speculate`."""
    arrays: dict[str, NDArray[Any]] = dict(
        zip(STEP_OUTPUTS, (output.token_ids, output.lens, output.draft_lens), strict=True)
    )
    if len(output.hidden_states):
        arrays[HIDDEN_STATES] = output.hidden_states
    return arrays


def decode_output(arrays: Arrays) -> StepOutput:
    """What the target sampled."""
    token_ids, lens, draft_lens = (_flat(arrays, name) for name in STEP_OUTPUTS)
    return StepOutput(token_ids, lens, draft_lens, _flat(arrays, HIDDEN_STATES, np.uint8))


def encode_info(info: TargetInfo | DrafterModelInfo) -> dict[str, NDArray[Any]]:
    """Answer to an empty ``rows``: one JSON text."""
    return {"info": np.array([json.dumps(asdict(info)).encode()], dtype=object)}


def decode_target_info(arrays: Arrays) -> TargetInfo:
    """The target's answer to an empty ``rows``."""
    info = json.loads(arrays["info"].item())
    values = {"pool": PoolInfo(**info["pool"]), "eos_token_ids": tuple(info["eos_token_ids"])}
    return TargetInfo(**(info | values))


def decode_drafter_info(arrays: Arrays) -> DrafterModelInfo:
    """The drafter model's answer to an empty ``rows``."""
    info = json.loads(arrays["info"].item())
    drafters = (DrafterInfo(**(each | {"tap_ids": tuple(each["tap_ids"])})) for each in info["drafters"])
    return DrafterModelInfo(PoolInfo(**info["pool"]), tuple(drafters))


def _flat(arrays: Arrays, name: str, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    array = arrays.get(name)
    return np.zeros(0, dtype) if array is None else array.reshape(-1)
