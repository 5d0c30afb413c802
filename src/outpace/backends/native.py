"""The CPU backend: the whole forward pass in one call of the C++ core (csrc/, built as outpace._native).

Neighbours: base.py is the contract, models/names.py lists the tensors, models/quantise.py holds the int8 rules that the
core follows and models/decoder.py the mathematics. This module hands the weights over, one at a time, and turns a batch
into arrays; every check of a pass is made once, in C++, before anything changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from ..cache import CacheOption, cache_kind
from ..config import ModelConfig
from ..models.names import expected_tensors
from ..models.quantise import Precision, check_precision
from ..types import F32, CapacityError
from ..weights.relaid import Relaid
from ..weights.weight_map import WeightMap
from .base import Capacity, Pass, Rows
from .cores import usable_cores
from .memory import precision_of_heads
from .native_core import NativeStack, _native, check_sizes, core_config, guard, index, lay_out, put

STAGES = ("rest", "projections", "attention", "mlp", "head")  # as StageClock in csrc/measure.h


class NativeBackend(NativeStack):
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
        self.precision = precision
        self.kv_cache = cache_kind(kv_cache, precision)
        threads = usable_cores() if threads is None else threads
        positions = config.max_position_embeddings if positions is None else positions
        check_sizes(slots=slots, positions=positions, rows=rows, threads=threads)
        self.config = config
        self.capacity = Capacity(slots, positions, rows)
        self._core: _native.Model = guard(
            lambda: _native.Model(
                core_config(config), slots=slots, positions=positions, rows=rows, threads=threads, cache=self.kv_cache
            )
        )
        expected = expected_tensors(config)
        # What a head beside this model is held in: asked before the weights are gone.
        self.head_precision = precision_of_heads(config, weights, precision)
        relaid = None if precision == "f32" else relaid
        layout = f"{_native.LAYOUT} {precision} {_native.unsigned_bytes()} {sys.byteorder} {config!r}"
        if self._place(relaid, layout, expected):
            weights.clear()
            return
        for name, shape in expected.items():
            put(self._core, name, shape, weights, precision)
        guard(self._core.ready)
        self._keep(relaid, layout)

    @property
    def core(self) -> _native.Model:
        """The model in the core, for a head that shares its threads, embedding and head."""
        return self._core

    @property
    def isa(self) -> str:
        """The kernel family in use."""
        return self._core.isa

    @property
    def threads(self) -> int:
        return self._core.threads

    def time_stages(self, on: bool) -> dict[str, float]:
        """Starts (or ends) the timing of the stages of passes, from zero; returns each stage's seconds so far."""
        return dict(zip(STAGES, self._core.time_stages(on), strict=True))

    def fill_slot(self, slot: int, length: int) -> None:
        """For benchmarks: makes an empty slot hold `length` positions of random keys and values, in a moment."""
        guard(lambda: self._core.fill_slot(index(slot), index(length)))

    def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Pass:
        rows = lay_out(batch, self.capacity.rows, lambda share, count: range(-1, count - 1))
        taps = [index(tap) for tap in taps]
        try:
            logits: F32 = np.empty((len(rows.wanted), self.config.vocab_size), dtype=np.float32)
            tapped: F32 = np.empty((len(taps), len(rows.tokens), self.config.hidden_size), dtype=np.float32)
        except MemoryError:
            raise CapacityError("not enough memory for the results of a pass; take fewer rows") from None
        guard(
            lambda: self._core.forward(
                rows.slots, rows.counts, rows.tokens, rows.parents, rows.wanted, logits, list(taps), tapped
            )
        )
        return Pass(logits, {tap: tapped[i] for i, tap in enumerate(taps)})
