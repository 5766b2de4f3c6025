"""The GPU check, as far as it goes without a GPU: its parts on the CPU, and what it says without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from conftest import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--out", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert done.stdout + done.stderr == done.stderr.splitlines()[0] + "\n"
    assert not report.exists()


def test_its_parts_run_on_the_cpu_and_give_json(target_dir, tokenizer):
    from angelspec_backend.engine.runner import ModelRunner
    from gpu_check import summarize
    from gpu_generation import compare_generation
    from gpu_kernels import check_attention, check_products
    from gpu_steps import check_graphs, step_times

    attention = check_attention("cpu", [(40, 3), (5, 1)], dims=(64,), repeats=1)
    assert all(each["agrees"] for each in attention)
    assert all(each["batch_invariant"] for each in attention if each["implementation"] == "default")

    runner = ModelRunner.from_pretrained(str(target_dir), num_blocks=64, block_size=16, max_context=512)
    graphs = check_graphs(runner, [(3, 2, 20), (1, 1, 5)])
    assert all(each["bit_identical"] and each["padded_to"] for each in graphs)
    steps = step_times(runner, 10**8, [(2, 3, 20)], repeats=1)
    assert steps["cells"][0]["step_ms"] > 0
    prompts = [tokenizer(text).input_ids for text in ("one two three one two", "def f(x):")]
    generation = compare_generation(runner, prompts, 12, 3)
    assert generation["alone"]["plain"]["num_tokens"] == 24
    assert generation["batch"]["ngram"]["num_draft_tokens"] > 0
    assert all(each["texts_that_differ"] == 0 for each in generation["flips"].values())

    products = []
    if importlib.util.find_spec("triton"):
        products = check_products("cpu", [(40, 64)], (1, 3, 70), repeats=1)
        assert all(each["agrees"] and each["batch_invariant"] for each in products)
    mode = {"model": runner.describe(), "graphs": graphs, "steps": steps, "generation": generation}
    report = {"attention": attention, "products": products, "batch_invariant": mode, "fast": mode}
    report["summary"] = summarize(report)
    assert not report["summary"]["failures"]
    assert set(report["summary"]["price_of_batch_invariance"].values()) == {0.0}
    json.dumps(report, allow_nan=False)

    graphs[0]["agrees"] = False
    assert summarize(report)["failures"] == {"graphs differ from plain steps": 2}


def test_a_flip_is_counted_once_per_text():
    from gpu_generation import flips

    found = flips([[1, 2, 3], [4, 5, 6], [7]], [[1, 9, 9], [4, 5, 6], [7]])
    assert found == {"texts": 3, "texts_that_differ": 1, "flips_per_token": 1 / 6}


def test_weights_that_a_step_does_not_read_are_not_counted():
    from families import tiny_model
    from gpu_steps import weight_bytes

    tied, untied = (tiny_model("llama", tie_word_embeddings=tie) for tie in (True, False))
    assert weight_bytes(tied) == weight_bytes(untied)
    assert sum(p.nbytes for p in untied.parameters()) > weight_bytes(untied)
