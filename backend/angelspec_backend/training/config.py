"""The configuration of a training run: a YAML file, changed by ``key=value`` on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import Field

from angelspec_backend.core.yaml_options import OptionsError, Section, check_options, read_options
from angelspec_backend.drafters.spec import BLOCK_KINDS, CHAIN_KINDS
from angelspec_backend.training.objectives import BlockObjective
from angelspec_backend.training.optim import OptimizerConfig
from angelspec_backend.training.schedule import Kind
from angelspec_backend.training.ttt import StepObjective

DrafterKind = Literal["dflash", "dflare", "dfly", "dspark", "mtp", "eagle3"]
assert get_args(DrafterKind) == BLOCK_KINDS + CHAIN_KINDS


TrainConfigError = OptionsError
"""The configuration is wrong; the message says which key, the value, and what is allowed."""


class DataConfig(Section):
    """Sizes in tokens."""

    conversations: tuple[Path, ...] = Field((), description="JSON lines with token_ids, messages, ...")
    text: tuple[Path, ...] = Field((), description="JSON lines of {text}")
    held_out: float = Field(0.02, ge=0, lt=1, description="share of the documents kept for evaluation")
    row_length: int = Field(1024, ge=16, description="documents are cut to this and packed into rows of it")
    rows_per_step: int = Field(4, ge=1, description="rows of a step, over all processes")
    feature_cache: Path | None = Field(None, description="folder for the target's features; none: computed")


class DrafterConfig(Section):
    """What is trained."""

    kind: DrafterKind = "dfly"
    start: str = Field(
        "target", description="'target': its layers; 'random'; or an exported drafter's folder"
    )
    num_layers: int = Field(2, ge=1, le=64, description="of a block drafter; chain drafters have one")
    start_layers: tuple[int, ...] = Field((), description="target layers to start from; none: its last ones")
    tap_ids: tuple[int, ...] = Field(
        (), description="target layers whose outputs are read; none: spread evenly"
    )
    num_taps: int = Field(5, ge=1, description="of a block drafter without tap_ids")
    draft_vocab_size: int = Field(0, ge=0, description="most frequent tokens that can be drafted; 0: all")
    block_size: int = Field(8, ge=2, le=64, description="slots of a block, the anchor's included")
    mask_token_id: int | None = Field(None, description="none: the token least used in the data")
    label_shift: Literal[0, 1] = 0
    correction_size: int | None = Field(
        None, description="DFly's hidden correction; none: hidden size; 0: none"
    )
    markov_rank: int = Field(256, ge=0, description="DSpark's Markov head")
    markov_kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_head: bool = Field(True, description="DSpark's")
    num_steps: int = Field(3, ge=1, le=16, description="drafts that a chain drafter is trained for")
    on_policy: bool = Field(False, description="a chain drafter reads its own drafts from the second step on")

    @property
    def is_block(self) -> bool:
        """Whether it drafts a block in one pass."""
        return self.kind in BLOCK_KINDS


class RunConfig(Section):
    """How long, how fast, and what is written."""

    out: Path = Field(
        Path("runs/drafter"), description="folder of checkpoints, logs and the exported drafter"
    )
    steps: int = Field(0, ge=0, description="0: as many as epochs take")
    epochs: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "cpu"
    threads: int = Field(0, ge=0, description="0: torch's choice")
    sharding: Literal["none", "full"] = Field(
        "none", description="full: FSDP2 over the processes of torchrun"
    )
    chunk: int = Field(4096, ge=16, description="positions whose logits are in memory at a time")
    recompute: bool = Field(False, description="make logits again in the backward pass: less memory, slower")
    log_every: int = Field(10, ge=1)
    eval_every: int = Field(200, ge=1)
    eval_documents: int = Field(64, ge=1)
    save_every: int = Field(200, ge=1)
    keep: int = Field(2, ge=1, description="checkpoints kept, besides the best one")
    tensorboard: bool = True


class ScheduleConfig(Section):
    """The learning rate.  Warm-up and decay as shares of all steps."""

    kind: Kind = "cosine"
    lr: float = Field(6e-4, gt=0)
    min_lr: float = Field(6e-5, ge=0)
    warmup: float = Field(0.04, ge=0, le=1)
    decay: float = Field(0.2, ge=0, le=1, description="of kind wsd")


class TrainConfig(Section):
    """Everything that decides a run."""

    target: str = Field("models/SmolLM2-135M-Instruct", description="Hugging Face id or local folder")
    data: DataConfig = DataConfig.model_validate({})
    drafter: DrafterConfig = DrafterConfig.model_validate({})
    anchor_density: float = Field(0.15, gt=0, le=1, description="blocks per token that is to be predicted")
    objective: BlockObjective = BlockObjective(weighting="dpace", lk_weight=1.0)  # of block drafters
    step_objective: StepObjective = StepObjective()  # of chain drafters
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    run: RunConfig = RunConfig.model_validate({})


def load_config(path: Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file and apply ``section.key=value`` overrides, whose values are YAML too.

    Raises:
        TrainConfigError: the file cannot be read, or a key or value is wrong.
    """
    return make_config(read_options(path, overrides))


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """Check values.  Raises TrainConfigError for the first that is wrong."""
    return check_options(TrainConfig, values)


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
