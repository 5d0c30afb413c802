"""A backend's slots: a text that begins as another one, running or ended, starts from what that one's slot holds.

Neighbours: engine.py opens the target's slots here, drafters with a model or head those of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TypeVar

from .backends.base import Backend
from .backends.head import HeadBackend
from .types import CapacityError, RewindError, UsageError

T = TypeVar("T")


class SlotPool:
    """Opens and closes slots of a model or a head. Idle slots together hold at most one context's worth of tokens.

    Every slot is the pool's, from the line that opens it: it is either some owner's (any hashable object, one slot
    each) or idle. So Ctrl-C between any two lines loses none, when `close` or `drop` is called for the owner after it.
    """

    def __init__(self, backend: Backend | HeadBackend) -> None:
        self.backend = backend
        self._used: dict[Hashable, int] = {}
        self._texts: dict[Hashable, Sequence[int]] = {}  # of owners whose slot others may begin with, as they grow
        self._idle: dict[int, list[int]] = {}  # the tokens that each idle slot holds, least recently used first
        self._leaving: set[int] = set()  # being freed; not empty only after an interruption

    def open(
        self, owner: Hashable, tokens: Sequence[int], *, reuse: bool = True, text: Sequence[int] | None = None
    ) -> tuple[int, int]:
        """A slot for the owner's text, and how many of these tokens it already holds (all of them at most).

        reuse False: an empty slot. text: the owner's whole text, as it grows, of which the slot holds a beginning: then
        others may begin with it while it runs. Raises CapacityError when every slot is in use.
        """
        self.drop(owner)  # what an interrupted call may have left
        if text is not None:
            self._texts[owner] = text
        shared = {slot: common_prefix(held, tokens) for slot, held in self._idle.items()} if reuse else {}
        best = max(shared, key=shared.__getitem__, default=None)
        running = self._running(owner, tokens) if reuse else {}
        nearest = max(running, key=running.__getitem__, default=None)
        ended = 0 if best is None else shared[best]
        if nearest is not None and running[nearest] > ended and self._branch_off(owner, nearest, running[nearest]):
            return self._used[owner], running[nearest]
        if best is not None and ended > 0 and self._continue(owner, best, shared[best]):
            return self._used[owner], shared[best]
        self._used[owner] = self._make(self.backend.new_slot)
        return self._used[owner], 0

    def _running(self, owner: Hashable, tokens: Sequence[int]) -> dict[int, int]:
        """Slots of running texts, and how many of these tokens they hold."""
        found = {}
        for other, text in self._texts.items():
            if other is not owner and other in self._used:
                slot = self._used[other]
                found[slot] = common_prefix(text[: self.backend.length(slot)], tokens)
        return found

    def _branch_off(self, owner: Hashable, slot: int, length: int) -> bool:
        """Gives the owner a copy of a running text's slot, cut back. False where there is no place, or no way back."""
        try:
            self._used[owner] = self._make(lambda: self.backend.fork_slot(slot))
            self.backend.truncate(self._used[owner], length)
        except (CapacityError, RewindError):
            self._give_up(owner)
            return False
        return True

    def _continue(self, owner: Hashable, slot: int, length: int) -> bool:
        """Gives the owner an idle slot cut back to `length` tokens; a copy of it where that would lose a text that may
        go on. False, and nothing given, where the slot's state cannot go back."""
        if length < len(self._idle[slot]):
            with suppress(CapacityError):  # no place for two
                self._used[owner] = self._make(lambda: self.backend.fork_slot(slot), keep=slot)
                self._idle[slot] = self._idle.pop(slot)  # most recently used
        if owner not in self._used:
            self._used[owner] = slot
            del self._idle[slot]
        try:
            self.backend.truncate(self._used[owner], length)
        except RewindError:
            self._give_up(owner)
            return False
        return True

    def _make(self, make: Callable[[], int], keep: int | None = None) -> int:
        """A slot as `make` opens it. Idle ones but `keep` make room, the oldest first; CapacityError without any."""
        while True:
            try:
                return make()
            except CapacityError:
                oldest = next((slot for slot in self._idle if slot != keep), None)
                if oldest is None:
                    raise
            self._free(oldest)

    def close(self, owner: Hashable, tokens: Sequence[int]) -> None:
        """The owner's text has ended; its slot holds (at least) the first of these tokens and is kept for the next
        one. Nothing happens to an owner without a slot."""
        slot = self._used.get(owner)
        self._texts.pop(owner, None)
        if slot is None:
            return
        self._idle[slot] = list(tokens[: self.backend.length(slot)])
        del self._used[owner]
        while sum(map(len, self._idle.values())) > self.backend.capacity.positions:
            self._free(next(iter(self._idle)))

    def drop(self, owner: Hashable) -> None:
        """Frees the owner's slot, whose contents are of no use. Nothing happens to an owner without one."""
        self._texts.pop(owner, None)
        self._give_up(owner)

    def _give_up(self, owner: Hashable) -> None:
        """The owner's slot alone: another one follows."""
        if owner in self._used:
            self._leaving.add(self._used[owner])
            del self._used[owner]
        self._free_leaving()

    def clear(self) -> bool:
        """Frees all idle slots; False when there were none."""
        found = bool(self._idle)
        while self._idle:
            self._free(next(iter(self._idle)))
        self._free_leaving()
        return found

    def with_room(self, work: Callable[[], T]) -> T:
        """What `work` gives, which changes nothing when it raises CapacityError: it is then done once more without the
        idle slots. Texts that may never be continued must not stand in the way of one that runs."""
        try:
            return work()
        except CapacityError:
            if not self.clear():
                raise
        return work()

    def _free(self, slot: int) -> None:
        self._leaving.add(slot)
        self._free_leaving()

    def _free_leaving(self) -> None:
        for slot in list(self._leaving):
            self._idle.pop(slot, None)
            with suppress(UsageError):  # not open any more: interrupted right after this
                self.backend.free_slot(slot)
            self._leaving.discard(slot)


def common_prefix(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """How many tokens the two sequences share from the start. start: so many are known to be shared."""
    n = min(len(a), len(b))
    if list(a[start:n]) == list(b[start:n]):  # the usual case, compared at once
        return n
    return next(i for i in range(start, n) if a[i] != b[i])
