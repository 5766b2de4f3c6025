"""The target: computes a step, samples every wanted position itself, and verifies the drafts.

A draft token is accepted while it equals the target's own sample; the first unequal position emits
the sample instead.  So the output is the target's own sample path, whatever the drafts were.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angelspec_backend.core.messages import DraftOutput, StepInput, StepOutput
from angelspec_backend.engine.batch import check_step, pack, ragged
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.sampler import SamplingRows, sample


class TargetEngine:
    """Verifies drafts with a model runner."""

    def __init__(self, runner: ModelRunner, states_on_device: bool = False) -> None:
        """states_on_device: hidden states are returned as a tensor, where the model is"""
        self.runner = runner
        self._states_on_device = states_on_device

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput:
        """Compute the known tokens and drafts of every row; emit accepted drafts and one more token.

        Hidden states are computed and returned for the rows that ask for them alone.

        Raises:
            ValueError: the step contradicts itself or points outside the vocabulary or the KV pool.
        """
        begin = time.perf_counter()
        runner, pool, rows = self.runner, self.runner.pool, step.rows
        check_step(
            step,
            drafts,
            pool.num_blocks,
            pool.block_size,
            runner.vocab_size,
            runner.max_context,
            runner.num_layers,
        )
        device, shapes = runner.device, runner.graph_shapes
        batch = pack(rows, step.token_ids, drafts, step.block_table, pool.block_size, device, shapes)
        taps = np.unique(step.tap_ids)  # [num_taps] all that any row asks for
        logits, states = runner.forward_with_taps(batch, taps.tolist())  # [num_samples, vocab_size]

        # A sampling row has one sample behind its last known token and one behind each of its drafts.
        sampling = rows["sample"] == 1
        counts = np.where(sampling, drafts.lens + 1, 0)
        first = rows["num_computed"].astype(np.int64) + rows["num_tokens"]
        samples = sample(logits, SamplingRows.from_rows(rows, counts, first))  # [num_samples]

        tokens, emitted = accept(samples.tolist(), drafts, sampling.tolist())
        output = StepOutput(tokens, emitted, drafts.lens, drafts.looked_up)
        if len(taps):
            flat = _committed_states(step, drafts, emitted, taps, states)
            output = replace(output, hidden_states=flat if self._states_on_device else flat.cpu().numpy())
        return replace(output, seconds=time.perf_counter() - begin)


def accept(
    samples: list[int], drafts: DraftOutput, sampling: list[bool]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of each sampling row the drafts that agree with what was sampled, and the sample behind the last one.

    samples: [sum(lens + 1) of sampling rows]; sampling: [num_rows].  Returns the tokens, [sum(emitted)], and
    how many are of each row, [num_rows].  In plain Python: for as few numbers calls of numpy take longer.
    """
    tokens: list[int] = []
    emitted: list[int] = []
    draft, at, first = drafts.token_ids.tolist(), 0, 0
    for length, is_sampling in zip(drafts.lens.tolist(), sampling, strict=True):
        accepted = 0
        if is_sampling:
            while accepted < length and draft[at + accepted] == samples[first + accepted]:
                accepted += 1
            tokens += samples[first : first + accepted + 1]
            first += length + 1
        emitted.append(accepted + 1 if is_sampling else 0)
        at += length
    return np.array(tokens, np.int32), np.array(emitted, np.int32)


def _committed_states(
    step: StepInput,
    drafts: DraftOutput,
    emitted: NDArray[np.int32],
    taps: NDArray[np.int32],
    states: list[Tensor],
) -> Tensor:
    """The bytes of ``StepOutput.hidden_states``: committed tokens of the rows that ask, their own taps.

    emitted: [num_rows] sampled tokens; taps: [num_taps] ascending; states: per tap [num_tokens, hidden].
    """
    rows = step.rows
    tapped = rows["num_taps"] > 0
    counts = np.where(tapped, rows["num_tokens"] + np.maximum(emitted - 1, 0), 0)  # [num_rows]
    row_of, offset = ragged(counts)  # [num_committed]
    lens = rows["num_tokens"].astype(np.int64) + drafts.lens
    index = torch.from_numpy((np.cumsum(lens) - lens)[row_of] + offset).to(states[0].device)
    chosen = torch.stack([state[index] for state in states], dim=1)  # [num_committed, num_taps, hidden]
    flat = chosen.view(torch.uint8)  # [num_committed, num_taps, bytes]

    wanted = np.zeros((len(rows), len(taps)), bool)
    wanted[ragged(rows["num_taps"])[0], np.searchsorted(taps, step.tap_ids)] = True
    if not wanted[tapped].all():
        flat = flat[torch.from_numpy(wanted[row_of]).to(flat.device)]
    return flat.reshape(-1)
