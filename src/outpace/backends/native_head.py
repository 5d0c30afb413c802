"""A learned head in the C++ core, on the threads of its target and, where it brings none, with its embedding and head.

Neighbours: head.py is the contract, heads/config.py describes heads and their tensors, heads/reference.py how they
compute; csrc/head.cpp does it. The head's cache is of the same kind as the target's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence

import numpy as np

from ..heads.config import HeadConfig, head_tensors
from ..models.names import HEAD
from ..models.quantise import HeadPrecision, Precision, check_precision
from ..types import F32, I64, UsageError
from ..weights.relaid import Relaid
from ..weights.weight_map import WeightMap
from .base import Capacity
from .head import HeadPass, HeadRows
from .native import NativeBackend
from .native_core import NativeStack, _native, check_sizes, core_config, guard, index, lay_out, put


class NativeHead(NativeStack):
    """A HeadBackend on this machine's processor. Takes its tensors out of `weights` (heads/config.py, head_tensors).

    target: the model that it drafts for. d2t: int64 [draft vocabulary], ascending target ids, None where the
    vocabularies are the same; a head with a reduced vocabulary brings its own lm_head.weight. precision: of all, or of
    the layers and of lm_head. slots, positions, rows, relaid: as NativeBackend; slots and positions of the target by
    default. weights may be a function that gives them, called only where nothing is kept in relaid.

    Raises UsageError for an argument out of range, ModelError when a tensor is missing or has the wrong shape,
    CapacityError when memory does not suffice.
    """

    def __init__(
        self,
        target: NativeBackend,
        config: HeadConfig,
        weights: WeightMap | Callable[[], WeightMap],
        d2t: I64 | None = None,
        *,
        precision: Precision | HeadPrecision = "int8",
        slots: int | None = None,
        positions: int | None = None,
        rows: int = 256,
        relaid: Relaid | None = None,
    ) -> None:
        precision = precision if isinstance(precision, tuple) else (precision, precision)
        for each in precision:
            check_precision(each)
        slots = target.capacity.slots if slots is None else slots
        positions = target.capacity.positions if positions is None else positions
        check_sizes(slots=slots, positions=positions, rows=rows)
        if (d2t is None) != (config.draft_vocab_size == config.layers.vocab_size):
            raise UsageError("d2t is needed where the draft vocabulary is not the target's, and only there")
        self.config = config
        self.d2t = d2t
        self.capacity = Capacity(slots, positions, rows)
        self._core: _native.Head = guard(
            lambda: _native.Head(
                target.core,
                core_config(config.layers),
                _shape(config),
                slots=slots,
                positions=positions,
                rows=rows,
                cache=target.kv_cache,
            )
        )
        expected = head_tensors(config)
        relaid = None if precision[0] == "f32" else relaid
        ids = b"" if d2t is None else np.ascontiguousarray(d2t, np.int64).tobytes()
        which = f"{config!r} {hashlib.sha256(ids).hexdigest()}"
        layout = f"head {_native.LAYOUT} {precision} {_native.unsigned_bytes()} {sys.byteorder} {which}"
        if self._place(relaid, layout, expected):
            return
        weights = weights if isinstance(weights, WeightMap) else weights()
        for name, shape in expected.items():
            put(self._core, name, shape, weights, precision[name == HEAD])
        guard(self._core.ready)
        self._keep(relaid, layout)

    def forward(self, batch: Sequence[HeadRows]) -> HeadPass:
        """As HeadBackend.forward."""
        rows = lay_out(batch, self.capacity.rows, self._chain)
        states: tuple[list[F32], list[F32]] = [], []
        for share, count in zip(batch, rows.counts, strict=True):
            states[share.own].append(self._states(share, count))
        result = self._results(len(rows.wanted))
        guard(
            lambda: self._core.forward(
                rows.slots,
                rows.counts,
                rows.tokens,
                rows.parents,
                [share.append for share in batch],
                [share.own for share in batch],
                _joined(states[False], self.config.feature_width),
                _joined(states[True], self.config.layers.hidden_size),
                rows.wanted,
                result.logits,
                result.hidden,
            )
        )
        return result

    def _chain(self, share: HeadRows, count: int) -> range:
        """The parents of a chain behind the slot's committed end or, with append, behind its last pending row."""
        start = guard(lambda: self._core.pending(index(share.slot))) if share.append else 0
        return range(start - 1, start + count - 1)

    def _states(self, share: HeadRows, count: int) -> F32:
        width = self.config.layers.hidden_size if share.own else self.config.feature_width
        if share.states.shape != (count, width):
            raise UsageError(f"states must be [{count} tokens, {width}], got {list(share.states.shape)}")
        return np.ascontiguousarray(share.states, dtype=np.float32)

    def _results(self, rows: int) -> HeadPass:
        logits: F32 = np.empty((rows, self.config.draft_vocab_size), dtype=np.float32)
        return HeadPass(logits, np.empty((rows, self.config.layers.hidden_size), dtype=np.float32))

    def read(self, slot: int, features: F32) -> None:
        """As HeadBackend.read."""
        guard(lambda: self._core.read(index(slot), np.ascontiguousarray(features, dtype=np.float32)))

    def block(self, slots: Sequence[int], anchors: Sequence[int], rows: int | None = None) -> HeadPass:
        """As HeadBackend.block."""
        rows = self.config.block_size if rows is None else index(rows)
        result = self._results(len(slots) * max(0, min(rows, self.config.block_size)))
        at, tokens = [index(slot) for slot in slots], [index(anchor) for anchor in anchors]
        guard(lambda: self._core.block(at, tokens, rows, result.logits, result.hidden))
        return result

    def markov(self, before: int, hidden: F32, state: F32) -> tuple[F32, F32]:
        """As HeadBackend.markov."""
        self._check_token(before)
        bias: F32 = np.zeros(self.config.draft_vocab_size, dtype=np.float32)
        if self.config.markov == "none":
            return bias, state
        state = np.array(state, dtype=np.float32)
        guard(lambda: self._core.markov(index(before), np.ascontiguousarray(hidden, np.float32), state, bias))
        return bias, state

    def confidence(self, before: int, hidden: F32) -> float | None:
        """As HeadBackend.confidence."""
        self._check_token(before)
        if self.config.confidence == "none":
            return None
        return guard(lambda: self._core.confidence(index(before), np.ascontiguousarray(hidden, np.float32)))

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.config.layers.vocab_size:
            raise UsageError(f"token id {token} is not in 0 .. {self.config.layers.vocab_size - 1}")


def _joined(parts: Sequence[F32], width: int) -> F32:
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty((0, width), np.float32)])


def _shape(config: HeadConfig) -> dict[str, object]:
    """What csrc/head.h calls HeadShape."""
    return {
        "algorithm": config.algorithm,
        "taps": len(config.taps),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "embedding_first": config.concat == "embedding_first",
        "feature_norm": config.feature_norm,
        "block_size": config.block_size,
        "mask_token": config.mask_token,
        "causal_windows": config.algorithm == "dflash" and not config.sliding_window_non_causal,
        "markov": config.markov,
        "markov_rank": config.markov_rank,
        "confidence": config.confidence != "none",
        "confidence_reads_markov": config.confidence == "hidden_markov",
    }
