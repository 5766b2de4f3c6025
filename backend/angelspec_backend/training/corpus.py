"""Training documents: conversations and plain text as token ids, with what is to be predicted marked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angelspec_backend.training.chat_mask import encode_conversation
from angelspec_backend.training.conversation import ChatFormat
from angelspec_backend.training.records import RecordError, read_lines, read_messages

MIN_SUPERVISED = 8
"""Documents with fewer tokens to predict are left out."""

ANSWERS = ("greedy", "sampled", "answers")
"""Groups of documents whose answers the target gave: how, if that is known."""

_TITLE = 80  # characters of a text that its user turn repeats


@dataclass(frozen=True)
class Document:
    """One conversation or text."""

    token_ids: NDArray[np.int32]  # [n]
    supervised: NDArray[np.bool_]  # [n] tokens that are to be predicted: the target's own, or all of a text
    group: str  # "text" or one of ANSWERS, for statistics

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their files."""

    documents: Sequence[Document]

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return sum(map(len, self.documents))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[documents]"""
        return np.array([len(document) for document in self.documents], np.int64)

    def fingerprint(self) -> str:
        """Equal for equal documents in equal order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.token_ids.tobytes() + document.supervised.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CorpusFiles:
    """Where documents come from.  limits: lines read of each file, so that a file may grow meanwhile."""

    conversations: Sequence[Path]
    text: Sequence[Path]
    limits: dict[str, int]

    def counted(self) -> CorpusFiles:
        """The same with the number of complete lines that each file has now, where no limit is given."""
        limits = dict(self.limits)
        for path in (*self.conversations, *self.text):
            if str(path) not in limits:
                try:
                    limits[str(path)] = path.read_bytes().count(b"\n")
                except OSError as error:
                    raise RecordError(f"cannot read {path}: {error.strerror}") from None
        return CorpusFiles(self.conversations, self.text, limits)


def load_corpus(
    files: CorpusFiles, chat: ChatFormat, max_length: int, held_out: float
) -> tuple[Corpus, Corpus]:
    """Documents for training, and those held out from it.

    max_length: longer documents are cut; held_out: share, chosen by a hash of the prompt or text, so that a
    document stays where it is when others are added.

    Raises:
        RecordError: a file is missing or malformed, or nothing is left for training.
    """
    train: list[Document] = []
    held: list[Document] = []
    for document in _documents(files, chat):
        cut = Document(document.token_ids[:max_length], document.supervised[:max_length], document.group)
        if cut.supervised.sum() >= MIN_SUPERVISED:
            (held if _is_held_out(cut, held_out) else train).append(cut)
    if not train:
        names = ", ".join(map(str, (*files.conversations, *files.text))) or "no files given"
        raise RecordError(f"nothing to train on: {names}")
    return Corpus(train), Corpus(held)


def _documents(files: CorpusFiles, chat: ChatFormat) -> Iterator[Document]:
    for paths, read in ((files.conversations, _conversation), (files.text, _text)):
        for path in paths:
            for where, record in read_lines(path, files.limits.get(str(path))):
                yield read(record, where, chat)


def _conversation(record: Any, where: str, chat: ChatFormat) -> Document:
    if not (isinstance(record, dict) and "token_ids" in record):
        return _messages(record, where, chat)
    token_ids = np.array(record["token_ids"], np.int32)
    supervised = np.zeros(len(token_ids), bool)
    for start, end in record.get("assistant_spans", ()):
        supervised[start:end] = True
    temperature = record.get("temperature")
    group = "answers" if temperature is None else "sampled" if temperature else "greedy"
    return Document(token_ids, supervised, group)


def _messages(record: Any, where: str, chat: ChatFormat) -> Document:
    messages = read_messages(record, where)
    try:
        token_ids, mask = encode_conversation(chat.tokenizer, messages)
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from None
    return Document(np.array(token_ids, np.int32), np.array(mask, bool), "answers")


def _text(record: Any, where: str, chat: ChatFormat) -> Document:
    """A text as the answer to its own beginning, so that the target is in the state it serves in."""
    if not (isinstance(record, dict) and isinstance(record.get("text"), str)):
        raise RecordError(f'{where} must have "text"')
    text = record["text"]
    title = text.strip().split("\n", 1)[0][:_TITLE]
    prompt = chat.encode(chat.render([{"role": "user", "content": title}]))
    answer = chat.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    supervised = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Document(np.array(prompt + answer, np.int32), supervised, "text")


def _is_held_out(document: Document, share: float) -> bool:
    first = int(document.supervised.argmax())
    prompt = document.token_ids[: first + (MIN_SUPERVISED if document.group == "text" else 0)]
    digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64
