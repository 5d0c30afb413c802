"""The texts of a corpus that a user names: files and folders, read piece by piece. datastore.py indexes them.

Whether a file holds text is told by its content: UTF-8 without a zero byte. In folders, what is hidden (.git, .env)
and what tools fill (node_modules and the like) is left out, and links to other folders are not followed.
A file of answers or conversations becomes one document for each text: JSON objects with "text" or "messages", one or
one a line, such as `outpace generate --json` prints, or the list of messages that `/save` of `outpace chat` writes.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..types import UsageError

JUNK = frozenset(("node_modules", "__pycache__", "venv", "site-packages"))
PIECE = 1 << 20  # characters that are tokenised at once
_HEAD = 64 << 10  # bytes that tell what a file is
_MOST_JSON = 256 << 20  # larger files of JSON are read as any other text


@dataclass(slots=True)
class Counts:
    """What became of the files: read as text, skipped because they are no text, or not readable (folders, too)."""

    files: int = 0
    binary: int = 0
    unreadable: int = 0


def files(paths: Sequence[str | Path], counts: Counts) -> list[Path]:
    """All files that these files and folders stand for, each once, folders in the order of names.

    Raises UsageError for a path that is not there.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        if not os.path.exists(path):
            raise UsageError(f"{path}: no such file or folder")
        for file in _walk(path, counts) if os.path.isdir(path) else [path]:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _walk(folder: Path, counts: Counts) -> Iterator[Path]:
    def unreadable(_: OSError) -> None:
        counts.unreadable += 1

    for place, folders, names in os.walk(folder, onerror=unreadable):
        # os.walk goes on with what is left in this list.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in JUNK)
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def documents(file: Path, counts: Counts) -> Iterator[Iterator[str]]:
    """The file's documents, each in pieces of text to be read in turn; none where the file is no text."""
    try:
        if not file.is_file():  # a pipe or device would never end
            counts.unreadable += 1
            return
        with open(file, "rb") as stream:
            head = stream.read(_HEAD)
            if not _is_text(head):
                counts.binary += 1
                return
            texts = None
            if (
                head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
                and os.fstat(stream.fileno()).st_size <= _MOST_JSON
            ):
                texts = _texts(head + stream.read())
                stream.seek(len(head))
            counts.files += 1
            if texts is not None:
                yield from (iter([text]) for text in texts)
            else:
                yield _pieces(head, stream, counts)
    except OSError:
        counts.unreadable += 1


def _is_text(head: bytes) -> bool:
    try:
        # A character may be cut at the end.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _pieces(head: bytes, stream: BinaryIO, counts: Counts) -> Iterator[str]:
    """The text in pieces that end with a line where lines are not endless. Bytes that are not UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    rest, data = "", head
    while data:
        rest += decoder.decode(data)
        if len(rest) >= PIECE:
            cut = rest.rfind("\n") + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
        try:
            data = stream.read(PIECE)
        except OSError:  # a disk that fails in the middle: what was read stays
            counts.unreadable += 1
            break
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def _texts(data: bytes) -> list[str] | None:
    """The texts of a file of answers or conversations; None where it is anything else."""
    text = data.decode("utf-8-sig", "replace")
    try:
        return _strings(json.loads(text))
    except (ValueError, RecursionError):
        pass
    found: list[str] = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        try:
            strings = _strings(json.loads(line))
        except (ValueError, RecursionError):
            return None
        if strings is None:
            return None
        found += strings
    return found


def _strings(value: object) -> list[str] | None:
    if isinstance(value, dict):
        if isinstance(value.get("text"), str):
            return [_unicode(value["text"])]
        value = value.get("messages")
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return [_unicode(message["content"]) for message in value if isinstance(message.get("content"), str)]
    return None


def _unicode(text: str) -> str:
    """JSON can write halves of characters, which are no text."""
    return text.encode("utf-8", "replace").decode()
