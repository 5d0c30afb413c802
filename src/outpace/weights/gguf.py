"""Reads and writes GGUF files, versions 2 and 3 (specification: docs/gguf.md of the ggml project).

A file is header (magic, version, counts), metadata (key, type, value), tensor infos (name, dimensions, type, offset)
and, aligned, the tensors' bytes; all little-endian. Nothing in a file is believed: each count, length and offset is
checked against the bytes that are left before anything is allocated for it. Knows no model: see weight_map.py.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..types import ModelError, UsageError
from .files import map_file, replacing
from .formats import KINDS
from .tensor import Tensor, byte_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NESTING = 4  # arrays of arrays; real files have none

# Type id of a metadata value -> its little-endian dtype.
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
BOOL, STRING, ARRAY = 7, 8, 9

# Type id of a tensor -> the format's name for it. What formats.KINDS lacks is refused by that name.
TENSOR_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
TYPE_IDS = {name: number for number, name in TENSOR_TYPES.items() if name in KINDS}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file. tensors: views of the mapped file, shapes in PyTorch order. version: 2 or 3.

    metadata: key -> bool, int, float or str; an array of strings is a sequence of str, one of numbers a numpy array of
    the file's dtype, one of arrays a list.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Reads everything but the tensors' values. Raises ModelError naming file and field when it is damaged."""
        path = Path(path)
        data = map_file(path)
        try:
            return _read(path, data)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None


class _Cursor:
    """A place in the file's bytes that refuses to run past their end. Messages name `field`, the part being read."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.view = data.data
        self.size = len(data)
        self.at = 0
        self.field = "header"

    def skip(self, count: int) -> int:
        """Moves over `count` bytes and returns where they begin."""
        start = self.at
        if count > self.size - start:
            raise ModelError(
                f"{self.field}: {count} bytes needed at byte {start} but the file ends at {self.size}: "
                "truncated or damaged"
            )
        self.at = start + count
        return start

    def unsigned(self, width: int) -> int:
        start = self.skip(width)
        return int.from_bytes(self.view[start : start + width], "little")

    def count(self, what: str, least: int) -> int:
        """A 64-bit count of things that each take at least `least` bytes."""
        count = self.unsigned(8)
        if count * least > self.size - self.at:
            raise ModelError(
                f"{self.field}: {count} {what} cannot fit in the {self.size - self.at} bytes left: damaged"
            )
        return count

    def string(self) -> str:
        length = self.unsigned(8)
        start = self.skip(length)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.field}: text at byte {start} is not valid UTF-8") from None

    def strings(self, count: int) -> _native.Texts:
        """`count` strings, read in C++: vocabularies have hundreds of thousands."""
        try:
            values, self.at = _native.strings(self.data, self.at, count)
        except UnicodeDecodeError:
            raise ModelError(f"{self.field}: a text after byte {self.at} is not valid UTF-8") from None
        if len(values) < count:
            raise ModelError(f"{self.field}: string {len(values)} of {count} runs past the file's end: damaged")
        return values

    def value(self, kind: int, nesting: int = 0) -> Any:
        """A metadata value of the type with id `kind`."""
        if kind in SCALARS:
            return self.numbers(kind, 1)[0].item()
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ModelError(f"{self.field}: unknown value type {kind}")
        if nesting == MAX_NESTING:
            raise ModelError(f"{self.field}: arrays nested deeper than {MAX_NESTING}")
        of = self.unsigned(4)
        if of in SCALARS:
            return self.numbers(of, self.count("numbers", SCALARS[of].itemsize))
        if of == STRING:
            return self.strings(self.count("strings", 8))
        if of == ARRAY:
            return [self.value(ARRAY, nesting + 1) for _ in range(self.count("arrays", 12))]
        raise ModelError(f"{self.field}: unknown array type {of}")

    def numbers(self, kind: int, count: int) -> NDArray[Any]:
        dtype = SCALARS[kind]
        start = self.skip(count * dtype.itemsize)
        raw = np.frombuffer(self.view, np.uint8, count * dtype.itemsize, start)
        if kind == BOOL:
            if raw.size and raw.max() > 1:
                raise ModelError(f"{self.field}: a truth value is neither 0 nor 1")
            return raw.astype(np.bool_)
        return raw.copy().view(dtype)  # a copy is aligned, and does not keep the file mapped


def _read(path: Path, data: NDArray[np.uint8]) -> GGUFFile:
    cursor = _Cursor(data)
    magic = bytes(data[:4])
    if magic != MAGIC:
        raise ModelError(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.skip(4)
    version = cursor.unsigned(4)
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise ModelError("a big-endian GGUF file, which is not supported; convert it to little-endian")
        raise ModelError(f"GGUF version {version} is not supported; supported are {VERSIONS}")
    cursor.field = "tensor count"
    tensor_count = cursor.count("tensors", 24)
    cursor.field = "metadata count"
    metadata_count = cursor.count("metadata entries", 13)

    metadata: dict[str, Any] = {}
    for index in range(metadata_count):
        cursor.field = f"key of metadata entry {index}"
        key = cursor.string()
        cursor.field = f"metadata {key!r:.80}"
        if key in metadata:
            raise ModelError(f"{cursor.field} appears twice")
        metadata[key] = cursor.value(cursor.unsigned(4))

    parts = metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise ModelError(f"one of {parts!r:.20} parts of a split model, which is not supported; merge the parts first")

    infos: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for index in range(tensor_count):
        cursor.field = f"name of tensor {index}"
        name = cursor.string()
        cursor.field = f"tensor {name!r:.80}"
        if name in infos:
            raise ModelError(f"{cursor.field} appears twice")
        infos[name] = _tensor_info(cursor)

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"general.alignment must be a power of two, got {alignment!r:.80}")
    start = _align(cursor.at, alignment)
    return GGUFFile(path, version, metadata, _views(data, start, alignment, infos))


def _tensor_info(cursor: _Cursor) -> tuple[tuple[int, ...], str, int]:
    """Shape in PyTorch order (the file lists the fastest axis first), kind and offset of one tensor."""
    dims = cursor.unsigned(4)
    if dims > MAX_DIMS:
        raise ModelError(f"{cursor.field} has {dims} dimensions; at most {MAX_DIMS} are allowed")
    shape = tuple(cursor.unsigned(8) for _ in range(dims))[::-1]
    number = cursor.unsigned(4)
    kind = TENSOR_TYPES.get(number, f"number {number}")
    if kind not in KINDS:
        raise ModelError(f"{cursor.field} has type {kind}, which is not supported; supported are {', '.join(TYPE_IDS)}")
    return shape, kind, cursor.unsigned(8)


def _views(
    data: NDArray[np.uint8], start: int, alignment: int, infos: Mapping[str, tuple[tuple[int, ...], str, int]]
) -> dict[str, Tensor]:
    """The tensors as views of the data that begins at byte `start`."""
    tensors = {}
    spans = []
    for name, (shape, kind, offset) in infos.items():
        try:
            size = byte_size(kind, shape)
        except ModelError as error:
            raise ModelError(f"tensor {name!r:.80}: {error}") from None
        if offset % alignment:
            raise ModelError(f"tensor {name!r:.80}: offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + size > len(data):
            raise ModelError(
                f"tensor {name!r:.80}: bytes {start + offset} to {start + offset + size} are past the file's end "
                f"({len(data)}): truncated or damaged"
            )
        spans.append((offset, offset + size, name))
        tensors[name] = Tensor(shape, kind, data[start + offset : start + offset + size])
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise ModelError(f"tensors {first!r:.80} and {second!r:.80} overlap")
    return tensors


def _align(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


# ------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written whose bytes are made only when their turn comes.

    shape: in PyTorch order. kind: one of TYPE_IDS. pieces: makes the tensor's bytes, in order, uint8 [any length] each.
    """

    shape: tuple[int, ...]
    kind: str
    pieces: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def nbytes(self) -> int:
        return byte_size(self.kind, self.shape)


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor | Planned]) -> None:
    """Writes a version 3 file: all of it, or nothing. Never holds more than one piece of a planned tensor.

    metadata: bool, int (as uint32, int32, uint64 or int64: the first that holds it), float (as float32, which readers
    expect), str, a sequence of strings, numpy scalars and 1-D arrays (as their dtype). Raises UsageError for a value
    or a tensor that GGUF cannot hold, ModelError when the file cannot be written.
    """
    path = Path(path)
    planned = {name: t if isinstance(t, Planned) else _whole(name, t) for name, t in tensors.items()}
    header, alignment = _header(metadata, planned)
    with replacing(path) as file:
        file.write(header)
        for name, tensor in planned.items():
            written = 0
            for piece in tensor.pieces():
                written += file.write(np.ascontiguousarray(piece).data)
            if written != tensor.nbytes:
                raise UsageError(
                    f"tensor {name!r}: {tensor.kind} needs {tensor.nbytes} bytes, its pieces had {written}"
                )
            file.write(bytes(_align(written, alignment) - written))


def gguf_size(metadata: Mapping[str, Any], tensors: Mapping[str, Planned]) -> int:
    """Bytes of the file that write_gguf would write. Raises UsageError as it does."""
    header, alignment = _header(metadata, tensors)
    return len(header) + sum(_align(tensor.nbytes, alignment) for tensor in tensors.values())


def _whole(name: str, tensor: Tensor) -> Planned:
    if tensor.block_scale is not None:
        raise UsageError(f"tensor {name!r}: GGUF cannot hold {tensor.kind} with block scales")
    return Planned(tensor.shape, tensor.kind, lambda: [tensor.data])


def _header(metadata: Mapping[str, Any], tensors: Mapping[str, Planned]) -> tuple[bytes, int]:
    """Everything before the tensors' bytes, and the alignment."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UsageError(f"general.alignment must be a power of two, got {alignment!r}")
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + _value(key, value)
    offset = 0
    for name, tensor in tensors.items():
        if tensor.kind not in TYPE_IDS or len(tensor.shape) > MAX_DIMS:
            raise UsageError(f"tensor {name!r}: GGUF cannot hold {tensor.kind} of shape {list(tensor.shape)}")
        dims = tensor.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPE_IDS[tensor.kind], offset)
        offset = _align(offset + tensor.nbytes, alignment)
    return bytes(header) + bytes(_align(len(header), alignment) - len(header)), alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """Type id and bytes of a metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, float) and not isinstance(value, np.float64):
        value = np.float32(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = _smallest(key, value)
    array = np.asarray(value)
    codes = [code for code, dtype in SCALARS.items() if dtype == array.dtype]
    if not codes or array.ndim > 1 or isinstance(value, Sequence):
        raise UsageError(f"metadata {key!r}: GGUF cannot hold {value!r:.80}; use numpy arrays for lists of numbers")
    raw = array.astype(SCALARS[codes[0]]).tobytes()
    if array.ndim:
        return struct.pack("<IIQ", ARRAY, codes[0], math.prod(array.shape)) + raw
    return struct.pack("<I", codes[0]) + raw


def _smallest(key: str, value: int) -> np.integer[Any]:
    for dtype in (np.uint32, np.int32, np.uint64, np.int64):
        if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return dtype(value)
    raise UsageError(f"metadata {key!r}: {value} does not fit 64 bits")
