"""One named array as it lies in a file, and the exact group form that the native core multiplies with.

Neighbours: formats.py says how a kind's bytes are decoded; gguf.py and safetensors.py make Tensors as views of mapped
files; weight_map.py hands them out by name. Nothing is decoded before it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import F32, I64, ModelError, UsageError
from .formats import CHUNK, KINDS, U16, Groups, Kind, Supers

__all__ = ["Groups", "Supers", "Tensor"]

SCALE_BLOCK = 128  # rows and columns that share one scale in FP8 checkpoints with block scales
MAX_VALUES = 1 << 48  # larger shapes are damage: they would overflow size arithmetic elsewhere

_KIND_OF_DTYPE = {
    "float32": "F32",
    "float16": "F16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}


def byte_size(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this kind and shape takes.

    Raises ModelError for an unknown kind, an impossible shape, or rows that do not fill whole blocks.
    """
    form = KINDS.get(kind)
    if form is None:
        raise ModelError(f"kind {kind} is not supported; supported are {', '.join(KINDS)}")
    if len(shape) > 8 or any(d < 0 for d in shape) or math.prod(max(d, 1) for d in shape) > MAX_VALUES:
        raise ModelError(f"impossible shape {list(shape)[:8]}")
    if form.block > 1 and (not shape or shape[-1] % form.block):
        raise ModelError(f"shape {list(shape)} does not fit {kind}: rows must be a multiple of {form.block}")
    return math.prod(shape) // form.block * form.size


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Bytes, how to read them, and the logical shape in PyTorch order ([out, in] for a matrix).

    kind: a key of formats.KINDS ("F32", "BF16", "Q4_1", "F8_E4M3", ...). data: uint8 [bytes], usually a read-only view
    of a mapped file. block_scale: for FP8 the float tensor whose values multiply the weights: one for all ([] or [1]),
    one for each row ([out] or [out, 1]), or one for each block of 128 x 128 ([out / 128, in / 128], rounded up);
    after `select` one for each row and 128 columns. Raises ModelError when shape, kind and bytes do not fit together.
    """

    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]
    block_scale: Tensor | None = None

    def __post_init__(self) -> None:
        size = byte_size(self.kind, self.shape)
        if self.data.dtype != np.uint8 or self.data.shape != (size,):
            raise ModelError(f"{self.kind} of shape {list(self.shape)} needs {size} bytes, got {self.data.nbytes}")
        scale = self.block_scale
        if scale is not None:
            if KINDS[scale.kind].decode is None:
                raise ModelError(f"block scales of kind {scale.kind} are not numbers to multiply with")
            if not _single(scale):
                _spans(self.shape, scale.shape)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Tensor:
        """A tensor that shares the array's memory where it can. Raises UsageError for a dtype that has no kind."""
        kind = _KIND_OF_DTYPE.get(array.dtype.name)
        if kind is None:
            raise UsageError(f"no tensor kind for dtype {array.dtype}; use one of {', '.join(_KIND_OF_DTYPE)}")
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(tuple(array.shape), kind, little.reshape(-1).view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the data, block scales included."""
        return self.data.nbytes + (self.block_scale.nbytes if self.block_scale is not None else 0)

    def f32(self) -> F32:
        """The values as a C-contiguous float32 array of `shape`: new, or a read-only view of the data where that fits.

        Raises ModelError for integer kinds.
        """
        form = self._form
        if form.decode is None:
            raise ModelError(f"a tensor of integers ({self.kind}) was used as weights")
        if self.kind == "F32":
            return np.require(self.data.view("<f4"), np.float32, ["C", "A"]).reshape(self.shape)
        blocks = self.data.reshape(-1, form.size)
        values = np.empty((len(blocks), form.block), dtype=np.float32)
        step = CHUNK // form.block
        for at in range(0, len(blocks), step):
            values[at : at + step] = form.decode(blocks[at : at + step])
        values = values.reshape(self.shape)
        if self.block_scale is not None:
            _multiply(values, self.block_scale)
        return values

    def ints(self) -> I64:
        """The values of an integer or BOOL tensor as int64 of `shape`. Raises ModelError for other kinds."""
        dtype = self._form.integer
        if dtype is None:
            raise ModelError(f"a tensor of kind {self.kind} was used as integers")
        values: I64 = self.data.view(np.uint8 if self.kind == "BOOL" else dtype).astype(np.int64)
        if self.kind == "BOOL":
            values = np.minimum(values, 1)  # any byte but zero is true
        return values.reshape(self.shape)

    def groups(self) -> Groups | None:
        """The exact group-of-32 form of a 2-D tensor, None where the kind has no exact one (F32, BF16, Q6_K, ...)."""
        if self._form.parts is None or len(self.shape) != 2:
            return None
        scale, q, offset = self._taken_apart(self._form.parts)
        return Groups(q, scale, offset)

    def supers(self) -> Supers | None:
        """The super-blocks of a 2-D tensor of a kind that has them (Q4_K, Q6_K, ...), None otherwise."""
        if self._form.supers is None or len(self.shape) != 2:
            return None
        q, d, scale, dmin, minimum = self._taken_apart(self._form.supers)
        return Supers(self.kind.lower(), q, d, scale, dmin, minimum)

    def halves(self) -> U16:
        """The bits of an F16 or BF16 tensor's values, of `shape`, without copying where memory's order allows it.

        Raises UsageError for other kinds.
        """
        if self.kind not in ("F16", "BF16"):
            raise UsageError(f"a tensor of kind {self.kind} has no values of 2 bytes")
        return np.require(self.data.view("<u2"), np.uint16, ["C", "A"]).reshape(self.shape)

    def _taken_apart(self, decode: Callable[[NDArray[np.uint8]], Any]) -> list[Any]:
        """decode(blocks) for all blocks, some at a time: its arrays [blocks, ...] as [out, the rest], None as None."""
        blocks = self.data.reshape(-1, self._form.size)
        step = CHUNK // self._form.block
        whole: list[Any] = []
        for at in range(0, max(1, len(blocks)), step):
            parts = decode(blocks[at : at + step])
            if not whole:
                whole = [
                    None if part is None else np.empty((len(blocks), *part.shape[1:]), part.dtype) for part in parts
                ]
            for to, part in zip(whole, parts, strict=True):
                if part is not None:
                    to[at : at + step] = part
        out, per_row = self.shape[0], self.shape[1] // self._form.block
        return [None if a is None else a.reshape(out, per_row * math.prod(a.shape[1:])) for a in whole]

    def select(self, rows: I64) -> Tensor:
        """The rows (first axis) in this order, without decoding them; rows that follow each other are not copied.

        Raises UsageError for a row out of range.
        """
        if not self.shape or (len(self.shape) == 1 and self._form.block > 1):
            raise UsageError(f"cannot take single rows of {self.kind} of shape {list(self.shape)}")
        count = self.shape[0]
        if len(rows) and (rows.min() < 0 or rows.max() >= count):
            raise UsageError(f"rows {rows.min()} to {rows.max()} asked of a tensor that has {count}")
        row_bytes = byte_size(self.kind, (1, *self.shape[1:]))
        scale = self.block_scale
        if scale is not None and not _single(scale):
            if len(self.shape) == 3:
                scale = scale.select(rows)
            else:  # selected rows may come from any block: each gets scales of its own
                scale = Tensor.from_array(_grid(scale)[rows // _spans(self.shape, scale.shape)[0]])
        run = len(rows) > 0 and bool((np.diff(rows) == 1).all())
        chosen = slice(int(rows[0]), int(rows[-1]) + 1) if run else rows
        data = self.data.reshape(count, row_bytes)[chosen].reshape(-1)
        return Tensor((len(rows), *self.shape[1:]), self.kind, data, scale)

    def unstack(self) -> list[Tensor]:
        """The tensors along the first axis of a 3-D tensor, without decoding them. Raises UsageError otherwise."""
        if len(self.shape) != 3:
            raise UsageError(f"cannot unstack a tensor of shape {list(self.shape)}: it is not 3-D")
        count, size = self.shape[0], byte_size(self.kind, self.shape[1:])
        scale = self.block_scale
        scales = [scale] * count if scale is None or _single(scale) else scale.unstack()
        return [
            Tensor(self.shape[1:], self.kind, self.data[i * size : (i + 1) * size], scales[i]) for i in range(count)
        ]

    @property
    def _form(self) -> Kind:
        return KINDS[self.kind]


# ---------------------------------------------------------------------------------------------------- FP8 scales


def _single(scale: Tensor) -> bool:
    return math.prod(scale.shape) == 1


def _grid(scale: Tensor) -> F32:
    """Scales as float32 [..., row blocks, column blocks]; one a row is a single column."""
    values = scale.f32()
    return values[:, None] if values.ndim == 1 else values


def _spans(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the weights that one scale covers. Raises ModelError where the scales do not fit."""
    forms: dict[tuple[int, ...], tuple[int, int]] = {}
    if len(shape) in (2, 3):
        out, width = shape[-2:]
        row_blocks, column_blocks = -(-out // SCALE_BLOCK), -(-width // SCALE_BLOCK)
        forms[row_blocks, column_blocks] = SCALE_BLOCK, SCALE_BLOCK
        forms[out, column_blocks] = 1, SCALE_BLOCK
        forms[out, 1] = 1, width
    grid = (*scale_shape, 1) if len(scale_shape) == 1 else scale_shape
    if grid[:-2] != shape[:-2] or grid[-2:] not in forms:
        raise ModelError(f"block scales of shape {list(scale_shape)} do not fit weights of shape {list(shape)}")
    return forms[grid[-2:]]


def _multiply(values: F32, scale: Tensor) -> None:
    """values *= scale, in place, one row of blocks at a time."""
    if _single(scale):
        values *= scale.f32().reshape(())
        return
    rows, columns = _spans(values.shape, scale.shape)
    grid = _grid(scale)
    for index in np.ndindex(values.shape[:-2]):
        matrix = values[index]
        for block, factors in enumerate(grid[index]):
            matrix[block * rows : (block + 1) * rows] *= np.repeat(factors, columns)[: matrix.shape[1]]
