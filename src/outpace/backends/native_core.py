"""What a model and a learned head have in common in the C++ core (csrc/, built as outpace._native): slots, weights,
errors.

Neighbours: native.py and native_head.py build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np

from ..config import ModelConfig
from ..models.names import is_matrix
from ..models.quantise import Precision, held
from ..models.rotary import rotary_frequencies
from ..types import CapacityError, OutpaceError, RewindError, UsageError
from ..weights.relaid import Part, Relaid
from ..weights.tensor import Groups, Supers
from ..weights.weight_map import WeightMap

try:
    from .. import _native as _native
except ImportError as error:
    raise OutpaceError(
        f"outpace's native core is missing or damaged ({error}); build it with: pip install . (this needs g++)"
    ) from None

T = TypeVar("T")
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


class NativeStack:
    """Slots of a model or a head in the core; the methods of Backend and HeadBackend that both share."""

    _core: _native.Stack

    def _place(self, relaid: Relaid | None, layout: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
        """Gives the core the weights that are kept already laid out. False, and nothing given, where there are none
        or they do not fit."""
        parts = relaid.read(layout) if relaid is not None else None
        if parts is None:
            return False
        found = {part.name: part for part in parts}
        if len(parts) != len(found) or found.keys() != expected.keys():
            return False
        try:
            for name, shape in expected.items():
                part = found[name]
                if len(shape) == 1 and not part.form and part.data.nbytes == 4 * shape[0]:
                    self._core.put_vector(name, part.data.view(np.float32))
                elif part.form[1:3] == shape:
                    self._core.put_packed(name, part.form, part.data)
                else:
                    raise ValueError(f"tensor {name} has another shape")
            self._core.ready()
        except (ValueError, TypeError):
            self._core.forget()
            return False
        return True

    def _keep(self, relaid: Relaid | None, layout: str) -> None:
        """Keeps the weights as they are laid out now, for the next start."""
        if relaid is not None:
            relaid.write(layout, [Part(name, tuple(form), data) for name, form, data in self._core.packed()])

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that the weights and the cache hold now."""
        return self._core.weight_bytes, self._core.cache_bytes

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads."""
        return self._core.pass_bytes

    def new_slot(self) -> int:
        return guard(self._core.new_slot)

    def free_slot(self, slot: int) -> None:
        guard(lambda: self._core.free_slot(index(slot)))

    def fork_slot(self, slot: int) -> int:
        return guard(lambda: self._core.fork_slot(index(slot)))

    def length(self, slot: int) -> int:
        return guard(lambda: self._core.length(index(slot)))

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        guard(lambda: self._core.commit(index(slot), [index(row) for row in rows]))

    def truncate(self, slot: int, length: int) -> None:
        held = self.length(slot)
        if not 0 <= length <= held:
            raise RewindError(f"cannot truncate slot {slot} to {length}: it holds {held} rows")
        guard(lambda: self._core.truncate(index(slot), index(length)))


def core_config(config: ModelConfig) -> _native.Config:
    """The sizes of decoder layers as the core takes them."""
    frequencies, factor = rotary_frequencies(config)
    layers = range(config.num_hidden_layers)
    return _native.Config(
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
    )


def check_sizes(**sizes: int) -> None:
    """Raises UsageError, naming it, for one of slots, positions, rows and threads that is out of range."""
    most = {"slots": 2**20, "positions": 2**30, "rows": 2**20, "threads": 256}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most[name]:
            raise UsageError(f"{name} must be a whole number in 1 .. {most[name]}, got {value!r}")


def put(core: _native.Stack, name: str, shape: tuple[int, ...], weights: WeightMap, precision: Precision) -> None:
    """Hands one tensor to the core, which keeps its own copy; the source is let go at once."""
    tensor = weights.take_shaped(name, shape)
    if len(shape) == 1:
        vector = np.ascontiguousarray(tensor.f32())
        guard(lambda: core.put_vector(name, vector))
        return
    weights_held = held(tensor, precision if is_matrix(name, shape) else "f32", name)
    if isinstance(weights_held, Supers):
        w = weights_held
        guard(lambda: core.put_super(name, w.kind, w.q, w.d, w.scale, w.dmin, w.minimum))
    elif isinstance(weights_held, Groups):
        g = weights_held
        guard(lambda: core.put_int8(name, g.q, g.scale, g.offset, shape[1]))
    elif weights_held.kind == "F32":
        matrix = weights_held.f32()
        guard(lambda: core.put_f32(name, matrix))
    else:
        kind, halves = weights_held.kind.lower(), weights_held.halves()
        guard(lambda: core.put_16(name, kind, halves))


def guard(call: Callable[[], T]) -> T:
    """Runs a call into the core and gives its errors their types."""
    try:
        return call()
    except _native.Full as error:
        raise CapacityError(str(error)) from None
    except MemoryError:
        raise CapacityError("not enough memory for model and cache; use fewer slots or a smaller model") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def index(value: int) -> int:
    """A whole number that fits the core's integers; what does not fit becomes -2, which no check lets through."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise UsageError(f"expected a whole number, got {value!r}") from None
    return number if -(2**31) <= number < 2**31 else -2


def indices(values: object) -> Indices:
    """Whole numbers of an iterable as the core takes them."""
    return np.fromiter((index(value) for value in values), dtype=np.int64)  # type: ignore[attr-defined]


class Share(Protocol):
    """What Rows and HeadRows have in common."""

    @property
    def slot(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int] | None: ...
    @property
    def logits(self) -> Sequence[int] | None: ...


S = TypeVar("S", bound=Share)


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a pass as the core takes them; int64 arrays, wanted counted over the whole pass."""

    slots: list[int]
    counts: list[int]
    tokens: Indices
    parents: Indices
    wanted: Indices


def lay_out(batch: Sequence[S], most: int, chain_of: Callable[[S, int], Sequence[int]]) -> Layout:
    """chain_of: the parents of a share's rows where it names none. Raises CapacityError for more than `most` rows,
    UsageError for what does not fit together."""
    counts = [len(share.tokens) for share in batch]
    if sum(counts) > most:
        raise CapacityError(f"a pass takes at most {most} rows, got {sum(counts)}")
    wanted: list[int] = []
    start = 0
    for share, count in zip(batch, counts, strict=True):
        rows = range(count) if share.logits is None else share.logits
        if share.logits is not None and any(not 0 <= row < count for row in rows):
            raise UsageError(f"logits rows must be ascending and in 0 .. {count - 1}")
        wanted.extend(start + row for row in rows)
        start += count
    parents = (
        chain_of(share, count) if share.parents is None else _as_many(share.parents, count)
        for share, count in zip(batch, counts, strict=True)
    )
    return Layout(
        [index(share.slot) for share in batch],
        counts,
        indices(chain.from_iterable(share.tokens for share in batch)),
        indices(chain.from_iterable(parents)),
        indices(wanted),
    )


def _as_many(parents: Sequence[int], count: int) -> Sequence[int]:
    if len(parents) != count:
        raise UsageError(f"parents must name an earlier row, or -1, for each row: {count} rows, {len(parents)} parents")
    return parents
