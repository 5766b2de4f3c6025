"""What a model instance learns from Triton's arguments."""

from __future__ import annotations

import json

import pytest

from angelspec_backend.core.config import CONFIG_ENV, ConfigError
from angelspec_backend.triton.instance import Instance


def args(root, kind="CPU", **options) -> dict[str, str]:
    parameters = {name: {"string_value": value} for name, value in options.items()}
    groups = [{"count": 1, "gpus": []}]
    return {
        "model_config": json.dumps({"parameters": parameters, "instance_group": groups}),
        "model_instance_kind": kind,
        "model_instance_device_id": "3",
        "model_repository": str(root / "model_repository" / "target"),
    }


@pytest.fixture(autouse=True)
def _no_yaml(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def test_device_follows_the_instance_kind(tmp_path):
    assert Instance.from_args(args(tmp_path)).device == "cpu"
    assert Instance.from_args(args(tmp_path, kind="GPU")).device == "cuda:3"


def test_options_are_read_and_the_backends_own_are_left_alone(tmp_path):
    instance = Instance.from_args(args(tmp_path, num_blocks="99", FORCE_CPU_ONLY_INPUT_TENSORS="no"))
    assert instance.config.num_blocks == 99
    with pytest.raises(ConfigError, match="unknown option 'num_block'; did you mean 'num_blocks'"):
        Instance.from_args(args(tmp_path, num_block="99"))


@pytest.mark.parametrize(
    "groups", [[{"count": 2}], [{"count": 1, "gpus": [0, 1]}], [{"count": 1}, {"count": 1}]]
)
def test_several_instances_are_refused(tmp_path, groups):
    several = args(tmp_path) | {"model_config": json.dumps({"instance_group": groups})}
    with pytest.raises(ConfigError, match="2 instances, but this model must have exactly one"):
        Instance.from_args(several)


def test_relative_folders_lie_beside_the_model_repository(tmp_path):
    (tmp_path / "models" / "m").mkdir(parents=True)
    instance = Instance.from_args(args(tmp_path, target="models/m"))
    assert instance.model_path("target") == str(tmp_path / "models" / "m")


def test_absolute_folders_and_ids_stay_as_they_are(tmp_path):
    assert Instance.from_args(args(tmp_path, target=str(tmp_path))).model_path("target") == str(tmp_path)
    assert Instance.from_args(args(tmp_path, target="org/name")).model_path("target") == "org/name"


@pytest.mark.parametrize("name", ["models/none", "./none", "/none/at/all", "a/b/c"])
def test_a_missing_folder_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=f"target: no folder '{name}'"):
        Instance.from_args(args(tmp_path, target=name)).model_path("target")
