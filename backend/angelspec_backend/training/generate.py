"""Make training conversations with the target, through the engine's own loop with continuous batching."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angelspec_backend.core.loop import LocalExecutor, SpeculativeLoop
from angelspec_backend.core.loop_config import LoopConfig
from angelspec_backend.core.request import FinishReason, TokenEvent
from angelspec_backend.engine.runner import ModelRunner
from angelspec_backend.engine.target import TargetEngine
from angelspec_backend.training.conversation import ConversationSettings, Request, Turn

WINDOW = 4
"""Conversations in flight or waiting for an earlier one to end, as a multiple of the rows."""


class GenerationError(RuntimeError):
    """Conversations cannot be made or stored; the message says why."""


class ConversationFile:
    """JSON lines in order of their index; what is there when the process is killed stays valid.

    Every index takes one line, ``null`` for a conversation that came to nothing.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or continue a file.

        Raises:
            GenerationError: the file was made with other settings.
        """
        self.path, self.num_lines, self.num_tokens = path, 0, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        about = path.with_suffix(".settings.json")
        if path.exists() and about.exists():
            self._check(json.loads(about.read_text(encoding="utf-8")), settings)
        about.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        self._file = path.open("a+b")
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # killed while writing
            end += len(line)
            self._count(json.loads(line))
        self._file.truncate(end)

    def append(self, record: dict[str, Any] | None) -> None:
        """Write one line; it is on the disk when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._count(record)

    def _count(self, record: dict[str, Any] | None) -> None:
        self.num_lines += 1
        self.num_tokens += sum(end - start for start, end in record["assistant_spans"]) if record else 0

    def _check(self, found: dict[str, Any], settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if found.get(name) != value:
                raise GenerationError(
                    f"{self.path} was made with {name} {found.get(name)!r}, not {value!r}: "
                    f"give the same settings to continue it, or another file"
                )


class ConversationMaker:
    """Keeps the engine's rows full with conversations until all are stored.

    start: makes the conversation of an index.  on_line is called after every stored line.
    """

    def __init__(
        self,
        runner: ModelRunner,
        out: ConversationFile,
        start: Callable[[int], Request],
        total: int,
        max_length: int,
        num_rows: int = 64,
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        self._out, self._start, self._total, self._on_line = out, start, total, on_line
        self._num_rows = num_rows
        self._eos = frozenset(runner.eos_token_ids)
        pool = (runner.pool.num_blocks - 1) * runner.pool.block_size
        config = LoopConfig(
            num_blocks=runner.pool.num_blocks,
            block_size=runner.pool.block_size,
            max_context=min(runner.max_context, pool, max_length + 1),
            eos_token_ids=self._eos,
            max_num_seqs=num_rows,
            max_batch_tokens=max(4 * num_rows, 256),
        )
        self._loop = SpeculativeLoop(LocalExecutor(TargetEngine(runner)), config, self._on_tokens)
        self._next = out.num_lines
        self._live: dict[int, Request] = {}
        self._tokens: dict[int, list[int]] = {}
        self._waiting: dict[int, dict[str, Any] | None] = {}  # done, but an earlier one is not
        self._failure: Exception | None = None

    def run(self) -> None:
        """Make all conversations that are still missing.

        Raises:
            GenerationError: the target failed; what is stored stays.
        """
        self._fill()
        if self._live:
            self._loop.run()
        if self._failure:
            raise GenerationError(f"stopped: {self._failure}") from self._failure

    def _fill(self) -> None:
        limit = min(self._total, self._out.num_lines + WINDOW * self._num_rows)
        while len(self._live) < self._num_rows and self._next < limit:
            index, self._next = self._next, self._next + 1
            self._live[index] = self._start(index)
            self._advance(index, None)

    def _advance(self, index: int, turn: Turn | None) -> None:
        """Send a conversation its turn; submit what it asks for next, or store it."""
        try:
            request = self._live[index].send(turn)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            del self._live[index]
            self._waiting[index] = end.value
            while self._out.num_lines in self._waiting:
                self._out.append(self._waiting.pop(self._out.num_lines))
                self._on_line()
            return
        self._tokens[index] = []
        if not self._loop.submit(index, request):
            raise GenerationError("the engine's queue is full")

    def _on_tokens(self, event: TokenEvent) -> None:
        tokens = self._tokens[event.request_id]
        tokens += event.token_ids
        if event.finish_reason is None or self._failure:
            return
        if event.finish_reason not in (FinishReason.EOS, FinishReason.LENGTH):
            self._fail(GenerationError(event.error or event.finish_reason.value))
            return
        try:
            self._advance(event.request_id, Turn(tokens, event.finish_reason == FinishReason.EOS))
            self._fill()
        except Exception as error:  # the loop would only log it
            self._fail(error)
        if not self._live:
            self._loop.stop()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._loop.stop()


def describe_settings(target: str, settings: ConversationSettings, source: str) -> dict[str, Any]:
    """What must not change when a file is continued."""
    return {"target": Path(target).name, "source": source, **asdict(settings)}
