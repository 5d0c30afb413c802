"""The contract of a learned head that runs, as base.py is that of a model: passes over rows of several slots.

Slot s of a head's cache pairs the target's feature at position s (its tapped hidden states) with the token at s + 1
(dflash: the feature alone). As with models, a pass appends rows without settling them, `commit` keeps a path of them,
`truncate` rolls back, and a row's result has the same bits whatever its company. heads/config.py describes heads,
heads/reference.py says how they compute; native_head.py and reference_head.py are the two that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..heads.config import HeadConfig
from ..types import F32, I64
from .base import Capacity


@dataclass(frozen=True, slots=True)
class HeadRows:
    """One slot's share of a pass of an mtp or eagle3 head.

    tokens: n >= 1 ids of the target. states: float32 [n, feature_width], the target's tapped states side by side, in
    the order of config.taps; own: float32 [n, H] instead, the hidden states that earlier rows of this head gave.
    append: the rows stand behind the slot's pending ones, which stay; else pending rows are dropped first. parents: for
    each row the row before it, counted from the slot's first pending row, -1 for its committed end; None means a chain,
    that goes on from the last pending row. logits: rows of this share (ascending) whose results are wanted; None means
    all.
    """

    slot: int
    tokens: Sequence[int]
    states: F32
    own: bool = False
    append: bool = False
    parents: Sequence[int] | None = None
    logits: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class HeadPass:
    """Results of the wanted rows, in the order of the batch.

    logits: float32 [wanted, draft vocabulary]. hidden: float32 [wanted, H], what `HeadRows.own` takes.
    """

    logits: F32
    hidden: F32


class HeadBackend(Protocol):
    """A loaded head. Not thread-safe. Errors as those of Backend.

    d2t: int64 [draft vocabulary], ascending ids of the target; None where the vocabularies are the same.
    """

    config: HeadConfig
    d2t: I64 | None
    capacity: Capacity

    def new_slot(self) -> int:
        """As Backend.new_slot."""

    def free_slot(self, slot: int) -> None:
        """As Backend.free_slot."""

    def fork_slot(self, slot: int) -> int:
        """As Backend.fork_slot."""

    def length(self, slot: int) -> int:
        """Committed rows of a slot."""

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Keeps these pending rows (counted from the first one; a path from the root) and drops the others."""

    def truncate(self, slot: int, length: int) -> None:
        """Drops committed rows from `length` on, and all pending ones."""

    def forward(self, batch: Sequence[HeadRows]) -> HeadPass:
        """mtp and eagle3: one pass over all rows of the batch, each slot at most once. Raises CapacityError when rows
        or positions do not fit, UsageError for shapes that do not."""

    def read(self, slot: int, features: F32) -> None:
        """dflash: commits rows for features float32 [n, feature_width]; at most capacity.rows of them."""

    def block(self, slots: Sequence[int], anchors: Sequence[int], rows: int | None = None) -> HeadPass:
        """dflash: for each slot the block that begins with its anchor, the newest token: `rows` rows (the block size by
        default), those of one slot after those of another. logits: without the Markov bias. Nothing stays pending."""

    def markov(self, before: int, hidden: F32, state: F32) -> tuple[F32, F32]:
        """dflash: the bias [draft vocabulary] on a row's logits by the token before its guess, and the state [R] for
        the next row; zeros to begin with. hidden: float32 [H], the row's."""

    def confidence(self, before: int, hidden: F32) -> float | None:
        """dflash: the head's own estimate that a row's guess is kept; None where it has none."""
