"""A backend's slots, kept after their text has ended: the next text that begins the same way starts from there.

Neighbours: engine.py opens the target's slots here, drafters/draft_model.py those of its own model.
"""

from __future__ import annotations

from collections.abc import Sequence

from .backends.base import Backend
from .types import CapacityError, RewindError


class SlotPool:
    """Opens and closes slots of one backend. Idle slots together hold at most one context's worth of tokens."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._idle: dict[int, list[int]] = {}  # the tokens that each idle slot holds, least recently used first

    def open(self, tokens: Sequence[int], *, reuse: bool = True) -> tuple[int, int]:
        """A slot for a text, and how many of these tokens it already holds (all of them at most).

        reuse False: an empty slot. Raises CapacityError when every slot is in use.
        """
        shared = {slot: common_prefix(held, tokens) for slot, held in self._idle.items()} if reuse else {}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is not None and shared[best] > 0:
            found = self._continue(best, shared[best])
            if found is not None:
                return found, shared[best]
        while True:
            try:
                return self.backend.new_slot(), 0
            except CapacityError:
                if not self._idle:
                    raise
                self._evict()

    def _continue(self, slot: int, length: int) -> int | None:
        """The idle slot cut back to `length` tokens; a copy of it where that would lose a text that may go on."""
        held = self._idle.pop(slot)
        if length < len(held):
            try:
                copy = self.backend.fork_slot(slot)
                self._idle[slot] = held  # most recently used
                slot = copy
            except CapacityError:
                if self._idle:  # the oldest makes room, this one stays
                    self._evict()
                    self._idle[slot] = held
                    slot = self.backend.fork_slot(slot)
        try:
            self.backend.truncate(slot, length)
        except RewindError:  # a state that cannot go back: of no use for this text
            self.drop(slot)
            return None
        return slot

    def close(self, slot: int, tokens: Sequence[int]) -> None:
        """The text has ended; the slot holds (at least) the first of these tokens and is kept for the next one."""
        self._idle[slot] = list(tokens[: self.backend.length(slot)])
        while sum(map(len, self._idle.values())) > self.backend.capacity.positions:
            self._evict()

    def drop(self, slot: int) -> None:
        """Frees a slot whose contents are of no use."""
        self.backend.free_slot(slot)

    def clear(self) -> bool:
        """Frees all idle slots; False when there were none."""
        found = bool(self._idle)
        while self._idle:
            self._evict()
        return found

    def _evict(self) -> None:
        slot = next(iter(self._idle))
        del self._idle[slot]
        self.backend.free_slot(slot)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two sequences share from the start."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):  # the usual case, compared at once
        return n
    return next(i for i in range(n) if a[i] != b[i])
