"""Files of conversations or texts, row by row: JSON lines, a JSON list, or parquet; and what a row asks.

Neighbours: sources.py makes prompts of them. The layouts are those in use: {"messages": [{"role", "content"}]} of chat
APIs, {"conversations": [{"from", "value"}]} of ShareGPT, {"prompt": ...} and {"text": ...}. Files are read in pieces,
however large; a row that is broken is one `BrokenRowError`, and reading goes on after it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from ..types import UsageError
from .prompts import Prompt

COLUMNS = ("messages", "conversations", "prompt", "text")
MOST_BYTES = 16 << 20  # of a row
MOST_TURNS = 4  # of a conversation: what came before the last one is long by then
BEGINNING = 64  # most words of a text that are given, at most half of them; the target continues
_LEAST_WORDS = 16  # of a text
_PIECE = 1 << 20
_SPACE = " \t\r\n"
OWN_FILE = "own"  # the kind of all prompts from files
_USER, _SYSTEM = frozenset(("user", "human")), frozenset(("system", "developer"))


class BrokenRowError(Exception):
    """A row that says nothing to ask, and why."""


def rows(file: Path) -> Iterator[tuple[str, object]]:
    """The rows of a file, each with where it stands. A row that cannot be read is a BrokenRowError in its place.

    Raises UsageError when the file cannot be read at all.
    """
    try:
        if not file.is_file():
            what = "is a folder, not a file" if file.is_dir() else "no such file"
            raise UsageError(f"{file}: {what}: --data takes a file of prompts; --shards says where data are kept")
        with open(file, "rb") as stream:
            head = stream.read(4096)
            stream.seek(0)
            if head.startswith(b"PAR1"):
                yield from _parquet(file)
            elif head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                yield from _items(stream)
            else:
                yield from _lines(stream)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None


def _lines(stream: BinaryIO) -> Iterator[tuple[str, object]]:
    number = 0
    while line := stream.readline(MOST_BYTES + 1):
        number += 1
        value: object
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(_PIECE)) and not rest.endswith(b"\n"):
                pass
            value = BrokenRowError(f"longer than {MOST_BYTES >> 20} MiB")
        elif not line.strip():
            continue
        else:
            value = _json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        yield f"line {number}", value


def _json(raw: bytes) -> object:
    try:
        value: object = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return BrokenRowError("not UTF-8 text")
    except (ValueError, RecursionError):
        return BrokenRowError("not JSON")
    return value


def _items(stream: BinaryIO) -> Iterator[tuple[str, object]]:
    """The items of a JSON list. Where one is no JSON, nobody knows where the next one begins: reading ends there."""
    decoder = json.JSONDecoder()
    text = _Pieces(stream)
    text.skip(_SPACE + "\ufeff")
    text.at += 1  # the bracket
    number = 1
    while text.skip(_SPACE if number == 1 else _SPACE + ",") != "]":
        while True:
            try:
                value, text.at = decoder.raw_decode(text.held, text.at)
                break
            except (ValueError, RecursionError):  # broken, or not held to its end
                if len(text.held) - text.at > MOST_BYTES or not text.more():
                    yield f"row {number}", BrokenRowError("not JSON; the rest of the list cannot be read")
                    return
        yield f"row {number}", value
        number += 1


class _Pieces:
    """A piece of a file as text: held, of which what is before `at` is done with."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.held = ""
        self.at = 0

    def more(self) -> bool:
        """Reads on, at least as much as is held, so that a long item is tried few times; False at the file's end."""
        self.held, self.at = self.held[self.at :], 0
        raw = self._stream.read(max(_PIECE, len(self.held)))
        self.held += self._decoder.decode(raw, final=not raw)
        return bool(raw)

    def skip(self, characters: str) -> str:
        """Leaves out such characters; returns the one after them, "" at the file's end."""
        while True:
            while self.at < len(self.held):
                if self.held[self.at] not in characters:
                    return self.held[self.at]
                self.at += 1
            if not self.more():
                return ""


def _parquet(file: Path) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{file}: reading parquet needs pyarrow ({error}); install it with: pip install 'outpace[train]'"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            columns = [name for name in COLUMNS if name in names]
            if not columns:
                raise UsageError(f"{file}: has no column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}: {names!r:.200}")
            for batch in table.iter_batches(batch_size=64, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        why = " ".join(str(error).split())[:200]
        if not number:
            raise UsageError(f"{file}: not a parquet file that can be read: {why}") from None
        yield f"row {number + 1}", BrokenRowError(f"{why}; the rest of the file cannot be read")


def prompt_of(row: object) -> Prompt:
    """What a row asks: the user's turns and the system prompt before them. Answers in it are not used. Of a text, the
    beginning, which the target continues. Raises BrokenRowError."""
    if isinstance(row, BrokenRowError):
        raise row
    if not isinstance(row, Mapping):
        raise BrokenRowError(f"not an object but a {type(row).__name__}")
    found = next((name for name in COLUMNS if row.get(name) is not None), None)
    if found is None:
        raise BrokenRowError(f"none of {', '.join(COLUMNS)} in it")
    said = row[found]
    if found in ("messages", "conversations") or (found == "prompt" and isinstance(said, list)):
        return _conversation(said, found)
    text = _text(said, found)
    if found == "prompt":
        return Prompt(OWN_FILE, (text,))
    words = text.split(" ")
    if len(words) < _LEAST_WORDS:
        raise BrokenRowError(f"a text of fewer than {_LEAST_WORDS} words")
    return Prompt(OWN_FILE, (" ".join(words[: min(BEGINNING, len(words) // 2)]),), plain=True)


def _conversation(messages: Any, name: str) -> Prompt:
    if not isinstance(messages, list):
        raise BrokenRowError(f"{name} is not a list")
    turns: list[str] = []
    system: list[str] = []
    before = ""
    for message in messages:
        role = (message.get("role") or message.get("from")) if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise BrokenRowError(f"{name} holds something that is no message with a role")
        said = message.get("content") if message.get("content") is not None else message.get("value")
        if role in _SYSTEM and not turns:
            system.append(_text(said, "a system prompt"))
        elif role in _USER and before in _USER:  # two in a row are one
            turns[-1] += "\n\n" + _text(said, "a user's turn")
        elif role in _USER:
            turns.append(_text(said, "a user's turn"))
        before = role
    if not turns:
        raise BrokenRowError("no user's turn")
    return Prompt(OWN_FILE, tuple(turns[:MOST_TURNS]), "\n\n".join(system))


def _text(said: object, what: str) -> str:
    """A message's text; of parts, as chat APIs have them, all must be text."""
    if isinstance(said, list):
        parts = [part.get("text") for part in said if isinstance(part, Mapping) and part.get("type") == "text"]
        said = "\n".join(map(str, parts)) if len(parts) == len(said) and parts else None
    if not isinstance(said, str):
        raise BrokenRowError(f"{what} is no text")
    try:
        said.encode("utf-8")
    except UnicodeEncodeError:
        raise BrokenRowError(f"{what} has half a character") from None
    if not said.strip():
        raise BrokenRowError(f"{what} is empty")
    return said.strip()


def fingerprint_of(file: Path) -> str:
    """Tells the contents of files apart. Raises UsageError."""
    digest = blake2b(digest_size=16)
    try:
        with open(file, "rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()
