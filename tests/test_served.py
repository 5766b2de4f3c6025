"""A trained drafter is served beside the target it was made for, and refused beside another."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from angelspec_backend.core.config import NETWORK_DRAFTERS
from angelspec_backend.core.messages import ROW, DraftOutput
from angelspec_backend.drafters.checkpoint import export_drafter
from angelspec_backend.drafters.served import ServedTarget, load_served
from angelspec_backend.engine.loader import LoadError
from families import tiny_model
from random_drafters import random_drafter

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SHA256 = hashlib.sha256(TEMPLATE.encode()).hexdigest()


def save_target(folder, template: str = TEMPLATE, **options) -> ServedTarget:
    """A tiny random target with a tokenizer, served with a pool of 9 blocks of 4."""
    model = tiny_model("llama", **options)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ServedTarget(str(folder), torch.float32, "cpu", num_blocks=9, block_size=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> ServedTarget:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("kind", NETWORK_DRAFTERS)
def test_every_kind_is_loaded_with_what_the_loop_must_know(target, tmp_path, kind):
    network = random_drafter(kind, target.parts, template=SHA256)
    export_drafter(network, tmp_path)
    drafter = load_served(kind, str(tmp_path), target)
    info = drafter.info
    assert (info.name, info.tap_ids, info.hidden_bytes) == (kind, network.spec.tap_ids, 64 * 4)
    assert (info.keeps_drafts, info.shares_blocks) == (False, True)
    assert info.lookahead == network.spec.block_size
    assert (drafter.pool.num_blocks, drafter.pool.block_size) == (9, 4)
    assert drafter.max_context == 32  # what the pool holds


@pytest.mark.parametrize(("kind", "longest"), [("mtp", 5), ("eagle3", 5), ("dfly", None)])
def test_a_network_behind_lookup_is_asked_for_little_more_than_it_was_trained_for(
    target, tmp_path, kind, longest, monkeypatch
):
    network = random_drafter(kind, target.parts, template=SHA256)
    export_drafter(network, tmp_path)
    drafter = load_served(kind, str(tmp_path), target, lookup=4)
    asked = []
    inner = drafter._drafter
    monkeypatch.setattr(
        type(inner), "propose", lambda self, rows, *more: asked.append(rows) or DraftOutput.empty(len(rows))
    )
    row = np.zeros(1, ROW)
    row["num_feed"], row["num_draft_tokens"], row["num_blocks"] = 1, 16, 1
    states = np.zeros(drafter.info.bytes_per_token, np.uint8)
    drafter.propose(row, np.array([7], np.int32), np.array([1], np.int32), states)
    assert asked[0]["num_draft_tokens"] == (longest or network.spec.num_drafts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 199, but must be 100"),
        ({"hidden_size": 96, "head_dim": 24}, "target_hidden is 64, expected 96"),
        ({"num_hidden_layers": 2}, "target_num_layers is 3, expected 2"),
    ],
)
@pytest.mark.parametrize("kind", ["dfly", "eagle3"])
def test_another_target_is_refused_with_field_found_and_expected(target, tmp_path, kind, options, message):
    export_drafter(random_drafter(kind, target.parts), tmp_path / "drafter")
    other = save_target(tmp_path / "other", **options)
    with pytest.raises(LoadError, match=message):
        load_served(kind, str(tmp_path / "drafter"), other)


def test_another_chat_template_is_refused_if_the_checkpoint_names_one(target, tmp_path):
    export_drafter(random_drafter("mtp", target.parts, template="0" * 64), tmp_path)
    with pytest.raises(LoadError, match=f"chat_template_sha256 is 000000000000…, expected {SHA256[:12]}…"):
        load_served("mtp", str(tmp_path), target)


def test_a_checkpoint_of_another_kind_is_refused_and_named(target, tmp_path):
    export_drafter(random_drafter("dflash", target.parts), tmp_path)
    with pytest.raises(LoadError, match=r"dfly: '.*' is a checkpoint of kind 'dflash'; name it in"):
        load_served("dfly", str(tmp_path), target)


def test_a_missing_checkpoint_and_a_folder_without_one_are_named(target, tmp_path):
    with pytest.raises(LoadError, match="nowhere: no such folder"):
        load_served("dfly", str(tmp_path / "nowhere"), target)
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        load_served("dfly", str(tmp_path), target)
