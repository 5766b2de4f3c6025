"""The config.pbtxt files say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from angelspec_backend.core.config import EngineConfig
from angelspec_backend.core.fields import INPUT_TYPES, LIST_FIELDS
from angelspec_backend.triton import codec

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
MODELS = ("angelspec", "speculate", "drafter", "target")


def config(model: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(
        (REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )


def names(tensors) -> set[str]:
    return {tensor.name for tensor in tensors}


@pytest.mark.parametrize("model", MODELS)
def test_names_and_folders_agree(model):
    assert config(model).name == model
    assert (REPOSITORY / model / "1").is_dir()


def test_the_public_model_declares_every_field_as_optional():
    declared = {each.name: each for each in config("angelspec").input}
    assert {name: f"TYPE_{kind}" for name, kind in INPUT_TYPES.items()} == {
        name: model_config_pb2.DataType.Name(each.data_type) for name, each in declared.items()
    }
    assert all(each.optional for each in declared.values())
    for name, each in declared.items():
        assert list(each.dims) == [-1 if name in LIST_FIELDS else 1]


def test_inner_models_declare_what_the_codec_writes():
    feed, outputs = {codec.STEP, codec.FEED_STATES}, {codec.SAMPLED, codec.HIDDEN_STATES}
    assert names(config("speculate").input) == feed
    assert names(config("speculate").output) == outputs
    assert names(config("drafter").input) == feed
    assert names(config("drafter").output) == {codec.DRAFTS, codec.INFO}
    assert names(config("target").input) == {codec.STEP, codec.DRAFTS}
    assert names(config("target").output) == outputs | {codec.INFO}


@pytest.mark.parametrize("model", ["speculate", "drafter", "target"])
def test_all_but_the_step_may_be_left_out(model):
    inputs = config(model).input
    assert names(each for each in inputs if not each.optional) == {codec.STEP}


@pytest.mark.parametrize("model", ["angelspec", "drafter", "target"])
def test_options_are_known_and_have_the_default_values(model):
    options = {
        name: each.string_value for name, each in config(model).parameters.items() if not name.isupper()
    }
    assert EngineConfig(**options) == EngineConfig()


def test_the_drafter_gets_hidden_states_where_the_target_left_them():
    assert config("drafter").parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"
