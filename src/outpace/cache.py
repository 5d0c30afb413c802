"""The KV cache as a transaction: a pass appends rows, `commit` keeps a path of them, what is not kept never was.

Neighbours: models/decoder.py writes and reads rows, models/quantise.py rounds them, backends/reference.py drives the
transaction; the contract is written down in backends/base.py. One cache holds one sequence.

A layer whose state is recurrent (a linear-attention layer) fits the same four calls: it keeps the state of the
committed end and the state after each pending row, `commit` settles on one of them, and `truncate` is what it refuses
(RewindError) for lengths whose state it no longer has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, cast, get_args

import numpy as np

from .config import ModelConfig
from .types import F32, I64, CapacityError, RewindError, UsageError

CacheKind = Literal["f32", "f16", "q8"]
CacheOption = Literal["auto", "f32", "f16", "q8"]
_FIRST = 64  # rows reserved at first; doubled when full, so that memory follows use


def cache_kind(option: str, precision: str) -> CacheKind:
    """How the cache holds its numbers: what was asked for, or for "auto" float32 where the arithmetic is float32, else
    float16. Raises UsageError."""
    if option not in get_args(CacheOption):
        raise UsageError(f"kv_cache must be {', '.join(get_args(CacheOption))}, got {option!r}")
    if option == "auto":
        return "f32" if precision == "f32" else "f16"
    return cast(CacheKind, option)


def _exact(x: F32) -> F32:
    return x


class KVCache:
    """Keys and values of one sequence: `length` committed rows, then `pending` rows that a pass appended.

    positions: how many rows it may ever hold. stored: rounds what is written; query: rounds what is compared with the
    keys; float32 [..., head_dim] each, exact by default (models/quantise.py has the rules).
    """

    def __init__(
        self,
        config: ModelConfig,
        positions: int,
        stored: Callable[[F32], F32] = _exact,
        query: Callable[[F32], F32] = _exact,
    ) -> None:
        self.positions = positions
        self.query = query
        self._stored = stored
        self.length = 0
        self.pending = 0
        shape = (config.num_hidden_layers, min(_FIRST, positions), config.num_key_value_heads, config.head_dim)
        self._keys = np.zeros(shape, dtype=np.float32)
        self._values = np.zeros(shape, dtype=np.float32)

    def append(self, rows: int) -> None:
        """Drops pending rows and makes room for new ones. Raises CapacityError, and changes nothing, if they do not
        fit."""
        if self.length + rows > self.positions:
            raise CapacityError(f"{self.length} + {rows} rows do not fit the {self.positions} positions of a slot")
        while self._keys.shape[1] < self.length + rows:
            more = min(self._keys.shape[1], self.positions - self._keys.shape[1])
            widths = ((0, 0), (0, more), (0, 0), (0, 0))
            self._keys, self._values = np.pad(self._keys, widths), np.pad(self._values, widths)
        self.pending = rows

    def drop(self) -> None:
        """Forgets the pending rows."""
        self.pending = 0

    def write(self, layer: int, row: int, key: F32, value: F32) -> None:
        """Stores a pending row's key and value, float32 [kv heads, head_dim]; row counts from the first pending one."""
        self._keys[layer, self.length + row] = self._stored(key)
        self._values[layer, self.length + row] = self._stored(value)

    def read(self, layer: int, at: I64) -> tuple[F32, F32]:
        """Keys and values at these places, float32 [kv heads, n, head_dim] each, contiguous; at: int64 [n]."""
        keys, values = self._keys[layer, at], self._values[layer, at]
        return np.ascontiguousarray(keys.transpose(1, 0, 2)), np.ascontiguousarray(values.transpose(1, 0, 2))

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps these pending rows, ascending, and drops the others. Raises UsageError for rows that are not there."""
        inside = all(0 <= row < self.pending for row in rows)
        if not inside or any(a >= b for a, b in pairwise(rows)):
            raise UsageError(
                f"cannot commit rows {list(rows)[:8]} of {self.pending} pending ones: name some, ascending"
            )
        kept = np.asarray(rows, dtype=np.int64) + self.length
        self._keys[:, self.length : self.length + len(kept)] = self._keys[:, kept]
        self._values[:, self.length : self.length + len(kept)] = self._values[:, kept]
        self.length += len(kept)
        self.pending = 0

    def truncate(self, length: int) -> None:
        """Drops committed rows from `length` on, and the pending ones. Raises RewindError beyond the end."""
        if not 0 <= length <= self.length:
            raise RewindError(f"cannot truncate a slot of {self.length} rows to {length}")
        self.length, self.pending = length, 0

    def fork(self) -> KVCache:
        """An independent copy of the committed rows."""
        copy = KVCache.__new__(KVCache)
        copy.positions, copy.length, copy.pending = self.positions, self.length, 0
        copy.query, copy._stored = self.query, self._stored
        copy._keys, copy._values = self._keys.copy(), self._values.copy()
        return copy
