"""The CPU backend: the whole forward pass in one call of the C++ core (csrc/, built as outpace._native).

Neighbours: base.py is the contract, models/names.py lists the tensors, models/quantise.py holds the int8 rules that the
core follows and models/decoder.py the mathematics. This module hands the weights over, one at a time, and turns a batch
into arrays; every check of a pass is made once, in C++, before anything changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from ..cache import CacheOption, cache_kind
from ..config import ModelConfig
from ..models.names import expected_tensors, is_matrix
from ..models.quantise import Precision, check_precision, held
from ..models.rotary import rotary_frequencies
from ..types import F32, CapacityError, ModelError, OutpaceError, RewindError, UsageError
from ..weights.relaid import Part, Relaid
from ..weights.tensor import Groups, Supers
from ..weights.weight_map import WeightMap
from .base import Capacity, Pass, Rows
from .cores import usable_cores

try:
    from .. import _native
except ImportError as error:
    raise OutpaceError(
        f"outpace's native core is missing or damaged ({error}); build it with: pip install . (this needs g++)"
    ) from None

STAGES = ("rest", "projections", "attention", "mlp", "head")  # as StageClock in csrc/measure.h
T = TypeVar("T")


class NativeBackend:
    """A model on this machine's processor. Takes its tensors out of `weights` (canonical names, models/names.py).

    precision: "int8" holds matrices in groups of 32 (exactly, where the file's kind allows it; rounded otherwise) and
    rounds activations to 8 bits; "f32" keeps everything in float32; "bf16" holds matrices in 2 bytes a weight and
    computes as "f32" does (models/quantise.py, held_kind). slots: sequences at once. positions: tokens a slot
    holds; the model's own limit by default. rows: rows a pass takes. threads: 1 to 256; None: the usable cores. Memory
    for the cache grows with use. kv_cache: how keys and values are held: "f32", "f16", "q8" (8 bits in groups of 32, a
    quarter of f32's memory), or "auto": f32 with precision "f32", else f16. The environment variable OUTPACE_ISA forces
    a kernel family (avx512vnni, avxvnni, avx2, neon, portable). relaid: where the weights are kept as the kernels read
    them; but for "f32" they are mapped from there, or written there for the next time. The results are the same, bit by
    bit.

    Raises UsageError for an argument out of range or a family that cannot run here, ModelError when a tensor is missing
    or has the wrong shape, CapacityError when memory does not suffice.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightMap,
        *,
        precision: Precision = "int8",
        slots: int = 8,
        positions: int | None = None,
        rows: int = 512,
        threads: int | None = None,
        kv_cache: CacheOption = "auto",
        relaid: Relaid | None = None,
    ) -> None:
        check_precision(precision)
        self.kv_cache = cache_kind(kv_cache, precision)
        threads = usable_cores() if threads is None else threads
        positions = config.max_position_embeddings if positions is None else positions
        for name, value, most in (
            ("slots", slots, 2**20),
            ("positions", positions, 2**30),
            ("rows", rows, 2**20),
            ("threads", threads, 256),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UsageError(f"{name} must be a whole number in 1 .. {most}, got {value!r}")
        self.config = config
        self.capacity = Capacity(slots, positions, rows)
        frequencies, factor = rotary_frequencies(config)
        layers = range(config.num_hidden_layers)
        self._model = _guard(
            lambda: _native.Model(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                layers=config.num_hidden_layers,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
                tied=config.tie_word_embeddings,
                qk_norm=config.qk_norm,
                experts=config.num_experts,
                experts_used=config.num_experts_used,
                expert_ffn_size=config.expert_ffn_size,
                shared_ffn_size=config.shared_expert_ffn_size,
                expert_scale=config.expert_weights_scale,
                norm_topk=config.norm_topk_prob,
                windows=[min(config.window(layer) or 0, 2**30) for layer in layers],
                moe=[int(config.is_moe(layer)) for layer in layers],
                frequencies=frequencies.tolist(),
                rotary_factor=factor,
                slots=slots,
                positions=positions,
                rows=rows,
                threads=threads,
                cache=self.kv_cache,
            )
        )
        expected = expected_tensors(config)
        relaid = None if precision == "f32" else relaid
        layout = f"{_native.LAYOUT} {precision} {_native.unsigned_bytes()} {sys.byteorder} {config!r}"
        kept = relaid.read(layout) if relaid is not None else None
        if kept is not None and self._place(kept, expected):
            weights.clear()
            return
        for name, shape in expected.items():
            self._put(name, shape, weights, precision)
        _guard(self._model.ready)
        if relaid is not None:
            relaid.write(layout, [Part(name, tuple(form), data) for name, form, data in self._model.packed()])

    @property
    def isa(self) -> str:
        """The kernel family in use."""
        return self._model.isa

    @property
    def threads(self) -> int:
        return self._model.threads

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that the weights and the cache hold now."""
        return self._model.weight_bytes, self._model.cache_bytes

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads."""
        return self._model.pass_bytes

    def time_stages(self, on: bool) -> dict[str, float]:
        """Starts (or ends) the timing of the stages of passes, from zero; returns each stage's seconds so far."""
        return dict(zip(STAGES, self._model.time_stages(on), strict=True))

    def fill_slot(self, slot: int, length: int) -> None:
        """For benchmarks: makes an empty slot hold `length` positions of random keys and values, in a moment."""
        _guard(lambda: self._model.fill_slot(_index(slot), _index(length)))

    def new_slot(self) -> int:
        return _guard(self._model.new_slot)

    def free_slot(self, slot: int) -> None:
        _guard(lambda: self._model.free_slot(_index(slot)))

    def fork_slot(self, slot: int) -> int:
        return _guard(lambda: self._model.fork_slot(_index(slot)))

    def length(self, slot: int) -> int:
        return _guard(lambda: self._model.length(_index(slot)))

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        _guard(lambda: self._model.commit(_index(slot), [_index(row) for row in rows]))

    def truncate(self, slot: int, length: int) -> None:
        held = self.length(slot)
        if not 0 <= length <= held:
            raise RewindError(f"cannot truncate slot {slot} to {length}: it holds {held} rows")
        _guard(lambda: self._model.truncate(_index(slot), _index(length)))

    def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Pass:
        counts = [len(share.tokens) for share in batch]
        total = sum(counts)
        if total > self.capacity.rows:
            raise CapacityError(f"a pass takes at most {self.capacity.rows} rows, got {total}")
        wanted: list[int] = []
        start = 0
        for share, count in zip(batch, counts, strict=True):
            rows = range(count) if share.logits is None else share.logits
            if share.logits is not None and any(not 0 <= row < count for row in rows):
                raise UsageError(f"logits rows must be ascending and in 0 .. {count - 1}")
            wanted.extend(start + row for row in rows)
            start += count
        tokens = _indices(chain.from_iterable(share.tokens for share in batch))
        parents = _indices(
            chain.from_iterable(
                range(-1, count - 1) if share.parents is None else _parents(share.parents, count)
                for share, count in zip(batch, counts, strict=True)
            )
        )
        taps = [_index(tap) for tap in taps]
        try:
            logits: F32 = np.empty((len(wanted), self.config.vocab_size), dtype=np.float32)
            tapped: F32 = np.empty((len(taps), total, self.config.hidden_size), dtype=np.float32)
        except MemoryError:
            raise CapacityError("not enough memory for the results of a pass; take fewer rows") from None
        slots = [_index(share.slot) for share in batch]
        _guard(
            lambda: self._model.forward(slots, counts, tokens, parents, _indices(wanted), logits, list(taps), tapped)
        )
        return Pass(logits, {tap: tapped[i] for i, tap in enumerate(taps)})

    def _place(self, parts: Sequence[Part], expected: Mapping[str, tuple[int, ...]]) -> bool:
        """Gives the core weights that are laid out already. False, and nothing given, when they do not fit."""
        found = {part.name: part for part in parts}
        if len(parts) != len(found) or found.keys() != expected.keys():
            return False
        try:
            for name, shape in expected.items():
                part = found[name]
                if len(shape) == 1 and not part.form and part.data.nbytes == 4 * shape[0]:
                    self._model.put_vector(name, part.data.view(np.float32))
                elif part.form[1:3] == shape:
                    self._model.put_packed(name, part.form, part.data)
                else:
                    raise ValueError(f"tensor {name} has another shape")
            self._model.ready()
        except (ValueError, TypeError):
            self._model.forget()
            return False
        return True

    def _put(self, name: str, shape: tuple[int, ...], weights: WeightMap, precision: Precision) -> None:
        """Hands one tensor to the core, which keeps its own copy; the source is let go at once."""
        if not weights.has(name):
            raise ModelError(f"tensor {name} is missing")
        tensor = weights.take_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if len(shape) == 1:
            vector = np.ascontiguousarray(tensor.f32())
            _guard(lambda: self._model.put_vector(name, vector))
            return
        weights_held = held(tensor, precision if is_matrix(name, shape) else "f32", name)
        if isinstance(weights_held, Supers):
            w = weights_held
            _guard(lambda: self._model.put_super(name, w.kind, w.q, w.d, w.scale, w.dmin, w.minimum))
        elif isinstance(weights_held, Groups):
            g = weights_held
            _guard(lambda: self._model.put_int8(name, g.q, g.scale, g.offset, shape[1]))
        elif weights_held.kind == "F32":
            matrix = weights_held.f32()
            _guard(lambda: self._model.put_f32(name, matrix))
        else:
            kind, halves = weights_held.kind.lower(), weights_held.halves()
            _guard(lambda: self._model.put_16(name, kind, halves))


def _guard(call: Callable[[], T]) -> T:
    """Runs a call into the core and gives its errors their types."""
    try:
        return call()
    except _native.Full as error:
        raise CapacityError(str(error)) from None
    except MemoryError:
        raise CapacityError("not enough memory for model and cache; use fewer slots or a smaller model") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _index(value: int) -> int:
    """A whole number that fits the core's integers; what does not fit becomes -2, which no check lets through."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise UsageError(f"expected a whole number, got {value!r}") from None
    return number if -(2**31) <= number < 2**31 else -2


def _indices(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter((_index(value) for value in values), dtype=np.int64)  # type: ignore[attr-defined]


def _parents(parents: Sequence[int], count: int) -> Sequence[int]:
    if len(parents) != count:
        raise UsageError(f"parents must name an earlier row, or -1, for each row: {count} rows, {len(parents)} parents")
    return parents
