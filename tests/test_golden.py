"""Drafters of published formats compute what other implementations computed from the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import check_golden
from golden_compare import Comparisons

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = check_golden.find_folders(GOLDEN)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_vectors_agree(folder):
    results = check_golden.check_folder(folder)
    assert results
    assert [each for each in results if not each.passed] == []


def test_a_wrong_number_and_a_broken_checkpoint_fail_the_check(tmp_path, monkeypatch, capsys):
    wrong, broken = tmp_path / "other" / "name", tmp_path / "broken"
    shutil.copytree(GOLDEN / "dfly", wrong)
    shutil.copytree(GOLDEN / "dfly", broken)
    vectors = load_file(wrong / "vectors.safetensors")
    vectors["out.block_hidden"][0, 0, 0] += 1e-3
    save_file(vectors, wrong / "vectors.safetensors")
    (broken / "pytorch_model.bin").write_bytes(b"nothing")
    monkeypatch.setattr("sys.argv", ["check_golden.py", str(tmp_path)])
    assert check_golden.main() == 1
    failed = [each.name for each in check_golden.check_folder(wrong) if not each.passed]
    assert failed == ["block hidden"]
    assert "pytorch_model.bin" in check_golden.check_folder(broken)[0].remark
    assert "2 failed" in capsys.readouterr().out


def test_an_unknown_kind_and_an_empty_folder_fail_the_check(tmp_path, monkeypatch):
    (tmp_path / "vectors.json").write_text(json.dumps({"family": "other"}))
    assert "'other'" in check_golden.check_folder(tmp_path)[0].remark
    (tmp_path / "vectors.json").unlink()
    monkeypatch.setattr("sys.argv", ["check_golden.py", str(tmp_path)])
    assert check_golden.main() == 1


def test_a_comparison_never_accepts_nan_or_another_shape():
    compare = Comparisons("folder")
    compare("nan", torch.tensor([float("nan")]), torch.zeros(1), (1.0, 1.0))
    compare("shape", torch.zeros(2), torch.zeros(1), (1.0, 1.0))
    compare("nothing", None, torch.zeros(1))
    compare("equal", torch.zeros(1), torch.zeros(1))
    assert [each.passed for each in compare.all] == [False, False, False, True]
