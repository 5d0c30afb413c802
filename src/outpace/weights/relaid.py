"""Weights as the kernels want them, kept in a file between two starts, so that the second one only maps them.

Neighbours: backends/native.py lays weights out and hands over the parts; opening.py says where they lie (hub.relaid).
Knows neither models nor kernels: a part is a name, a form (a few numbers that only the backend understands) and bytes.

The file: MAGIC, length and CRC-32 of the head (8 and 4 bytes), the head (JSON: the key, and for each part its name,
form, place, bytes and the CRC-32 of its two ends), then the parts, each at a multiple of ALIGNMENT bytes. It is written
beside its place and renamed, so a reader sees a whole file or none; what is damaged all the same is not used.
Nothing here raises: without a cache, loading only takes longer.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..types import ModelError
from .files import replacing

MAGIC = b"OUTPACE\x01"
ALIGNMENT = 4096
MAX_HEAD = 1 << 28
SAMPLE = 4096  # bytes at each end of a part that are checked when it is read
LEAST = 32 << 20  # below, laying out again is as quick
MOST = 64 << 30  # all files together; the ones not used for the longest time make room
SPARE = 1 << 30  # stays free on the disk
STALE = 3600  # seconds after which a file that is being written has been given up

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """One array as the backend holds it. form: what it needs to use it again. data: uint8 [bytes]."""

    name: str
    form: tuple[int, ...]
    data: Bytes


class Relaid:
    """Where the re-laid weights of one source are kept: `folder`, which belongs to this source alone.

    source: the .gguf file or model folder. beside: another one that it is made of as well. variant: tells apart what is
    made of one source in several ways. least, most: bytes below which nothing is kept, and that all sources' folders
    beside this one may take together.
    """

    def __init__(
        self, folder: Path, source: Path, *, beside: Path | None = None, variant: str = "", least: int = LEAST,
        most: int = MOST,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.sources = [source] if beside is None else [source, beside]
        self.variant = variant
        self.least = least
        self.most = most
        self._seen: dict[str, str] = {}  # layout -> key of the source when it was first read

    def read(self, layout: str) -> list[Part] | None:
        """The parts that `write` kept for this layout, mapped read-only; None where there are none to be trusted.

        layout: whatever the bytes depend on beside the source.
        """
        try:
            key = self._seen[layout] = self._key(layout)
            path = self._path(layout)
            if not path.is_file():  # opening a pipe would wait for ever
                return None
            with open(path, "rb") as file:
                parts = _parse(file.fileno(), key)
            if parts is not None:
                os.utime(path)  # for `_make_room`
            return parts
        except (OSError, ValueError):
            return None

    def write(self, layout: str, parts: Sequence[Part]) -> bool:
        """Keeps the parts for the next start; returns whether it did.

        It does not when they are few, the disk is nearly full or cannot be written, or the source has changed since
        `read`.
        """
        total = sum(part.data.nbytes for part in parts)
        if not self.least <= total <= self.most:
            return False
        try:
            key = self._key(layout)
            if self._seen.get(layout, key) != key:
                return False
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(total, self._path(layout))
            if shutil.disk_usage(self.folder).free < total + SPARE:
                return False
            head, places = _head(key, parts)
            with replacing(self._path(layout)) as file:
                file.write(head)
                for part, place in zip(parts, places, strict=True):
                    file.seek(place)
                    file.write(part.data.data)
            return True
        except (OSError, ModelError):
            return False

    def _path(self, layout: str) -> Path:
        return self.folder / f"{hashlib.sha256(f'{layout}{self.variant}'.encode()).hexdigest()[:16]}.weights"

    def _key(self, layout: str) -> str:
        """What a file must have been made from: this source, unchanged, in this layout."""
        digest = hashlib.sha256((layout + self.variant).encode())
        for source in self.sources:
            for file in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
                digest.update(_identity(file))
        return digest.hexdigest()

    def _make_room(self, needed: int, replaced: Path) -> None:
        """Deletes what was given up, and the files not used for the longest time until `needed` bytes fit."""
        for part in self.folder.parent.glob("*/.*.part"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > STALE:
                    part.unlink()
        used: list[tuple[float, int, Path]] = []
        for file in self.folder.parent.glob("*/*.weights"):
            with suppress(OSError):
                about = file.stat()
                if file != replaced:
                    used.append((about.st_mtime, about.st_size, file))
        held = sum(size for _, size, _ in used)
        for _, size, file in sorted(used):
            if held + needed <= self.most:
                break
            with suppress(OSError):
                file.unlink()
                held -= size


def _identity(file: Path) -> bytes:
    """A hash of a file's path, size, time, first 2 MiB (where its header is) and samples of the rest."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        about = os.fstat(stream.fileno())
        digest.update(json.dumps([str(file.resolve()), about.st_size, about.st_mtime_ns]).encode())
        digest.update(_read_at(stream.fileno(), 2 << 20, 0))
        for sample in range(1, 65):
            digest.update(_read_at(stream.fileno(), SAMPLE, max(0, about.st_size * sample // 64 - SAMPLE)))
    return digest.digest()


def _read_at(descriptor: int, count: int, at: int) -> bytes:
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, count)


def _ends(data: Bytes) -> int:
    return zlib.crc32(data[-SAMPLE:].data, zlib.crc32(data[:SAMPLE].data))


def _align(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _head(key: str, parts: Sequence[Part]) -> tuple[bytes, list[int]]:
    """The file's beginning, and each part's place. Places count from the end of the head, whose length they change."""
    places = []
    at = 0
    for part in parts:
        places.append(at)
        at = _align(at + part.data.nbytes)
    rows = [
        [part.name, list(part.form), place, part.data.nbytes, _ends(part.data)]
        for part, place in zip(parts, places, strict=True)
    ]
    text = json.dumps({"key": key, "parts": rows}).encode()
    head = MAGIC + struct.pack("<QI", len(text), zlib.crc32(text)) + text
    start = _align(len(head))
    return head, [start + place for place in places]


def _parse(descriptor: int, key: str) -> list[Part] | None:
    """The parts of an open file, None when it has another key. Raises ValueError or OSError for a damaged one."""
    size = os.fstat(descriptor).st_size
    fixed = _read_at(descriptor, len(MAGIC) + 12, 0)
    if len(fixed) < len(MAGIC) + 12 or not fixed.startswith(MAGIC):
        raise ValueError("not a file of re-laid weights")
    length, crc = struct.unpack_from("<QI", fixed, len(MAGIC))
    if not 0 < length <= min(MAX_HEAD, size):
        raise ValueError("impossible head")
    text = _read_at(descriptor, length, len(fixed))
    if len(text) != length or zlib.crc32(text) != crc:
        raise ValueError("damaged head")
    try:
        head = json.loads(text)
        if head["key"] != key:
            return None
        rows = [(str(n), tuple(map(int, f)), int(p), int(b), int(c)) for n, f, p, b, c in head["parts"]]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError("impossible head") from error
    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    for advice in ("MADV_WILLNEED", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # hints: not every system knows them
            mapped.madvise(getattr(mmap, advice))
    data = np.frombuffer(mapped, np.uint8)  # keeps the mapping alive
    start = _align(len(fixed) + length)
    parts = []
    for name, form, place, count, ends in rows:
        if place < 0 or count < 0 or place % ALIGNMENT or start + place + count > size:
            raise ValueError(f"{name} lies outside the file")
        part = data[start + place : start + place + count]
        if _ends(part) != ends:
            raise ValueError(f"{name} is damaged")
        parts.append(Part(name, form, part))
    return parts
