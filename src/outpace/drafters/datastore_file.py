"""The file of a datastore: the tokens of a corpus and a suffix array over them, mapped when it is used.

Neighbours: datastore.py builds and searches it, suffix_array.py sorts. Knows no text and no drafts.

The file: HEAD bytes of head (MAGIC, length and CRC-32 of a JSON text, the text, zeros), the tokens, and at the next
multiple of HEAD the suffixes. Tokens are big-endian, 2 bytes each, or 4 where the vocabulary is larger: the order of
their bytes is their order. The largest number stands for the end of a document; each has one, so no match goes past it.
Suffixes are places of tokens, uint32 little-endian, sorted by the first `depth` tokens from there on.

Opening looks at the head, the sizes and a sample, never at everything. What is damaged elsewhere makes poor drafts,
which verification refuses, and nothing worse: a place outside the text reads as the end of a document.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..types import I64, ModelError, UsageError
from ..weights.files import replacing
from .suffix_array import DEPTH, sorted_suffixes

MAGIC = b"OUTPDATA"
VERSION = 1
HEAD = 4096
SAMPLE = 4096  # bytes at each end of tokens and suffixes whose checksum is in the head
MOST_TOKENS = 2**32 - 2 * DEPTH  # a place is a uint32
_FIXED = struct.Struct("<8sII")

Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


@dataclass(frozen=True, slots=True)
class Head:
    """What a datastore says of itself.

    vocabulary: Tokenizer.fingerprint(). known_tokens: ids are below it. model, corpus: what it was made with and from,
    for people. documents, tokens, suffixes: counts; each document's end counts as a token. depth: how far suffixes are
    sorted. checksums: CRC-32 of the samples of tokens and of suffixes.
    """

    vocabulary: str
    known_tokens: int
    model: str
    corpus: str
    documents: int
    tokens: int
    suffixes: int
    depth: int
    checksums: tuple[int, int]

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return 2 if self.known_tokens < 2**16 else 4

    @property
    def end(self) -> int:
        """What stands for the end of a document."""
        return int(2 ** (8 * self.width) - 1)

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the tokens begin, where the suffixes do, and the file's size."""
        second = -(-(HEAD + self.tokens * self.width) // HEAD) * HEAD
        return HEAD, second, second + 4 * self.suffixes


class Datastore:
    """An open datastore. Reading changes nothing: threads and processes may share it.

    A file that is built anew takes the old one's place under the same name; what is open goes on with the old one.
    """

    def __init__(self, path: Path, head: Head, mapped: mmap.mmap) -> None:
        """Use `open`."""
        self.path = path
        self.head = head
        first, second, size = head.places
        whole = np.frombuffer(mapped, np.uint8)
        self._bytes = mapped
        self._first = first
        self._format = f">{{}}{'H' if head.width == 2 else 'I'}"
        self._tokens: NDArray[Any] = whole[first : first + head.tokens * head.width].view(f">u{head.width}")
        self._suffixes: NDArray[Any] = whole[second:size].view("<u4")

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Maps a datastore. Raises ModelError for a file that is none, is damaged, or is of another version."""
        path = Path(path)
        try:
            if not path.is_file():  # opening a pipe would wait for ever
                raise ModelError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                head = _parse_head(os.pread(file.fileno(), HEAD, 0))
                if size != head.places[2]:
                    raise ValueError(f"it has {size} bytes instead of {head.places[2]}")
                found = cls(path, head, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ModelError(f"{path}: not a usable datastore: {error}; build it with `outpace index`") from None
        checksums = _checksum(found._tokens), _checksum(found._suffixes)
        if checksums != head.checksums or found._tokens[-1] != head.end:
            raise ModelError(f"{path}: not a usable datastore: it is damaged; build it again with `outpace index`")
        return found

    def find(self, pattern: Sequence[int]) -> range:
        """The rows of the suffix array whose text begins with the pattern, of 1 .. depth tokens.

        A few microseconds for each of two binary searches.
        """
        if not 1 <= len(pattern) <= self.head.depth or not all(0 <= t < self.head.known_tokens for t in pattern):
            return range(0)
        wanted = struct.pack(self._format.format(len(pattern)), *pattern)
        size, width, first = len(wanted), self.head.width, self._first
        mapped, suffix = self._bytes, self._suffixes.item

        def text(row: int) -> bytes:
            at = first + width * suffix(row)
            return mapped[at : at + size]

        rows = range(self.head.suffixes)
        low = bisect_left(rows, wanted, key=text)
        if low == len(rows) or text(low) != wanted:
            return range(0)
        return range(low, bisect_right(rows, wanted, lo=low, key=text))

    def following(self, rows: range, skip: int, n: int, most: int) -> I64:
        """What follows the first `skip` tokens of these rows: int64 [rows, n], -1 from the end of a document on.

        Of more than `most` rows that many are looked at, evenly spaced: rows with the same continuation are neighbours.
        """
        count = min(len(rows), most)
        picked = rows.start + np.arange(count) * len(rows) // max(1, count)
        places = self._suffixes[picked].astype(np.int64)[:, None] + np.arange(skip, skip + n)
        tokens: I64 = self._tokens[np.minimum(places, self.head.tokens - 1)].astype(np.int64)
        ended = np.logical_or.accumulate((tokens >= self.head.known_tokens) | (places >= self.head.tokens), axis=1)
        tokens[ended] = -1
        return tokens


def write(
    path: Path,
    documents: Iterable[Iterable[Sequence[int]]],
    *,
    vocabulary: str,
    known_tokens: int,
    model: str = "",
    corpus: str = "",
    progress: Progress | None = None,
) -> Head:
    """Writes a datastore of documents, each given in pieces of token ids; the file appears when it is complete.

    Documents without tokens are left out. Memory: two copies of the tokens, and what `sorted_suffixes` needs: measured,
    0.2 GB for 5 million tokens and half a GB foretold for 50 million.
    Raises UsageError for an empty or too large corpus or a token outside the vocabulary, ModelError when the disk
    refuses.
    """
    head = Head(vocabulary, known_tokens, model[:100], corpus[:400], 0, 0, 0, DEPTH, (0, 0))
    token_type = np.dtype(f">u{head.width}")
    end = np.array([head.end], token_type)
    tokens = count = 0
    with replacing(path) as file:
        file.seek(HEAD)
        for pieces in documents:
            before = tokens
            for piece in pieces:
                ids = np.asarray(piece, np.int64)
                if len(ids) and not 0 <= ids.min() <= ids.max() < known_tokens:
                    raise UsageError(f"a token id of the corpus is outside the vocabulary of {known_tokens}")
                file.write(ids.astype(token_type).tobytes())
                tokens += len(ids)
            if tokens > before:
                file.write(end.tobytes())
                tokens += 1
                count += 1
            if tokens > MOST_TOKENS:
                raise UsageError(f"the corpus has more than {MOST_TOKENS} tokens: make several datastores of it")
        if not tokens:
            raise UsageError("there is no text to make a datastore of")
        head = replace(head, documents=count, tokens=tokens, suffixes=tokens - count)
        head = replace(head, checksums=_write_suffixes(file, head, progress))
        file.seek(0)
        file.write(_head_bytes(head))
    return head


def _write_suffixes(file: BinaryIO, head: Head, progress: Progress | None) -> tuple[int, int]:
    """Sorts the tokens that the file holds already and appends the suffixes; returns the checksums."""
    file.flush()
    mapped = np.memmap(file.name, f">u{head.width}", "r", HEAD, (head.tokens,))
    checksum = _checksum(mapped)
    file.seek(head.places[1])
    done = 0
    first, last = b"", b""
    # The end of a document becomes the number after the vocabulary: it stays the largest, and counts stay small.
    tokens = np.minimum(mapped, head.known_tokens).astype(f"u{head.width}")
    sorting = sorted_suffixes(tokens, head.known_tokens, depth=head.depth)
    del mapped, tokens  # they would be kept beside the copy that is sorted
    for places in sorting:
        data = places.astype("<u4").tobytes()
        file.write(data)
        first, last = (first + data[:SAMPLE])[:SAMPLE], (last + data[-SAMPLE:])[-SAMPLE:]
        done += len(places)
        if progress is not None:
            progress("sorting", done, head.suffixes)
    return checksum, zlib.crc32(last, zlib.crc32(first))


def _checksum(data: NDArray[Any]) -> int:
    """CRC-32 of the first and the last SAMPLE bytes."""
    raw = data.view(np.uint8)
    return zlib.crc32(raw[-SAMPLE:].tobytes(), zlib.crc32(raw[:SAMPLE].tobytes()))


def _head_bytes(head: Head) -> bytes:
    text = json.dumps({"version": VERSION} | asdict(head), ensure_ascii=False).encode("utf-8", "replace")
    return (_FIXED.pack(MAGIC, len(text), zlib.crc32(text)) + text).ljust(HEAD, b"\0")


def _parse_head(data: bytes) -> Head:
    """Raises ValueError saying what is wrong."""
    if len(data) < HEAD or not data.startswith(MAGIC):
        raise ValueError("it does not begin like one")
    _, length, checksum = _FIXED.unpack_from(data)
    text = data[_FIXED.size : _FIXED.size + length]
    if zlib.crc32(text) != checksum:
        raise ValueError("its head is damaged")
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("its head is damaged") from None
    if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
        raise ValueError("it was made by another version of outpace")
    try:
        first, second = fields.pop("checksums")
        head = Head(**fields, checksums=(first, second))
    except (TypeError, KeyError, ValueError):
        raise ValueError("its head is damaged") from None
    numbers = (head.known_tokens, head.documents, head.tokens, head.suffixes, head.depth)
    texts = (head.vocabulary, head.model, head.corpus)
    if not all(type(n) is int for n in numbers) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its head is damaged")
    sound = 0 < head.known_tokens < 2**31 and 0 < head.documents < head.tokens <= MOST_TOKENS and 0 < head.depth <= 256
    if not sound or head.suffixes != head.tokens - head.documents:
        raise ValueError("its counts cannot be right")
    return head
