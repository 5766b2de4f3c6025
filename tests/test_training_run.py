"""Training end to end with a tiny random target: it learns, stops and goes on, alone and in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from angelspec_backend.drafters.checkpoint import load_drafter
from angelspec_backend.drafters.target_parts import TargetParts
from angelspec_backend.training.checkpoint import CheckpointError
from angelspec_backend.training.config import TrainConfig, make_config
from angelspec_backend.training.distributed import Processes
from angelspec_backend.training.log import read_log
from angelspec_backend.training.records import RecordError
from angelspec_backend.training.setup import make_trainer
from families import tiny_model

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("dflash", "dflare", "dfly", "dspark", "mtp", "eagle3")
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    """One token per word w3 ... w198."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 199)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A random target and its greedy answers, which are short cycles that a drafter can learn."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", torch.float32, num_hidden_layers=4, max_position_embeddings=512)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    torch.manual_seed(1)
    lines = []
    for prompt in torch.randint(3, 199, (80, 4)):
        ids = model.generate(prompt[None], max_new_tokens=36, do_sample=False, eos_token_id=-1)[0].tolist()
        record = {"token_ids": ids, "assistant_spans": [[4, len(ids)]], "temperature": 0.0}
        lines.append(json.dumps(record))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def config(target: Path, out: Path, kind: str = "dfly", **run: object) -> TrainConfig:
    data = {
        "conversations": [str(target / "data.jsonl")],
        "row_length": 96,
        "held_out": 0.1,
        "rows_per_step": 2,
    }
    return make_config(
        {
            "target": str(target),
            "data": data,
            "drafter": {
                "kind": kind,
                "num_layers": 1,
                "num_taps": 2,
                "block_size": 5,
                "draft_vocab_size": 150,
            }
            | ({"tap_ids": [0, 1, 2]} if kind == "eagle3" else {}),
            "anchor_density": 0.3,
            "objective": {"confidence_weight": 0.1 if kind == "dspark" else 0.0, "lk_weight": 1.0},
            "step_objective": {"ce_weight": 1.0},
            "schedule": {"lr": 3e-3, "min_lr": 3e-4},
            "run": {"out": str(out), "dtype": "float32", "tensorboard": False, "log_every": 1}
            | {"steps": 20, "eval_every": 10, "save_every": 10}
            | run,
        }
    )


def train(settings: TrainConfig):
    trainer = make_trainer(settings, Processes("cpu"))
    return trainer.run()


def losses(out: Path) -> list[float]:
    return [line["train/loss"] for line in read_log(out / "log.jsonl") if "train/loss" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_its_targets_answers_and_is_exported(target, tmp_path, kind):
    evaluation = train(config(target, tmp_path, kind, steps=80, eval_every=80, save_every=80))
    found = losses(tmp_path)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    log = [line["train/accepted_length"] for line in read_log(tmp_path / "log.jsonl") if "train/loss" in line]
    assert sum(log[-10:]) > sum(log[:10]) + 1
    assert evaluation.accepted_length > 1
    spec, network = load_drafter(str(tmp_path / "best"), TargetParts.load(str(target)), dtype=torch.bfloat16)
    assert spec.kind == kind
    assert len(network.vocab) == 150
    assert (tmp_path / "curves.png").exists()


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(target, tmp_path, monkeypatch):
    train(config(target, tmp_path / "whole"))
    stopped = make_trainer(config(target, tmp_path / "stopped"), Processes("cpu"))
    step = stopped._train

    def until_the_kill(number: int):
        if number == 14:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(stopped, "_train", until_the_kill)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    (target / "data.jsonl").open("a").write('{"token_ids": [3, 4]}\n')  # a file that grows changes nothing
    resumed = make_trainer(config(target, tmp_path / "stopped"), Processes("cpu"))
    assert resumed.start == 10
    resumed.run()
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    names = ("best/model.safetensors", "last/model.safetensors")
    for name in names:
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_is_not_continued_with_other_options(target, tmp_path):
    train(config(target, tmp_path, steps=2, save_every=1, eval_every=2))
    with pytest.raises(CheckpointError, match=r"run\.seed 0, not 1"):
        make_trainer(config(target, tmp_path, steps=2, seed=1), Processes("cpu"))


def test_training_goes_on_from_an_exported_drafter(target, tmp_path):
    train(config(target, tmp_path / "first", steps=30, eval_every=30, save_every=30))
    again = config(target, tmp_path / "second", steps=3)
    drafter = again.drafter.model_copy(update={"start": str(tmp_path / "first" / "last")})
    train(again.model_copy(update={"drafter": drafter}))
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] * 0.9


def test_missing_data_is_an_error(target, tmp_path):
    settings = config(target, tmp_path)
    data = settings.data.model_copy(update={"conversations": (tmp_path / "none.jsonl",)})
    with pytest.raises(RecordError, match=r"cannot read .*none\.jsonl"):
        make_trainer(settings.model_copy(update={"data": data}), Processes("cpu"))


def test_features_from_the_disk_are_those_computed(target, tmp_path):
    settings = config(target, tmp_path / "computed", steps=6)
    train(settings)
    cached = settings.model_copy(
        update={
            "data": settings.data.model_copy(update={"feature_cache": tmp_path / "cache"}),
            "run": settings.run.model_copy(update={"out": tmp_path / "cached"}),
        }
    )
    train(cached)
    assert losses(tmp_path / "cached") == losses(tmp_path / "computed")


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_have_the_losses_of_one(target, tmp_path, sharding):
    one = config(target, tmp_path / "one", steps=6)
    train(one)
    two = one.model_dump(mode="json")
    two["run"] |= {"out": str(tmp_path / "two"), "sharding": sharding, "threads": 1}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    script = ROOT / "scripts" / "train_drafter.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, str(script), "--config", str(tmp_path / "two.yaml")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4, atol=1e-5)
