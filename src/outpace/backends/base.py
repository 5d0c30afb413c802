"""The backend contract: a model that runs passes over rows of several slots, with its KV cache as a transaction.

A *slot* holds one sequence's state. A *pass* reads the weights once and computes rows of any number of slots: a prompt
chunk of one, a token and its draft of another. A pass *appends* its rows to each slot without settling them; `commit`
keeps the rows that verification accepted and the next pass simply starts from there, so that rolling back is free:
rows never committed are forgotten. A slot's state need not be a KV cache: a backend with recurrent layers keeps the
state before and after each pending row and settles it in `commit`; what it cannot do (rewind behind the committed
end) it refuses in `truncate` with RewindError.

Every backend promises that a row's result has the same bits whatever the other rows of the pass, the number of
threads and the chunking of the prompt: losslessness rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import ModelConfig
from ..types import F32


@dataclass(frozen=True, slots=True)
class Rows:
    """One slot's share of a pass.

    tokens: n >= 1 ids. parents: for each row the row before it in this share, -1 for the slot's committed end; None
    means a chain. A row's position is the slot's length plus its depth, and it attends the committed rows and its own
    ancestors. logits: the rows (indices, ascending) whose logits are wanted; None means all.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logits: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass computed, in the order of the batch.

    logits: float32 [wanted rows, vocab_size]. taps: tap -> float32 [all rows, hidden_size].
    """

    logits: F32
    taps: Mapping[int, F32]


@dataclass(frozen=True, slots=True)
class Capacity:
    """slots: sequences at once. positions: tokens a slot can hold. rows: rows a pass can take."""

    slots: int
    positions: int
    rows: int


class Backend(Protocol):
    """A loaded model. Not thread-safe: one caller at a time.

    Every method raises UsageError for a slot that is not open or a token id out of range, before anything changes.
    """

    config: ModelConfig
    capacity: Capacity

    def new_slot(self) -> int:
        """Opens an empty slot and returns its handle. Raises CapacityError when all are taken."""

    def free_slot(self, slot: int) -> None:
        """Closes a slot and returns its memory."""

    def fork_slot(self, slot: int) -> int:
        """A new slot with the same committed rows; the two are independent from here on."""

    def length(self, slot: int) -> int:
        """Committed rows of a slot."""

    def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Pass:
        """One pass over all rows of the batch (each slot at most once).

        Pending rows of these slots that were never committed are dropped first. taps: hidden states wanted for every
        row: i in 0 .. num_hidden_layers-1 is the output of layer i (Hugging Face's hidden_states[i + 1]),
        num_hidden_layers the output of the final norm, -1 the embedding. Raises CapacityError when the rows or the
        positions do not fit.
        """

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Keeps these pending rows (indices into the slot's share of the last pass; a path from the root, in order;
        may be empty) and drops the others."""

    def truncate(self, slot: int, length: int) -> None:
        """Drops committed rows from `length` on. Raises RewindError where the state cannot go back that far."""
