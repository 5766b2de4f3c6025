"""An experiment: everything that decides what run_experiment measures, in one YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from angelspec_backend.core.config import DRAFTERS, NETWORK_DRAFTERS, EngineConfig
from angelspec_backend.core.yaml_options import OptionsError, Section, check_options, read_options
from experiment_limits import Limits
from server_config import complete_config, merge_config

AR = "none"
"""The drafter name of plain autoregressive decoding; results call the mode ar."""

METRICS = (
    *("tokens_per_second", "speedup", "acceptance_length", "p50_ms", "p90_ms", "p99_ms"),
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms"),
    *("error_rate", "identical", "cost_per_million", "harness_us_per_token"),
)
_OWN_KEYS = ("target", "dtype", "drafters", "drafter", "draft_model", *NETWORK_DRAFTERS)
_NOT_MEASURED = {"metrics", "rollout", "price_per_hour"}


def _split(value: Any) -> Any:
    """One value, or several separated by commas, as they come from the command line."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int | float) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split), Field(min_length=1)]


class Sampling(Section):
    """How tokens are drawn.  Request n of a run uses seed + n, in every mode and tier."""

    temperature: float = Field(0.0, ge=0, le=100, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0, lt=2**63)


class Lengths(Section):
    """Tokens in and out."""

    max_prompt_tokens: int = Field(
        896, ge=0, description="longer prompts are left out, the template not counted; 0: none"
    )
    max_tokens: int = Field(128, ge=1, description="of output")
    ignore_eos: bool = Field(True, description="always generate max_tokens")


class Rollout(Section):
    """When a mode may take traffic: canary_traffic_percent of it, unless it breaks a limit."""

    canary_traffic_percent: float = Field(5.0, gt=0, le=100)
    rollback_on: Limits = Limits.model_validate({})


class Experiment(Section):
    """All settings of an experiment.  A mode is a drafter, or none for plain decoding."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    target: str = Field("", description="Hugging Face id or folder; empty: the default target")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    modes: Names = (AR, "ngram")
    checkpoints: dict[str, str] = Field({}, description="id or folder by drafter, for those that have one")
    draft_tokens: dict[str, Annotated[int, Field(ge=0, le=32)]] = Field(
        {}, description="longest draft by mode; a mode that is not there leaves it to the server"
    )
    sampling: Sampling = Sampling.model_validate({})
    lengths: Lengths = Lengths.model_validate({})
    prompts: Names = Field(("own",), description="JSONL files, folders of them, public sets, or own")
    concurrency: Annotated[tuple[PositiveInt, ...], BeforeValidator(_split), Field(min_length=1)] = (
        *(1, 4, 8, 16, 32, 64),
    )
    requests: dict[PositiveInt, PositiveInt] = Field(
        {}, description="measured in a window, by concurrency; a tier that is not there takes max(16, 2C)"
    )
    warm_up_requests: int = Field(0, ge=0, description="before each cell; 0: as many as are in flight")
    warm_up_tokens: int = Field(16, ge=1, description="output of a warm-up request")
    windows: int = Field(3, ge=1, description="how often each cell is measured")
    protocol: Literal["http", "grpc"] = Field("http", description="http costs the load generator less")
    timeout: float = Field(600.0, gt=0, description="seconds per request")
    server: str = Field("", description="host:port of a running server; empty: one of our own is started")
    metrics_server: str = Field("", description="its host:port for metrics; empty: they are not read")
    engine: dict[str, Any] = Field({}, description="further options of the server that is started")
    metrics: Names = ("tokens_per_second", "speedup", "acceptance_length", "p50_ms", "p99_ms", "ttft_p50_ms")
    rollout: Rollout = Rollout.model_validate({})
    price_per_hour: float = Field(0.0, ge=0, description="of the machine; 0: costs are not computed")

    @field_validator("modes", "concurrency", "metrics")
    @classmethod
    def _no_doubles(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError("the same value is there twice")
        return values

    @field_validator("draft_tokens", mode="before")
    @classmethod
    def _for_all(cls, value: Any, info: Any) -> Any:
        """One number is the longest draft of every drafter."""
        if isinstance(value, int):
            return {mode: value for mode in info.data.get("modes", ()) if mode != AR}
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Experiment:
        for key, names, known in (
            ("modes", self.modes, (AR, *DRAFTERS)),
            ("checkpoints", self.checkpoints, ("draft_model", *NETWORK_DRAFTERS)),
            ("draft_tokens", self.draft_tokens, tuple(mode for mode in self.modes if mode != AR)),
            ("requests", self.requests, self.concurrency),
            ("metrics", self.metrics, METRICS),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"{key}: unknown '{name}'; allowed: {', '.join(map(str, known))}")
        for key in _OWN_KEYS:
            if key in self.engine:
                raise ValueError(f"engine: {key} is an option of the experiment itself")
        return self

    def window_size(self, concurrency: int) -> int:
        """Requests of a window."""
        return self.requests.get(concurrency, max(16, 2 * concurrency))

    def settings(self) -> dict[str, Any]:
        """What the results record: all of it, and only the names of paths outside the working folder."""
        values = self.model_dump(mode="json")
        values["target"] = _portable(self.target)
        values["prompts"] = [_portable(source) for source in self.prompts]
        values["checkpoints"] = {drafter: _portable(path) for drafter, path in self.checkpoints.items()}
        return values


def load_experiment(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read and check a file.

    Raises:
        OptionsError: the file cannot be read, or a key or value is wrong.
    """
    return check_options(Experiment, read_options(path, overrides))


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys of two settings that make them different measurements, not just differently judged ones."""
    keys = sorted((one.keys() | other.keys()) - _NOT_MEASURED)
    return [key for key in keys if one.get(key) != other.get(key)]


def target_folder(experiment: Experiment) -> Path:
    """The folder of the target's tokenizer, which is downloaded when the target is an id.

    Raises:
        CheckError, OptionsError: there is none.
        PrepareError: the default target cannot be unpacked.
    """
    options, _ = complete_config(merge_config({"drafter": "none"}, experiment.target, ""))
    target = str(options["target"])
    if Path(target).is_dir():
        return Path(target)
    from huggingface_hub import hf_hub_download  # slow to import

    try:
        return Path(hf_hub_download(target, "tokenizer.json")).parent
    except (OSError, ValueError) as error:
        raise OptionsError(f"target: no tokenizer.json of {target}: {error}") from None


def engine_options(experiment: Experiment) -> tuple[dict[str, Any], EngineConfig]:
    """The options of the server an experiment starts, and the same ones checked and complete.

    Raises:
        CheckError: the server would refuse them.
        PrepareError: the default target cannot be unpacked.
    """
    drafters = [mode for mode in experiment.modes if mode != AR]
    options = {**experiment.engine, **experiment.checkpoints, "dtype": experiment.dtype}
    if drafters:
        options |= {"drafters": ",".join(drafters), "drafter": drafters[0]}
    return complete_config(merge_config(options, experiment.target, ""))


def _portable(path: str) -> str:
    outside = Path(path).is_absolute() or path.startswith(("~", ".."))
    return Path(path).name if outside else path
