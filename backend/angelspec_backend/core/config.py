"""Configuration: one frozen object, built once at the edge of each process.

Values come from the defaults here, then the ``parameters`` of a model's ``config.pbtxt``, then one
YAML file named by the environment variable ``ANGELSPEC_CONFIG``, later ones winning.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_ENV = "ANGELSPEC_CONFIG"

NETWORK_DRAFTERS = ("dflash", "dflare", "dfly", "dspark", "mtp", "eagle3")
"""Drafters trained for one target; the option of the same name says where the checkpoint is."""
DRAFTERS = ("ngram", "draft_model", *NETWORK_DRAFTERS)


class ConfigError(ValueError):
    """The configuration is wrong; the message says which key, the value, and what is allowed."""


class EngineConfig(BaseModel):
    """Every option of the server.  Sizes in tokens or blocks, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The models
    target: str = Field("models/SmolLM2-135M-Instruct", description="Hugging Face id or local folder")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: the target with 8-bit weights, for CPUs with AVX512-BF16"
    )
    drafter_quantization: Literal["auto", "none", "int8"] = Field(
        "auto", description="the same for drafters, where it changes no text; auto: where the CPU can"
    )
    draft_model: str = Field(
        "", description="id or folder of the small causal LM behind drafter 'draft_model'"
    )
    dflash: str = Field("", description="id or folder of the checkpoint of drafter 'dflash'")
    dflare: str = Field("", description="id or folder of the checkpoint of drafter 'dflare'")
    dfly: str = Field("", description="id or folder of the checkpoint of drafter 'dfly'")
    dspark: str = Field("", description="id or folder of the checkpoint of drafter 'dspark'")
    mtp: str = Field("", description="id or folder of the checkpoint of drafter 'mtp'")
    eagle3: str = Field("", description="id or folder of the checkpoint of drafter 'eagle3'")
    drafters: str = Field("ngram", description="comma-separated names of the drafters to load")
    ngram_min: int = Field(2, ge=1, le=16, description="shortest suffix the n-gram drafter looks up")
    ngram_max: int = Field(4, ge=1, le=16, description="longest suffix that is looked up")
    lookup: bool = Field(
        True, description="network drafters look up the end of a text in the text, where that drafts better"
    )

    # KV pool
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block")
    num_blocks: int = Field(4096, ge=2, le=1 << 24, description="KV blocks, block 0 being reserved")
    max_context: int = Field(0, ge=0, description="longest prompt + output; 0: what the target supports")

    # Scheduling
    prefix_caching: bool = Field(True, description="keep KV blocks of finished requests for equal prefixes")
    max_num_seqs: int = Field(64, ge=1, le=1024, description="sequences computed at a time")
    max_batch_tokens: int = Field(512, ge=2, le=1 << 16, description="known tokens computed in a step")
    max_slowdown: float = Field(
        2.6, ge=1, le=100, description="a step with prompt chunks takes at most so many times one without"
    )
    max_queue_size: int = Field(256, ge=0, le=1 << 20, description="requests waiting beyond the running ones")
    drain_timeout: float = Field(30.0, ge=0, le=86400, description="seconds running streams get at shutdown")

    # Defaults of a request
    drafter: str = Field("ngram", description="drafter of requests that name none; 'none' is plain decoding")
    num_draft_tokens: int = Field(7, ge=0, le=32, description="longest draft of requests that set none")
    adaptive_drafts: bool = Field(True, description="shorten drafts that cost more time than they save")
    max_tokens: int = Field(256, ge=1, description="output limit of requests that set none")

    # GPU
    batch_invariant: bool = Field(
        True, description="every text the same in any batch; false: faster kernels, a CPU always keeps it"
    )
    cuda_graphs: bool = Field(True, description="replay verify steps as CUDA graphs")
    hidden_states_on: Literal["cpu", "device"] = Field(
        "cpu", description="where hidden states travel to drafters; device: they stay on the GPU, see README"
    )

    # Process
    num_threads: int = Field(0, ge=0, le=1024, description="CPU threads of a model; 0: all cores")

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The names in ``drafters``, in order: a drafter's index is its position here."""
        return tuple(name.strip() for name in self.drafters.split(",") if name.strip())

    @model_validator(mode="after")
    def _check_together(self) -> EngineConfig:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is larger than ngram_max {self.ngram_max}")
        for option in ("quantization", "drafter_quantization"):
            if getattr(self, option) == "int8" and self.dtype != "bfloat16":
                raise ValueError(f"{option} 'int8' needs dtype bfloat16, got '{self.dtype}'")
        for name in self.drafter_names:
            if name not in DRAFTERS:
                raise ValueError(f"drafters: unknown drafter '{name}'; known: {', '.join(DRAFTERS)}")
            if name in NETWORK_DRAFTERS and not getattr(self, name):
                raise ValueError(f"drafters: '{name}' needs {name}, the id or folder of its checkpoint")
        if len(set(self.drafter_names)) != len(self.drafter_names):
            raise ValueError(f"drafters: '{self.drafters}' names a drafter twice")
        if "draft_model" in self.drafter_names and not self.draft_model:
            raise ValueError(
                "drafters: 'draft_model' needs draft_model, the id or folder of a small causal LM"
            )
        if self.drafter != "none" and self.drafter not in self.drafter_names:
            allowed = ", ".join(("none", *self.drafter_names))
            raise ValueError(f"drafter: '{self.drafter}' is not loaded; allowed: {allowed}")
        return self


def load_config(parameters: Mapping[str, str] | None = None) -> EngineConfig:
    """Build the configuration from a model's parameters and the YAML file named in the environment.

    Raises:
        ConfigError: an unknown key (with the nearest valid one) or a value out of range.
    """
    values: dict[str, Any] = dict(parameters or {})
    source = "config.pbtxt parameters"
    _refuse_unknown(values, source)
    if path := os.environ.get(CONFIG_ENV):
        overrides = _read_yaml(Path(path))
        _refuse_unknown(overrides, f"the YAML file in {CONFIG_ENV}")
        values |= overrides
    try:
        return EngineConfig(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_readable(detail) for detail in error.errors())) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_ENV}: cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{CONFIG_ENV}: {path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{CONFIG_ENV}: {path} must hold 'key: value' lines, not a {type(content).__name__}"
        )
    return content


def _refuse_unknown(values: Mapping[str, Any], source: str) -> None:
    for key in values:
        if key not in EngineConfig.model_fields:
            near = difflib.get_close_matches(str(key), EngineConfig.model_fields, n=1, cutoff=0.4)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{source}: unknown option '{key}'{hint}")


def _readable(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, got {detail['input']!r}" if where else message
