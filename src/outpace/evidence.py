"""How often guesses come true: counted by who made them, at which place of a draft, and how sure they were.

Neighbours: controller.py plans by these chances, decode.py reports what became of each guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .types import Draft

_FIRST_CHANCE = 0.6  # of a token nothing is known about
_WEIGHT = 2.0  # of what is known in general, in observations
_MEMORY = 0.97  # weight of old observations per new one, in a request; in general old ones stay four times as long
_STEPS = 10  # of confidence

_Cell = tuple[str, str, int]


class Evidence:
    """Decayed counts of trials and successes. One request's leans on that of all requests (`above`) where it is thin.

    steady: the request's tokens depend on the length of its drafts, which must therefore never depend on evidence.
    """

    def __init__(self, above: Evidence | None = None) -> None:
        self.steady = False
        self._above = above
        self._memory = _MEMORY if above is not None else _MEMORY**0.25
        self._counts: dict[_Cell, tuple[float, float]] = {}

    def by_place(self, source: str, n: int) -> list[float]:
        """The chance of each of a draft's first n tokens to be accepted, given that those before it are.

        Places that were seldom reached borrow from the one before: acceptance changes slowly along a draft.
        """
        chances, chance = [], _FIRST_CHANCE
        for place in range(n):
            chance = self._chance((source, "place", place), chance)
            chances.append(chance)
        return chances

    def by_confidence(self, source: str, confidence: Sequence[float]) -> list[float]:
        """The same for tokens that the source is so sure of (0 .. 1): what became of tokens it was as sure of."""
        return [self._chance((source, "confidence", _step(sure)), sure) for sure in confidence]

    def observe(self, draft: Draft, emitted: Sequence[int], *, chosen: bool = False) -> None:
        """The text went on with these tokens: which of the draft's were right, as far as can be judged. chosen: the
        source was asked for a draft, so that none at all is a failure, too."""
        path = draft.follow(emitted)
        if len(draft) or chosen:
            self._fade(draft.source)
        if chosen and not len(draft):
            self._add((draft.source, "place", 0), False)
        for depth, parent in enumerate((-1, *path)[: len(emitted)]):
            children = draft.children(parent)
            if not children:
                break
            self._add((draft.source, "place", depth), depth < len(path))
            if draft.confidence is not None:
                for child in children:
                    self._add((draft.source, "confidence", _step(draft.confidence[child])), child in path)

    def _chance(self, cell: _Cell, prior: float) -> float:
        if self._above is not None:
            prior = self._above._chance(cell, prior)
        tried, kept = self._counts.get(cell, (0.0, 0.0))
        return (kept + _WEIGHT * prior) / (tried + _WEIGHT)

    def _add(self, cell: _Cell, success: bool) -> None:
        tried, kept = self._counts.get(cell, (0.0, 0.0))
        if cell[1] == "confidence":
            tried, kept = self._memory * tried, self._memory * kept
        self._counts[cell] = tried + 1.0, kept + success
        if self._above is not None:
            self._above._add(cell, success)

    def _fade(self, source: str) -> None:
        """Old observations count for less. Places fade all together, so that one bad start does not rule out for ever a
        place that was not reached since."""
        for place in itertools.count():
            cell = (source, "place", place)
            if cell not in self._counts:
                break
            tried, kept = self._counts[cell]
            self._counts[cell] = self._memory * tried, self._memory * kept
        if self._above is not None:
            self._above._fade(source)


def _step(confidence: float) -> int:
    return min(_STEPS - 1, max(0, int(confidence * _STEPS)))
