"""The configuration of a training run: a YAML file, changed by ``key=value`` on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from angelspec_backend.drafters.spec import BLOCK_KINDS, CHAIN_KINDS
from angelspec_backend.training.objectives import BlockObjective
from angelspec_backend.training.optim import OptimizerConfig
from angelspec_backend.training.schedule import Kind
from angelspec_backend.training.ttt import StepObjective

DrafterKind = Literal["dflash", "dflare", "dfly", "dspark", "mtp", "eagle3"]
assert get_args(DrafterKind) == BLOCK_KINDS + CHAIN_KINDS


class TrainConfigError(ValueError):
    """The configuration is wrong; the message says which key, the value, and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Sizes in tokens."""

    conversations: tuple[Path, ...] = Field((), description="JSON lines with token_ids, messages, ...")
    text: tuple[Path, ...] = Field((), description="JSON lines of {text}")
    held_out: float = Field(0.02, ge=0, lt=1, description="share of the documents kept for evaluation")
    row_length: int = Field(1024, ge=16, description="documents are cut to this and packed into rows of it")
    rows_per_step: int = Field(4, ge=1, description="rows of a step, over all processes")
    feature_cache: Path | None = Field(None, description="folder for the target's features; none: computed")


class DrafterConfig(_Section):
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


class RunConfig(_Section):
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


class ScheduleConfig(_Section):
    """The learning rate.  Warm-up and decay as shares of all steps."""

    kind: Kind = "cosine"
    lr: float = Field(6e-4, gt=0)
    min_lr: float = Field(6e-5, ge=0)
    warmup: float = Field(0.04, ge=0, le=1)
    decay: float = Field(0.2, ge=0, le=1, description="of kind wsd")


class TrainConfig(_Section):
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
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise TrainConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise TrainConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise TrainConfigError(f"{path} must hold keys and values, found {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """Check values.  Raises TrainConfigError for the first that is wrong."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = difflib.get_close_matches(key, list(_keys()), 1, 0.0)[0]
            raise TrainConfigError(f"unknown key {key}; did you mean {known}?") from None
        raise TrainConfigError(f"{key} is {first['input']!r}: {first['msg']}") from None


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise TrainConfigError(f"{text}: an override is written key=value")
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise TrainConfigError(f"{key}: {section} is a value, not a section")
    values[last] = yaml.safe_load(value)


def _keys() -> Iterator[str]:
    """All keys, with their section in front."""
    for name, field in TrainConfig.model_fields.items():
        kind: Any = field.annotation
        inner = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
        yield from [name] if inner is None else [f"{name}.{key}" for key in inner]
