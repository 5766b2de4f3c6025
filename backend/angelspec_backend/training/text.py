"""Plain text for distillation, gathered from files: documents of bounded length, none of them twice."""

from __future__ import annotations

import ast
import gzip
import hashlib
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

MARKUP = (".html", ".htm", ".xhtml", ".page")
SUFFIXES = (".txt", ".rst", ".md", ".py", *MARKUP)
"""Files that are read; each may also be compressed with gzip."""

NGRAM = 13
"""A document that shares so many words in a row with an excluded prompt is dropped."""

_MAX_BYTES = 2 << 20
_MIN_LETTERS = 0.55  # share of a document; tables of numbers and binary data have less
_SKIPPED = {"script", "style", "nav", "head", "footer", "svg", "button"}
_BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section", "dt", "dd", "br"}
_SPACED = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section", "dl", "ul", "ol", "table"}


class _Html(HTMLParser):
    """Collects the text of a page, one line per block, preformatted parts as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped = self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in _SKIPPED
        self._preformatted += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(self._skipped - (tag in _SKIPPED), 0)
        self._preformatted = max(self._preformatted - (tag == "pre"), 0)
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _SPACED:
            self.parts.append("\n\n")
        elif tag in _BLOCKS:
            self.parts.append("\n")


def html_text(page: str) -> str:
    """The readable text of an HTML page."""
    parser = _Html()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts).replace("¶", "")


def python_text(source: str) -> str:
    """The source itself, or for every second file (by its content) only the docstrings, as prose."""
    if hashlib.sha256(source.encode()).digest()[0] % 2:
        return source
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
    return "\n\n".join(text for text in found if text and len(text) > 80)


def read_text(path: Path) -> str:
    """The text of a file; empty when there is none worth having."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            raw = file.read(_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError):
        return ""
    name = path.name.removesuffix(".gz")
    if name.endswith(MARKUP):
        raw = html_text(raw)
    elif name.endswith(".py"):
        raw = python_text(raw)
    lines = [line.rstrip() for line in raw.replace("\r\n", "\n").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def find_files(folder: Path, seed: int = 0) -> list[Path]:
    """The files of a folder that may hold text, in an order that is random but always the same."""
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.name.removesuffix(".gz").endswith(SUFFIXES) and path.is_file()
    )
    random.Random(seed).shuffle(found)
    return found


class Collector:
    """Cuts texts into documents, and drops what was there before or must not be there."""

    def __init__(
        self, max_characters: int, min_characters: int = 250, excluded: list[str] | None = None
    ) -> None:
        """excluded: prompts whose text must not occur."""
        self._max, self._min = max_characters, min_characters
        self._seen: set[bytes] = set()
        self._excluded = {gram for prompt in excluded or [] for gram in _ngrams(prompt)}

    def documents(self, text: str) -> Iterator[str]:
        """Documents of at most ``max_characters``, cut between paragraphs where possible."""
        document = ""
        for paragraph in self._paragraphs(text):
            if document and len(document) + len(paragraph) + 2 > self._max:
                yield from self._accepted(document)
                document = ""
            document = f"{document}\n\n{paragraph}" if document else paragraph
        yield from self._accepted(document)

    def _paragraphs(self, text: str) -> Iterator[str]:
        for paragraph in text.split("\n\n"):
            if not paragraph.strip():
                continue
            if len(paragraph) > 60:  # short ones ("Parameters", "Example") may come again
                key = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=10).digest()
                if key in self._seen:
                    continue
                self._seen.add(key)
            yield from (paragraph[at : at + self._max] for at in range(0, len(paragraph), self._max))

    def _accepted(self, document: str) -> Iterator[str]:
        if len(document) < self._min:
            return
        letters = sum(character.isascii() and character.isalpha() for character in document)
        if letters < _MIN_LETTERS * len(document):
            return
        if self._excluded and not self._excluded.isdisjoint(_ngrams(document)):
            return
        yield document


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)}
