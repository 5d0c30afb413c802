"""How often guesses come true: counted by who made them, at which place of a draft, and how sure they were.

Neighbours: controller.py plans by these chances, decode.py reports what became of each guess.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from .types import Draft

_FIRST_CHANCE = 0.6  # of a token nothing is known about
_WEIGHT = 2.0  # of what is known in general, in observations
_MEMORY = 0.97  # weight of old observations per new one, in a request; in general old ones stay four times as long
_TREE_FALL = 0.8  # chance of a tree's token over that of the one before it, at least, where nothing is known
_SUREST = 0.999

_Cell = tuple[str, str, int]


class Evidence:
    """Decayed counts of trials and successes. One request's leans on that of all requests (`above`) where it is thin.

    steady: the request's tokens depend on the length of its drafts, which must therefore never depend on evidence.
    """

    def __init__(self, above: Evidence | None = None) -> None:
        self.steady = False
        self._above = above
        self._memory = _MEMORY if above is not None else _MEMORY**0.25
        # tried and kept, and the source's age when they were counted; of confidences: their sum, and kept
        self._counts: dict[_Cell, tuple[float, float, int]] = {}
        self._trusts: dict[tuple[str, int], tuple[float, float]] = {}
        self._age: dict[str, int] = {}  # by source: how often its counts have faded
        self._trees: set[str] = set()
        self._surprised: set[str] = set()

    def gains(self, source: str, n: int) -> list[float]:
        """The chance of each of a draft's first n tokens to be accepted, in the order in which the source drafts them;
        before there is a draft, for a source that drafts when it is asked to.

        Along a chain it is the product of the places' chances. A tree's tokens do not follow one another: theirs is
        counted. Fewer than n where drafts were short so far: lengths are tried step by step.
        """
        n = min(n, 3 * self._longest(source) // 2 + 2)
        if not self._is_tree(source):
            return list(itertools.accumulate(self.by_place(source, n), operator.mul))
        chances: list[float] = []
        before, chance = 1.0, _FIRST_CHANCE
        for rank in range(n):
            chance = min(before, self._chance((source, "rank", rank), chance))
            chances.append(chance)
            before, chance = chance, chance * max(chance / before, _TREE_FALL)
        return chances

    def rows(self, source: str, n: int) -> list[float]:
        """The chance that each of these tokens is there and worth a row, so that it is verified."""
        chances, chance = [], 1.0
        for rank in range(n):
            chance = self._chance((source, "row", rank), chance)
            chances.append(chance)
        return chances

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
        """The same for tokens that the source is so sure of (0 .. 1): that, times how much too sure it was when it was
        about as sure before."""
        return [min(_SUREST, sure * self._trust(source, _bin(sure))) for sure in confidence]

    def surprised(self, source: str) -> bool:
        """Whether the latest draft that the source was asked for was right where little was expected of it."""
        return source in self._surprised

    def observe(self, draft: Draft, emitted: Sequence[int], *, asked: int = 0, verified: int = 0) -> None:
        """The text went on with these tokens: which of the draft's were right, as far as can be judged. asked: the
        source was asked for a draft of so many tokens, of which the first `verified` got a row; those it did not make,
        or that were not worth one, gained nothing."""
        path = draft.follow(emitted)
        if not len(draft) and not asked:
            return
        self._fade(draft.source)
        if asked:
            self._look_back(draft, path, emitted, asked, verified)
        for depth, parent in enumerate((-1, *path)[: len(emitted)]):
            children = draft.children(parent)
            if not children and depth >= asked:
                break
            gained = depth < len(path) and (not asked or path[depth] < verified)
            self._add((draft.source, "place", depth), gained)
            if draft.confidence is not None:
                for child in children:
                    self._judge(draft.source, draft.confidence[child], child in path)
            if not gained:
                break

    def _look_back(self, draft: Draft, path: list[int], emitted: Sequence[int], asked: int, verified: int) -> None:
        """What became of a draft that the source was asked for, in its order."""
        source = draft.source
        if draft.parents is not None:
            self._note_tree(source)
        self._surprised.discard(source)
        if path and self._first_chance(draft) < 0.5:
            self._surprised.add(source)
        depths, tree = draft.depths(), self._is_tree(source)
        for rank in range(asked):
            self._add((source, "row", rank), rank < verified)
            # Of a round that ended the answer within the draft nobody knows what would have come.
            if tree and (len(path) < len(emitted) or (rank < len(depths) and depths[rank] <= len(path))):
                self._add((source, "rank", rank), rank < verified and rank in path)

    def _first_chance(self, draft: Draft) -> float:
        """The chance that one of the draft's first tokens is right, by what was known when it was made."""
        if draft.confidence is None:
            return self.by_place(draft.source, 1)[0]
        return sum(self.by_confidence(draft.source, [draft.confidence[child] for child in draft.children(-1)]))

    def _longest(self, source: str) -> int:
        """Tokens of the longest draft that any request asked the source for."""
        if self._above is not None:
            return self._above._longest(source)
        return next(n for n in itertools.count() if (source, "row", n) not in self._counts)

    def _is_tree(self, source: str) -> bool:
        return source in self._trees or (self._above is not None and self._above._is_tree(source))

    def _note_tree(self, source: str) -> None:
        self._trees.add(source)
        if self._above is not None:
            self._above._note_tree(source)

    def _count(self, cell: _Cell) -> tuple[float, float]:
        """Tried and kept, as faded by now."""
        found = self._counts.get(cell)
        if found is None:
            return 0.0, 0.0
        weight = self._memory ** (self._age[cell[0]] - found[2])
        return weight * found[0], weight * found[1]

    def _chance(self, cell: _Cell, prior: float) -> float:
        if self._above is not None:
            prior = self._above._chance(cell, prior)
        tried, kept = self._count(cell)
        return (kept + _WEIGHT * prior) / (tried + _WEIGHT)

    def _add(self, cell: _Cell, success: bool) -> None:
        tried, kept = self._count(cell)
        self._counts[cell] = tried + 1.0, kept + success, self._age[cell[0]]
        if self._above is not None:
            self._above._add(cell, success)

    def _trust(self, source: str, step: int) -> float:
        """Successes over the sum of confidences, 1 where nothing is known."""
        prior = self._above._trust(source, step) if self._above is not None else 1.0
        promised, kept = self._trusts.get((source, step), (0.0, 0.0))
        return (kept + prior) / (promised + 1.0)

    def _judge(self, source: str, sure: float, success: bool) -> None:
        cell = (source, _bin(sure))
        promised, kept = self._trusts.get(cell, (0.0, 0.0))
        self._trusts[cell] = self._memory * promised + sure, self._memory * kept + success
        if self._above is not None:
            self._above._judge(source, sure, success)

    def _fade(self, source: str) -> None:
        """Old observations count for less. Places fade all together, so that one bad start does not rule out for ever a
        place that was not reached since."""
        self._age[source] = self._age.get(source, 0) + 1
        if self._above is not None:
            self._above._fade(source)


def _bin(confidence: float) -> int:
    """Bins that are even in log-odds: 0.01 and 0.09 are as different as 0.91 and 0.99."""
    sure = min(max(confidence, 1e-4), 1.0 - 1e-4)
    return math.floor(math.log(sure / (1.0 - sure)))
