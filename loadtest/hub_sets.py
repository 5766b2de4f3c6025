"""Public task sets on the Hugging Face hub: where they are, and how a record becomes a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PromptError(ValueError):
    """The prompts cannot be read; the message says where and why."""


@dataclass(frozen=True)
class HubSet:
    """One split of a data set."""

    repo: str
    file: str  # of the split, JSONL or Parquet
    template: str  # of the prompt; fields of the record in braces


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main/test-00000-of-00001.parquet", "{question}"),
    "math500": HubSet("HuggingFaceH4/MATH-500", "test.jsonl", "{problem}\n\nReason step by step."),
    "humaneval": HubSet(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        "Write the body of this function and show all of it:\n\n```python\n{prompt}```",
    ),
    "mbpp": HubSet(
        "google-research-datasets/mbpp",
        "full/test-00000-of-00001.parquet",
        "{text} It has to pass these tests:\n\n{test_list[0]}\n{test_list[1]}\n{test_list[2]}",
    ),
    "livecodebench": HubSet(
        "livecodebench/code_generation_lite",
        "test6.jsonl",
        "Write a Python program for this.\n\n{question_title}\n\n{question_content}\n\n{starter_code}",
    ),
    "mtbench": HubSet("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "{prompt[0]}"),
}


def find(name: str) -> str | None:
    """The task name of a set that is given by that name or by its repository; None for others."""
    by_repo = {each.repo: task for task, each in HUB_SETS.items()}
    return name if name in HUB_SETS else by_repo.get(name)


def read(task: str) -> list[str]:
    """The prompts of a set, downloaded on first use and kept in the hub's cache.

    Raises:
        PromptError: it cannot be had, or its records are not what the table says.
    """
    each = HUB_SETS[task]
    file = download(task, each)
    try:
        return [each.template.format_map(record) for record in records(file)]
    except (LookupError, TypeError, ValueError) as error:
        raise PromptError(
            f"the records of {each.repo} do not fit the template of '{task}': {error!r}"
        ) from None


def download(task: str, each: HubSet) -> Path:
    """The local path of a set's file.  Raises PromptError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(each.repo, each.file, repo_type="dataset"))
    except LocalEntryNotFoundError:
        raise PromptError(
            f"'{task}' cannot be downloaded, the hub is out of reach, and {each.repo} is not in its cache: "
            "give the path of a JSONL file with its prompts instead"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PromptError(f"cannot download {each.file} of {each.repo}: {first_line}") from None


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL or Parquet file.  Raises PromptError without the library for the latter."""
    if file.suffix != ".parquet":
        with file.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
        return
    try:
        import polars
    except ImportError:
        raise PromptError(f"{file.name} is a Parquet file: 'pip install polars' to read it") from None
    yield from polars.read_parquet(file).to_dicts()
