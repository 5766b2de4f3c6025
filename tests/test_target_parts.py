"""A drafter borrows embedding, head and final norm of its target, wherever their files are."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.engine.loader import LoadError
from angelspec_backend.engine.tensor_files import load_decoder_layer, rope_theta
from families import tiny_model


def saved(folder, tied: bool = False, shard_size: str = "5GB", **changes):
    """A tiny model in a folder, in one file or in shards.  changes: to its config.json."""
    model = tiny_model("llama", torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(folder, max_shard_size=shard_size)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return model


def same(parts: TargetParts, other: TargetParts) -> bool:
    names = ("embed_tokens", "lm_head", "norm")
    tensors = all(torch.equal(getattr(parts, name), getattr(other, name)) for name in names)
    return tensors and (parts.eps, parts.num_layers) == (other.eps, other.num_layers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_parts_from_files_are_those_of_the_model(tmp_path, tied, shard_size):
    model = saved(tmp_path, tied, shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "5GB")
    parts = TargetParts.load(str(tmp_path))
    assert same(parts, TargetParts.from_model(model))
    assert torch.equal(parts.lm_head, model.lm_head.weight)
    assert (parts.lm_head is parts.embed_tokens) == tied
    assert torch.equal(parts.norm, model.model.norm.weight)
    assert parts.num_layers == model.config.num_hidden_layers


def test_parts_come_in_the_wanted_dtype(tmp_path):
    saved(tmp_path)
    parts = TargetParts.load(str(tmp_path), torch.bfloat16)
    assert {parts.embed_tokens.dtype, parts.lm_head.dtype, parts.norm.dtype} == {torch.bfloat16}


def test_names_behind_a_language_model_prefix_are_found(tmp_path):
    model = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert same(TargetParts.load(str(tmp_path)), TargetParts.from_model(model))


def test_one_decoder_layer_is_read_by_itself(tmp_path):
    model = saved(tmp_path)
    last = model.model.layers[-1].state_dict()
    for index in (-1, len(model.model.layers) - 1):
        layer = load_decoder_layer(str(tmp_path), index)
        assert layer.keys() == last.keys()
        assert all(torch.equal(layer[name], last[name]) for name in last)
    with pytest.raises(LoadError, match="layer 9 does not exist, allowed: -"):
        load_decoder_layer(str(tmp_path), 9)


def test_a_missing_head_is_refused(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing, and tie_word_embeddings is false"):
        TargetParts.load(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path):
    saved(tmp_path, shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / file).unlink()
    with pytest.raises(LoadError, match=f"{file} is missing; it holds model.embed_tokens.weight"):
        TargetParts.load(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "gemma"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0, supported is only 1"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_a_target_that_scales_its_embedding_or_head_is_refused(tmp_path, changes, message):
    saved(tmp_path, **changes)
    with pytest.raises(LoadError, match=message):
        TargetParts.load(str(tmp_path))


def test_an_empty_folder_and_a_missing_one_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(LoadError, match=r"config\.json is missing"):
            TargetParts.load(str(folder))


def test_rope_theta_is_found_in_both_places():
    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}) == 1e6
    assert rope_theta({"rope_scaling": None}) is None
