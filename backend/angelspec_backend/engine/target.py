"""The target: computes a step, samples every wanted position itself, and verifies the drafts.

A draft token is accepted while it equals the target's own sample; the first unequal position emits
the sample instead.  So the output is the target's own sample path, whatever the drafts were.
"""

from __future__ import annotations

import numpy as np

from angelspec_backend.core.messages import DraftOutput, StepInput, StepOutput
from angelspec_backend.engine.batch import check_step, pack, ragged
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.sampler import SamplingRows, sample


class TargetEngine:
    """Verifies drafts with a model runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def step(self, step: StepInput, drafts: DraftOutput) -> StepOutput:
        """Compute the known tokens and drafts of every row; emit accepted drafts and one more token.

        Raises:
            ValueError: the step contradicts itself or points outside the vocabulary or the KV pool.
        """
        runner, pool, rows = self.runner, self.runner.pool, step.rows
        check_step(step, drafts, pool.num_blocks, pool.block_size, runner.vocab_size, runner.max_context)
        device, shapes = runner.device, runner.graph_shapes
        batch = pack(rows, step.token_ids, drafts, step.block_table, pool.block_size, device, shapes)
        logits = runner.forward(batch)  # [num_samples, vocab_size]

        # A sampling row has one sample behind its last known token and one behind each of its drafts.
        sampling = rows["sample"] == 1
        counts = np.where(sampling, drafts.lens + 1, 0)
        first = rows["num_computed"].astype(np.int64) + rows["num_tokens"]
        samples = sample(logits, SamplingRows.from_rows(rows, counts, first))  # [num_samples]

        row_of, index = ragged(counts)  # [num_samples], index within the row
        draft_row, draft_index = ragged(drafts.lens)  # [sum(lens)]
        agrees = drafts.token_ids == samples[index < drafts.lens[row_of]]  # [sum(lens)]
        accepted = drafts.lens.copy()  # [num_rows] up to the first disagreement
        np.minimum.at(accepted, draft_row[~agrees], draft_index[~agrees].astype(np.int32))

        emitted = np.where(sampling, accepted + 1, 0).astype(np.int32)
        return StepOutput(samples[index < emitted[row_of]], emitted, drafts.lens)
