"""Make training conversations with a target: user turns from a file or by the target itself, its own answers.

    python scripts/generate_data.py --out data/conversations.jsonl [--prompts FILE] [--num 20000]

Answers are greedy or sampled.  The same seed makes the same file, and a file that was not
finished is continued.  --prompts takes JSON lines of {"prompt": text}, {"messages": [...]} or
{"conversations": [...]}; without it the target writes the user turns behind short openers.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch

from angelspec_backend.engine.loader import LoadError, load_tokenizer
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.training.conversation import (
    ChatFormat,
    ConversationSettings,
    Request,
    TemplateError,
    normalized,
    regenerated,
    sampled,
)
from angelspec_backend.training.generate import (
    ConversationFile,
    ConversationMaker,
    GenerationError,
    describe_settings,
)
from angelspec_backend.training.progress import ProgressBar
from angelspec_backend.training.records import RecordError, read_conversations

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; continued when it exists")
    parser.add_argument("--num", type=int, help="conversations; default: 20000, or one per prompt")
    parser.add_argument("--prompts", type=Path, help="answer these prompts instead")
    parser.add_argument(
        "--exclude",
        type=Path,
        action="append",
        default=[],
        help="prompts never to be used, e.g. of evaluations",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=384, help="of an answer")
    parser.add_argument("--max-length", type=int, default=1024, help="of a conversation, in tokens")
    parser.add_argument("--follow-up", type=float, default=0.25, help="share of conversations with two turns")
    parser.add_argument("--greedy", type=float, default=0.5, help="share with greedy answers")
    parser.add_argument("--rows", type=int, default=64, help="conversations computed at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def excluded_prompts(paths: list[Path]) -> frozenset[str]:
    """First user turns of files, and of the *.jsonl files of folders."""
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    return frozenset(
        normalized(message["content"])
        for file in files
        for messages in read_conversations(file)
        for message in messages
        if message["role"] == "user"
    )


def make(options: argparse.Namespace) -> None:
    settings = ConversationSettings(
        seed=options.seed,
        max_tokens=options.max_tokens,
        max_length=options.max_length,
        follow_up=options.follow_up,
        greedy=options.greedy,
    )
    excluded = excluded_prompts(options.exclude)
    source, prompts = "openers", []
    if options.prompts:
        prompts = [
            messages
            for messages in read_conversations(options.prompts)
            if not any(normalized(each["content"]) in excluded for each in messages)
        ]
        source = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    total = options.num or (len(prompts) if options.prompts else 20000)
    runner = ModelRunner.from_pretrained(
        options.target,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        num_blocks=1 + options.rows * -(-options.max_length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    )
    chat = ChatFormat(load_tokenizer(options.target), runner.eos_token_ids)
    out = ConversationFile(options.out, describe_settings(options.target, settings, source))

    def start(index: int) -> Request:
        if prompts:
            return regenerated(index, chat, settings, prompts[index % len(prompts)])
        return sampled(index, chat, settings, excluded)

    before = out.num_tokens
    with ProgressBar("conversations", total, out.num_lines) as bar:

        def on_line() -> None:
            rate = (out.num_tokens - before) / max(bar.seconds, 1e-9)
            bar.update(out.num_lines, f"{out.num_tokens} answer tokens, {rate:.0f}/s")

        ConversationMaker(runner, out, start, total, options.max_length, options.rows, on_line).run()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    try:
        make(options)
    except (GenerationError, LoadError, RecordError, TemplateError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
