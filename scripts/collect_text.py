"""Gather plain text for distillation from folders of documentation and source code.

    python scripts/collect_text.py --out data/text.jsonl FOLDER [FOLDER ...]

Reads .txt, .rst, .md, .html, .page and .py, compressed with gzip or not; of half of the Python files only the
docstrings.  Every folder gives at most --per-folder tokens.  Writes JSON lines of {"text", "source"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from angelspec_backend.engine.loader import LoadError, Tokenizer, load_tokenizer
from angelspec_backend.training.records import RecordError, read_conversations
from angelspec_backend.training.text import Collector, find_files, read_text

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a document")
    parser.add_argument("--per-folder", type=int, default=500_000, help="tokens")
    parser.add_argument(
        "--exclude", type=Path, action="append", default=[], help="prompts whose text must not occur"
    )
    return parser.parse_args()


def collect(
    folder: Path, collector: Collector, tokenizer: Tokenizer, options: argparse.Namespace
) -> list[str]:
    """The lines of one folder."""
    lines: list[str] = []
    tokens = 0
    for file in find_files(folder):
        for document in collector.documents(read_text(file)):
            ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) > options.max_tokens:
                document = str(tokenizer.decode(ids[: options.max_tokens]))
            tokens += min(len(ids), options.max_tokens)
            record = {
                "text": document,
                "source": folder.name,
                "num_tokens": min(len(ids), options.max_tokens),
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        if tokens >= options.per_folder:
            break
    return lines


def main() -> None:
    options = parse_arguments()
    for folder in options.folders:
        if not folder.is_dir():
            raise SystemExit(f"{folder}: no such folder")
    try:
        files = [
            f for path in options.exclude for f in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
        ]
        prompts = [m["content"] for file in files for messages in read_conversations(file) for m in messages]
        tokenizer = load_tokenizer(options.target)
    except (LoadError, RecordError) as error:
        raise SystemExit(str(error)) from None
    collector = Collector(int(options.max_tokens * 3.5), excluded=prompts)
    table = Table("folder", "documents", "tokens")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    total = 0
    with options.out.open("w", encoding="utf-8") as out:
        for folder in options.folders:
            lines = collect(folder, collector, tokenizer, options)
            out.writelines(line + "\n" for line in lines)
            tokens = sum(json.loads(line)["num_tokens"] for line in lines)
            table.add_row(str(folder), str(len(lines)), f"{tokens:,}")
            total += tokens
    table.add_row("total", "", f"{total:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
