"""Drafter checkpoints: what is saved is loaded again, and what does not fit is refused with its reason."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from angelspec_backend.drafters.block_export import EXPRESSIBLE
from angelspec_backend.drafters.checkpoint import export_drafter, load_drafter
from angelspec_backend.drafters.spec import TargetIdentity
from angelspec_backend.engine.loader import LoadError
from block_networks import VARIANTS, random_block, random_target


def expressible(variant: str, naming: str) -> bool:
    spec = random_block(variant).spec
    kinds, label_shift = EXPRESSIBLE[naming]
    return spec.kind in kinds and spec.label_shift == label_shift and not spec.draft_vocab_size


PUBLISHED = [(v, n) for v in VARIANTS for n in EXPRESSIBLE if expressible(v, n)]


def assert_same(found, wanted):
    ours, theirs = found.own_tensors(), wanted.own_tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert torch.equal(found.embed_tokens, wanted.embed_tokens)
    assert torch.equal(found.lm_head.weight, wanted.lm_head.weight)


@pytest.mark.parametrize(("variant", "naming"), [*[(v, "native") for v in VARIANTS], *PUBLISHED])
def test_a_saved_drafter_is_loaded_as_it_was(variant, naming, tmp_path):
    network = random_block(variant)
    export_drafter(network, tmp_path, naming)
    spec, loaded = load_drafter(str(tmp_path), random_target())
    assert spec == network.spec
    assert_same(loaded, network)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_pickled_checkpoint_is_loaded_as_tensors_and_nothing_else(tmp_path):
    export_drafter(random_block("dfly"), tmp_path, "angelspec")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_same(load_drafter(str(tmp_path), random_target())[1], random_block("dfly"))
    torch.save({"weights": tensors, "run": Touch(tmp_path / "touched")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin cannot be read: .*more than tensors"):
        load_drafter(str(tmp_path), random_target())
    assert not (tmp_path / "touched").exists()


class Touch:
    """A pickle that creates a file when it is loaded without care."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


def test_weights_in_several_files_are_read_by_their_index(tmp_path):
    export_drafter(random_block("dflare"), tmp_path, "angelspec")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert_same(load_drafter(str(tmp_path), random_target())[1], random_block("dflare"))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-2\.safetensors is missing"):
        load_drafter(str(tmp_path), random_target())


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": None}, "block_size in config.json is missing"),
        ({"num_attention_heads": 8}, "num_attention_heads in config.json is 8, expected 4"),
        ({"vocab_size": 96}, "vocab_size in config.json is 96, expected 97"),
        ({"target_num_hidden_layers": 36}, "target_num_hidden_layers in config.json is 36, expected 12"),
        ({"target_layer_ids": [1, 5]}, "reads 192 features per position, but 2 target_layer_ids"),
        ({"target_layer_ids": [1, 5, 11]}, r"target_layer_ids is \[1, 5, 11\], expected ids from 0 to 10"),
        ({"target_layer_ids": [5, 1, 8]}, "tap_ids are .* must be ascending"),
        ({"mask_token_id": 97}, "mask_token_id is 97, but the target's embedding has rows 0 to 96"),
        ({"enable_hidden_correction": False}, "enable_hidden_correction in config.json is False"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling in config.json is .*yarn.* not supported"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is sliding_attention"),
        ({"fusion_type": "gated_sum"}, "fusion_type in config.json is gated_sum"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_with_the_field(fields, reason, tmp_path):
    export_drafter(random_block("dfly"), tmp_path, "angelspec")
    change_config(tmp_path, **fields)
    with pytest.raises(LoadError, match=reason):
        load_drafter(str(tmp_path), random_target())


def test_a_wrong_field_of_a_published_configuration_can_be_overridden(tmp_path):
    export_drafter(random_block("dfly"), tmp_path, "angelspec")
    change_config(tmp_path, block_size=None, num_attention_heads=8)
    overrides = {"block_size": 5, "num_attention_heads": 4}
    spec, _ = load_drafter(str(tmp_path), random_target(), overrides=overrides)
    assert spec == random_block("dfly").spec


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named(tmp_path):
    export_drafter(random_block("dspark"), tmp_path, "angelspec")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["layers.0.self_attn.g_proj.weight"] = torch.zeros(2)
    tensors["context_norm.weight"] = torch.zeros(31)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError) as refused:
        load_drafter(str(tmp_path), random_target())
    message = str(refused.value)
    assert "1 missing tensors (layers.1.mlp.up_proj.weight)" in message
    assert "1 unexpected tensors (layers.0.self_attn.g_proj.weight)" in message
    assert "context_norm.weight is (31,), expected (64,)" in message


def test_a_drafter_of_another_target_is_refused(tmp_path):
    export_drafter(random_block("dfly"), tmp_path / "native")
    target = random_target()
    with pytest.raises(LoadError, match="target_num_layers is 12, expected 11"):
        load_drafter(str(tmp_path / "native"), replace(target, num_layers=11))
    smaller = replace(target, embed_tokens=target.embed_tokens[:96], lm_head=target.lm_head[:96])
    with pytest.raises(LoadError, match="vocab_size is 97, but must be 96"):
        load_drafter(str(tmp_path / "native"), smaller)
    export_drafter(random_block("dfly"), tmp_path / "published", "angelspec")
    with pytest.raises(LoadError, match=r"embed_tokens.weight is of shape \(97, 32\)|vocab_size"):
        load_drafter(str(tmp_path / "published"), smaller)


def test_serving_another_mode_than_it_was_trained_for_is_said_in_the_log(tmp_path, caplog):
    export_drafter(random_block("dflash"), tmp_path)
    with caplog.at_level(logging.WARNING):
        load_drafter(str(tmp_path), random_target(), identity=TargetIdentity("org/target", mode="no_think"))
        assert not caplog.records
        load_drafter(str(tmp_path), random_target(), identity=TargetIdentity(mode="thinking"))
    assert "trained for mode 'no_think', but 'thinking' is served" in caplog.text


def test_an_embedding_that_is_not_the_targets_is_used_and_said_in_the_log(tmp_path, caplog):
    export_drafter(random_block("dfly"), tmp_path, "angelspec")
    target = random_target()
    other = replace(target, embed_tokens=target.embed_tokens + 1)
    with caplog.at_level(logging.WARNING):
        _, network = load_drafter(str(tmp_path), other)
    assert torch.equal(network.embed_tokens, target.embed_tokens)
    assert "its embed_tokens is not the target's" in caplog.text


def test_what_is_no_drafter_is_refused(tmp_path, monkeypatch):
    target = random_target()
    with pytest.raises(LoadError, match="no such folder"):
        load_drafter(str(tmp_path / "nothing"), target)
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        load_drafter(str(tmp_path), target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_drafter(str(tmp_path), target)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"not a drafter of a known format \(native, AngelSpec .* weight"):
        load_drafter(str(tmp_path), target)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="org/absent: not a local folder, and cannot be downloaded"):
        load_drafter("org/absent", target)


def test_a_naming_that_cannot_express_a_drafter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot express draft_vocab_size 40"):
        export_drafter(random_block("dflash_pruned"), tmp_path, "angelspec")
    with pytest.raises(ValueError, match="cannot express label_shift 1"):
        export_drafter(random_block("dspark_next_token"), tmp_path, "angelspec")
    with pytest.raises(ValueError, match="cannot express qk_norm False"):
        export_drafter(random_block("dfly", qk_norm=False), tmp_path, "angelspec")
    with pytest.raises(ValueError, match="naming is 'other', allowed"):
        export_drafter(random_block("dfly"), tmp_path, "other")
