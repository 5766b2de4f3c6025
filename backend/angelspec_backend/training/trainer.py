"""The training loop."""

from __future__ import annotations

import json

import torch

from angelspec_backend.drafters.checkpoint import DrafterNetwork
from angelspec_backend.training.batches import BatchSource
from angelspec_backend.training.checkpoint import Checkpoints, write_durably
from angelspec_backend.training.config import TrainConfig, dump_config
from angelspec_backend.training.corpus import Corpus
from angelspec_backend.training.distributed import Processes
from angelspec_backend.training.evaluate import Evaluation, GetFeatures, Step, evaluate, held_out_sample
from angelspec_backend.training.log import RunLog, draw_curves, versions
from angelspec_backend.training.optim import MasterOptimizer
from angelspec_backend.training.progress import ProgressBar
from angelspec_backend.training.run_state import Window, capture, check_identity, export, identity, restore
from angelspec_backend.training.schedule import Schedule


class Trainer:
    """One run: from the last checkpoint, or the start, to the last step."""

    def __init__(
        self,
        config: TrainConfig,
        processes: Processes,
        network: DrafterNetwork,
        step: Step,
        train: Corpus,
        held_out: Corpus,
        features: GetFeatures,
        held_out_features: GetFeatures,
    ) -> None:
        """features, held_out_features: of documents by their index in the corpus.

        Raises:
            CheckpointError: the run in this folder was configured otherwise.
            ValueError: rows, steps or schedule do not fit together.
        """
        run = config.run
        self.config, self._processes, self._network, self._step = config, processes, network, step
        self._features, self._held_out_features, self._held_out = features, held_out_features, held_out
        self._sample = held_out_sample(held_out, run.eval_documents)
        data = config.data
        self._source = BatchSource(
            train, data.row_length, data.rows_per_step, run.seed, processes.rank, processes.world_size
        )
        self.steps = run.steps or max(round(run.epochs * self._source.steps_per_epoch), 1)
        rate = config.schedule
        self._schedule = Schedule(
            rate.kind,
            rate.lr,
            self.steps,
            warmup_steps=round(rate.warmup * self.steps),
            floor=min(rate.min_lr, rate.lr),
            decay_steps=round(rate.decay * self.steps) if rate.kind == "wsd" else 0,
        )
        processes.shard(step, run.sharding, getattr(torch, run.dtype))
        self._optimizer = MasterOptimizer(step.named_parameters(), config.optimizer)
        self._checkpoints = Checkpoints(run.out / "checkpoints", run.keep)
        self._identity = identity(config, train.fingerprint())
        self.start = self._resume()

    def run(self) -> Evaluation | None:
        """Train.  Returns the last evaluation, None without held-out documents."""
        run, main = self.config.run, self._processes.is_main
        log = RunLog(run.out, self.start, run.tensorboard) if main else None
        if main:
            write_durably(run.out / "config.yaml", lambda file: file.write(dump_config(self.config).encode()))
            about = {"versions": versions(), "steps": self.steps, "seed": run.seed}
            write_durably(
                run.out / "about.json", lambda file: file.write(json.dumps(about, indent=1).encode())
            )
        evaluation = None
        with ProgressBar("steps", self.steps, self.start) as bar:
            window = Window()
            for number in range(self.start, self.steps):
                window.add(*self._train(number))
                done = number + 1
                if log and (done % run.log_every == 0 or done == self.steps):
                    values = window.means() | {"train/lr": self._schedule.at(number)}
                    log.write(done, values | {"train/epoch": self._source.epoch_of(number)})
                    bar.update(done, window.text())
                    window = Window()
                if self._sample and (done % run.eval_every == 0 or done == self.steps):
                    evaluation = self.evaluate()
                    if log:
                        log.write(done, evaluation.values())
                if done % run.save_every == 0 or done == self.steps:
                    self._save(done, evaluation if done % run.eval_every == 0 or done == self.steps else None)
        if log:
            log.close()
            draw_curves(log.path, run.out / "curves.png")
        return evaluation

    def evaluate(self) -> Evaluation:
        """On held-out documents; every process computes all of them."""
        length = self.config.data.row_length
        return evaluate(self._step, self._held_out, self._sample, length, self._held_out_features)

    def _train(self, number: int) -> tuple[dict[str, float], int]:
        """One step.  Returns values for the log and the tokens of this process's rows."""
        batch = self._source.batch(number)
        self._optimizer.zero_grad()
        drafts = self._step(batch, self._features(batch.documents), self._source.row_seeds(number))
        drafts = self._processes.join(drafts)
        loss = self._step.loss(drafts)
        loss.total.backward()
        self._processes.add_gradients(self._step)
        norm = self._optimizer.step(self._schedule.at(number))
        accepted = drafts.survival().accepted_length
        values = {"train/loss": float(loss.total.detach()), "train/grad_norm": norm}
        values |= {f"train/{name}": float(part.detach()) for name, part in loss.parts.items()}
        return values | {"train/accepted_length": 1 + accepted}, len(batch.token_ids)

    def _save(self, done: int, evaluation: Evaluation | None) -> None:
        state = capture(self._step, self._optimizer)
        if self._processes.is_main:
            out = self.config.run.out
            best = evaluation is not None and self._checkpoints.offer(done, evaluation.accepted_length)
            self._checkpoints.save(done, {"step": done, "identity": self._identity, **state})
            for name in ("last", "best") if best else ("last",):
                export(self._network, state["weights"], out / name, self.config)
        self._processes.barrier()

    def _resume(self) -> int:
        state = self._checkpoints.load()
        if state is None:
            return 0
        check_identity(self._checkpoints.folder, state["identity"], self._identity)
        restore(self._step, self._optimizer, state)
        return int(state["step"])
