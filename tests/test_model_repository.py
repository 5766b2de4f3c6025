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
STEP_INPUTS = {"rows", "token_ids", "feed_token_ids", "block_table", "tap_ids", "feed_hidden_states"}


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
    outputs = {*codec.STEP_OUTPUTS, codec.HIDDEN_STATES}
    assert names(config("speculate").input) == STEP_INPUTS
    assert names(config("speculate").output) == outputs
    drafter_only = {"feed_token_ids", "feed_hidden_states"}
    assert names(config("target").input) == STEP_INPUTS - drafter_only | set(codec.DRAFT_OUTPUTS)
    assert names(config("target").output) == outputs | {"info"}
    assert names(config("drafter").input) == STEP_INPUTS - {"token_ids", "tap_ids"}
    assert names(config("drafter").output) == set(codec.DRAFT_OUTPUTS) | {"info"}


@pytest.mark.parametrize("model", ["speculate", "drafter", "target"])
def test_what_only_hidden_state_drafters_need_may_be_left_out(model):
    optional = names(each for each in config(model).input if each.optional)
    assert optional - set(codec.DRAFT_OUTPUTS) == {"tap_ids", "feed_hidden_states"} & names(
        config(model).input
    )


@pytest.mark.parametrize("model", ["angelspec", "drafter", "target"])
def test_options_are_known_and_have_the_default_values(model):
    options = {name: each.string_value for name, each in config(model).parameters.items()}
    assert EngineConfig(**options) == EngineConfig()
