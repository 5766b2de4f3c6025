"""MTP and EAGLE-3 drafters survive every naming, and files that contradict themselves are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from angelspec_backend.drafters.checkpoint import export_drafter, load_drafter
from angelspec_backend.drafters.eagle3 import default_tap_ids
from angelspec_backend.drafters.eagle3_format import LAYER_IDS
from angelspec_backend.drafters.mtp import mtp_from_target
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.drafters.unroll import unroll
from angelspec_backend.engine.loader import LoadError
from chains import DEPTH, HIDDEN, KINDS, VOCAB, random_chain, random_target
from families import tiny_model

NAMINGS = {"mtp": ("native", "angelspec", "layers_n", "qwen3_mtp"), "eagle3": ("native", "angelspec", "vllm")}
CASES = [(kind, naming) for kind in KINDS for naming in NAMINGS[kind.partition("_")[0]]]


def edit(folder, **fields) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def rename(folder, change) -> None:
    """Change the tensors of a checkpoint.  change: from a dictionary to another"""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


@pytest.mark.parametrize(("kind", "naming"), CASES)
def test_a_drafter_survives_each_naming(tmp_path, kind, naming):
    network = random_chain(kind)
    export_drafter(network, tmp_path, naming)
    spec, loaded = load_drafter(str(tmp_path), random_target())
    assert spec == network.spec
    own, found = network.own_tensors(), loaded.own_tensors()
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], found[name]) for name in own)
    text, states = torch.arange(12) % VOCAB, torch.randn(12, len(spec.tap_ids), spec.target_hidden)
    for before, after in zip(unroll(network, states, text, 2), unroll(loaded, states, text, 2), strict=True):
        assert torch.equal(before.logits, after.logits)


def test_namings_differ_where_others_expect_it(tmp_path):
    network = random_chain("mtp_moe")
    expected = {
        "angelspec": ("eh_proj.weight", "midlayer.mlp.experts_gate_proj"),
        "layers_n": ("model.layers.12.eh_proj.weight", "model.layers.12.mlp.experts.3.gate_proj.weight"),
        "qwen3_mtp": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.down_proj.weight"),
    }
    for naming, names in expected.items():
        export_drafter(network, tmp_path / naming, naming)
        assert set(names) <= load_file(tmp_path / naming / "model.safetensors").keys()


def test_the_bias_of_experts_stays_in_fp32(tmp_path):
    network = random_chain("mtp_moe")
    export_drafter(network, tmp_path)
    loaded = load_drafter(str(tmp_path), random_target(), dtype=torch.bfloat16)[1]
    assert loaded.eh_proj.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.midlayer.mlp.expert_bias, network.midlayer.mlp.expert_bias)


def test_an_unknown_naming_is_refused(tmp_path):
    with pytest.raises(ValueError, match="naming is 'vllm', allowed for mtp: native, angelspec, layers_n"):
        export_drafter(random_chain("mtp"), tmp_path, "vllm")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps in config.json is missing"),
        ({"num_attention_heads": 8}, "num_attention_heads in config.json is 8, expected 4"),
        ({"intermediate_size": 64}, "intermediate_size in config.json is 64, expected 96"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling in config.json"),
        ({"vocab_size": 98}, "vocab_size in config.json is 98, expected 97"),
        ({"num_hidden_layers": 13}, "num_hidden_layers in config.json is 13, expected 12"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path, fields, message):
    export_drafter(random_chain("mtp"), tmp_path, "layers_n")
    edit(tmp_path, **fields)
    with pytest.raises(LoadError, match=message):
        load_drafter(str(tmp_path), random_target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "more.weight": torch.zeros(1)}, r"1 unexpected tensors \(more.weight\)"),
        (lambda t: {n: x for n, x in t.items() if "hnorm" not in n}, r"1 missing tensors \(hnorm.weight\)"),
        (lambda t: {**t, "enorm.weight": torch.zeros(5)}, r"enorm.weight is \(5,\), expected \(64,\)"),
        (lambda t: {**t, "d2t": t["d2t"] + torch.arange(40)}, "d2t"),
        (lambda t: {**t, "t2d": ~t["t2d"]}, "t2d and d2t name different tokens"),
    ],
)
def test_tensors_are_accounted_for_one_by_one(tmp_path, change, message):
    export_drafter(random_chain("mtp_pruned"), tmp_path, "angelspec")
    rename(tmp_path, change)
    with pytest.raises(LoadError, match=message):
        load_drafter(str(tmp_path), random_target())


def test_rope_theta_is_read_from_rope_parameters(tmp_path):
    export_drafter(random_chain("eagle3"), tmp_path, "angelspec")
    edit(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 77.0, "rope_type": "default"})
    assert load_drafter(str(tmp_path), random_target())[0].shape.rope_theta == 77.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1, 5, 8)),
        ({"eagle_config": {LAYER_IDS: [0, 4, 9]}}, (0, 4, 9)),
        ({LAYER_IDS: [2, 6, 12]}, (1, 5, 11)),
        ({"tap_ids": [2, 6, 9]}, (2, 6, 9)),
    ],
)
def test_layer_ids_of_other_projects_become_ours(tmp_path, fields, expected):
    export_drafter(random_chain("eagle3"), tmp_path, "angelspec")
    edit(tmp_path, **{"tap_ids": None, "eagle_config": None, **fields})
    assert load_drafter(str(tmp_path), random_target())[0].tap_ids == expected


def test_layer_ids_that_no_layer_has_are_refused(tmp_path):
    export_drafter(random_chain("eagle3"), tmp_path, "angelspec")
    edit(tmp_path, tap_ids=None, eagle_config=None, **{LAYER_IDS: [2, 6, 13]})
    with pytest.raises(LoadError, match=r"\[2, 6, 13\], expected ascending ids from 1 to 12"):
        load_drafter(str(tmp_path), random_target())
    edit(tmp_path, **{LAYER_IDS: [2, 6]})
    with pytest.raises(LoadError, match=r"width of fc.weight is 192, expected 128"):
        load_drafter(str(tmp_path), random_target())


def test_an_eagle3_drafter_behind_a_prefix_with_a_nested_configuration_loads(tmp_path):
    network = random_chain("eagle3_flags")
    export_drafter(network, tmp_path, "vllm")
    rename(tmp_path, lambda t: {f"model.{n}" if n not in ("d2t", "t2d") else n: x for n, x in t.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    inner = {name: config.pop(name) for name in ("hidden_size", "rope_theta", "rms_norm_eps", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformer_layer_config": inner}))
    assert load_drafter(str(tmp_path), random_target())[0] == network.spec


def test_an_embedding_of_its_own_is_kept(tmp_path):
    network = random_chain("eagle3")
    export_drafter(network, tmp_path, "angelspec")
    own = torch.randn(VOCAB, HIDDEN)
    rename(tmp_path, lambda t: {**t, "embed_tokens.weight": own})
    assert torch.equal(load_drafter(str(tmp_path), random_target())[1].embed_tokens, own)


def test_default_taps_are_low_middle_and_high():
    assert default_tap_ids(36) == (1, 17, 32)
    assert default_tap_ids(DEPTH) == (1, 5, 8)
    with pytest.raises(ValueError, match="the target has 4 layers"):
        default_tap_ids(4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_mtp_head_can_begin_as_the_targets_last_layer(tmp_path, family):
    model = tiny_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    target = TargetParts.load(str(tmp_path))
    network = mtp_from_target(str(tmp_path), target)
    assert network.spec.shape.qk_norm == (family == "qwen3")
    last = model.model.layers[-1].state_dict()
    assert all(torch.equal(tensor, last[name]) for name, tensor in network.midlayer.state_dict().items())
    assert torch.equal(network.final_layernorm.weight, model.model.norm.weight)
    with pytest.raises(LoadError, match="layer 7 does not exist"):
        mtp_from_target(str(tmp_path), target, layer=7)


def test_an_mtp_head_cannot_begin_as_another_kind_of_layer(tmp_path):
    tiny_model("olmo2", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="not of Llama's or Qwen3's kind"):
        mtp_from_target(str(tmp_path), TargetParts.load(str(tmp_path)))
