"""The backend contract on the NumPy oracle: slow, short, and what the native backend is compared with.

Neighbours: base.py is the contract, models/decoder.py computes a row, cache.py is a slot's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..cache import CacheOption, KVCache, cache_kind
from ..config import ModelConfig
from ..models.decoder import Decoder
from ..models.names import expected_tensors, is_matrix
from ..models.quantise import Matrix, Precision, check_precision, matrix, new_cache
from ..types import F32, I64, CapacityError, UsageError
from ..weights.weight_map import WeightMap
from .base import Capacity, Pass, Rows


class CacheSlots:
    """Slots that are KV caches: what the reference's model and its heads have in common of their contracts."""

    capacity: Capacity

    def __init__(self, new_cache: Callable[[], KVCache]) -> None:
        self._new_cache = new_cache
        self._slots: dict[int, KVCache] = {}
        self._parents: dict[int, list[int]] = {}  # of each slot's pending rows

    def new_slot(self) -> int:
        return self._open(self._new_cache())

    def free_slot(self, slot: int) -> None:
        self._slot(slot)
        del self._slots[slot]

    def fork_slot(self, slot: int) -> int:
        return self._open(self._slot(slot).fork())

    def length(self, slot: int) -> int:
        return self._slot(slot).length

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        cache = self._slot(slot)
        parents = self._parents.get(slot, []) if cache.pending else []
        before = -1
        for row in rows:
            if not 0 <= row < len(parents) or parents[row] != before:
                raise UsageError(f"cannot commit rows {list(rows)[:8]}: not a path from the root of the last pass")
            before = row
        cache.commit(rows)

    def truncate(self, slot: int, length: int) -> None:
        self._slot(slot).truncate(length)

    def _open(self, cache: KVCache) -> int:
        for slot in range(self.capacity.slots):
            if slot not in self._slots:
                self._slots[slot] = cache
                return slot
        raise CapacityError(f"all {self.capacity.slots} slots are taken; free one first")

    def _slot(self, slot: int) -> KVCache:
        if slot not in self._slots:
            raise UsageError(f"slot {slot} is not open")
        return self._slots[slot]


class ReferenceBackend(CacheSlots):
    """A model on the oracle. Takes its tensors out of `weights` (canonical names, models/names.py).

    precision: "f32" decodes every tensor; "int8" holds matrices in groups of 32 (exactly, where the file's kind allows
    it) and rounds activations; "bf16" rounds F32 and FP8 matrices to bfloat16 (models/quantise.py). positions: rows a
    slot holds; the model's own limit by default. kv_cache: as NativeBackend's.
    Raises ModelError when a tensor is missing or has the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightMap,
        *,
        precision: Precision = "f32",
        slots: int = 8,
        positions: int | None = None,
        rows: int = 4096,
        kv_cache: CacheOption = "auto",
    ) -> None:
        check_precision(precision)
        kind = self.kv_cache = cache_kind(kv_cache, precision)
        if positions is not None and positions < 1:
            raise UsageError(f"positions must be at least 1, got {positions}")
        self.config = config
        self.capacity = Capacity(slots, positions or config.max_position_embeddings, rows)
        super().__init__(lambda: new_cache(config, self.capacity.positions, kind))
        matrices, vectors = take_weights(config, weights, precision)
        self._decoder = Decoder(config, matrices, vectors)

    @np.errstate(over="ignore", invalid="ignore")  # damaged weights give NaN logits, which sampling reports
    def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Pass:
        self._check(batch, taps)
        logits: list[F32] = []
        tapped: dict[int, list[F32]] = {tap: [] for tap in taps}
        for share in batch:
            cache = self._slots[share.slot]
            parents = _parents(share)
            cache.append(len(share.tokens))
            wanted = range(len(share.tokens)) if share.logits is None else set(share.logits)
            for row, token in enumerate(share.tokens):
                hidden = self._decoder.row(int(token), row, places(cache.length, parents, row), cache)
                if row in wanted:
                    logits.append(self._decoder.logits(hidden[self.config.num_hidden_layers]))
                for tap in taps:
                    tapped[tap].append(hidden[tap])
            self._parents[share.slot] = parents
        return Pass(
            np.stack(logits) if logits else np.zeros((0, self.config.vocab_size), dtype=np.float32),
            {tap: np.stack(rows) for tap, rows in tapped.items()},
        )

    def _check(self, batch: Sequence[Rows], taps: Sequence[int]) -> None:
        """Everything that can be wrong with a pass, before anything changes."""
        if not batch:
            raise UsageError("a pass needs at least one slot")
        if len({share.slot for share in batch}) != len(batch):
            raise UsageError("a slot may appear only once in a pass")
        for tap in taps:
            if not -1 <= tap <= self.config.num_hidden_layers:
                raise UsageError(f"tap {tap} is not in -1 .. {self.config.num_hidden_layers}")
        for share in batch:
            cache, count = self._slot(share.slot), len(share.tokens)
            if count == 0:
                raise UsageError(f"slot {share.slot} has no rows in this pass")
            for token in share.tokens:
                if not isinstance(token, (int, np.integer)) or not 0 <= token < self.config.vocab_size:
                    raise UsageError(f"token id {token!r} is not in 0 .. {self.config.vocab_size - 1}")
            if share.parents is not None and (
                len(share.parents) != count or any(not -1 <= p < i for i, p in enumerate(share.parents))
            ):
                raise UsageError("parents must name an earlier row, or -1, for each row")
            wanted = list(share.logits or ())
            if any(not 0 <= row < count for row in wanted) or wanted != sorted(set(wanted)):
                raise UsageError(f"logits rows must be ascending and in 0 .. {count - 1}")
            if cache.length + count > self.capacity.positions:
                raise CapacityError(
                    f"{cache.length} + {count} rows do not fit the {self.capacity.positions} positions of a slot"
                )
        total = sum(len(share.tokens) for share in batch)
        if total > self.capacity.rows:
            raise CapacityError(f"a pass takes at most {self.capacity.rows} rows, got {total}")


def take_weights(
    config: ModelConfig, weights: WeightMap, precision: Precision
) -> tuple[dict[str, Matrix], dict[str, F32]]:
    """Takes every tensor of the model out of the map: matrices by precision, vectors as float32. Raises ModelError."""
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, F32] = {}
    for name, shape in expected_tensors(config).items():
        tensor = weights.take_shaped(name, shape)
        if len(shape) == 1:
            vectors[name] = tensor.f32()
        else:
            matrices[name] = matrix(tensor, precision if is_matrix(name, shape) else "f32", name)
    return matrices, vectors


def _parents(share: Rows) -> list[int]:
    return list(range(-1, len(share.tokens) - 1)) if share.parents is None else list(share.parents)


def places(length: int, parents: Sequence[int], row: int) -> I64:
    """The cache places, int64 [n], that a pending row attends by position: committed rows, its ancestors, itself."""
    path = []
    while row >= 0:
        path.append(length + row)
        row = parents[row]
    return np.array([*range(length), *reversed(path)], dtype=np.int64)
