"""Several drafters that look the text's end up somewhere: each time the one that finds the longest end drafts.

Its neighbours: suffix.py looks in the request's own text, datastore.py in a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Draft
from .base import Drafter, State


class Matching(Drafter, Protocol):
    """A drafter that knows how much of the text's end it has found."""

    def matched(self, state: State) -> int:
        """How many of the text's last tokens it has found; 0 for none."""


class LongestMatchDrafter:
    """Asks the drafter with the longest match, then the others, for as long as one has nothing to say."""

    def __init__(self, drafters: Sequence[Matching], *, enough: int = 16) -> None:
        """Earlier drafters go first where matches are equally long; from `enough` tokens on all of them are."""
        self.drafters = tuple(drafters)
        self.enough = enough
        self.name = "+".join(drafter.name for drafter in drafters)

    def propose(self, wanted: Sequence[tuple[State, int]]) -> list[Draft]:
        return [self._draft(state, n) for state, n in wanted]

    def _draft(self, state: State, n: int) -> Draft:
        draft = Draft()
        for drafter in sorted(self.drafters, key=lambda d: -min(d.matched(state), self.enough)):
            (draft,) = drafter.propose([(state, n)])
            if len(draft):
                break
        return draft

    def forget(self, state: State) -> None:
        for drafter in self.drafters:
            drafter.forget(state)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()
