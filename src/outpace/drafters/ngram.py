"""Prompt lookup: the text so far, searched for what followed the last time that its last few tokens occurred.

Source: prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding); here with an index
from n-gram to its latest end, so that a round costs the same whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..types import Draft, UsageError
from .base import State, Want


@dataclass(slots=True)
class _Index:
    """ends[size - 1][n-gram] = position after its latest occurrence that something follows."""

    ends: list[dict[tuple[int, ...], int]]
    indexed: int = 0
    tokens: list[int] = field(default_factory=list)


class NgramDrafter:
    """Looks for the longest of the last `longest` .. `shortest` tokens elsewhere in prompt and output."""

    name = "ngram"
    free = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        """Raises UsageError unless 1 <= shortest <= longest."""
        if not 1 <= shortest <= longest:
            raise UsageError(f"ngram drafter needs 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest
        self._indexes: dict[State, _Index] = {}

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        return [self._draft(want.state, want.most) for want in wanted]

    def _draft(self, state: State, n: int) -> Draft:
        index = self._indexes.setdefault(state, _Index([{} for _ in range(self.longest)]))
        tokens = state.tokens
        # The n-gram that ends the text is looked up first and indexed later: it must not find itself.
        for end in range(index.indexed, len(tokens)):
            for size in range(self.shortest, self.longest + 1):
                if size <= end:
                    index.ends[size - 1][tuple(tokens[end - size : end])] = end
        index.indexed = len(tokens)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            start = index.ends[size - 1].get(tuple(tokens[-size:]))
            if start is not None:
                # The longer the match, the surer what follows it; the controller learns how sure.
                return Draft(self._copy(tokens, start, n), source=self.name, confidence=(size / (size + 1),) * n)
        return Draft(source=self.name)

    @staticmethod
    def _copy(tokens: list[int], start: int, n: int) -> tuple[int, ...]:
        # A match that runs into the end of the text goes on with itself: "ababab" continues "ab" for ever.
        period = len(tokens) - start
        return tuple(tokens[start + i % period] for i in range(n))

    def forget(self, state: State) -> None:
        self._indexes.pop(state, None)

    def close(self) -> None:
        self._indexes.clear()
