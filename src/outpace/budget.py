"""How much drafts that cost something may still lose: what keeps decoding from ever being clearly slower than plain.

Neighbours: controller.py asks before it drafts, and reports what each draft really took and gained. Estimates can be
wrong for as long as a text likes; an account of what happened cannot. Counted in plain passes, so that it means the
same on every machine and model.
"""

from __future__ import annotations

_SHARE = 0.01  # of the passes may be lost
_AHEAD = 6.0  # passes that may be lost ahead of that, at most: also what a source begins with
_SAVED = 16.0  # passes that a source may lose of those that it gained: a long draft fails now and then
_OWED = 10.0  # passes that are owed at most: after a thousand without it a source is tried again, whatever it did


class Budget:
    """What each source may still lose, in passes."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}

    def left(self, source: str) -> float:
        """0 or less: it must not draft now."""
        return self._left.get(source, _AHEAD)

    def grow(self) -> None:
        """After each pass."""
        for source, left in self._left.items():
            self._left[source] = max(left, min(_AHEAD, left + _SHARE))

    def add(self, source: str, gained: float) -> None:
        """gained: less than 0 for a loss."""
        self._left[source] = min(_SAVED, max(-_OWED, self.left(source) + gained))
