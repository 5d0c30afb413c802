"""The drafter contract. A drafter may be wrong at will: it changes how fast an answer comes, never what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..sampling import Sampler
from ..types import Draft


@dataclass(eq=False, slots=True)
class State:
    """What a drafter may see of one request.

    tokens: prompt and emitted tokens, growing. sampler: draws a drafter's tokens as the target will (Sampler.draft).
    """

    tokens: list[int]
    sampler: Sampler


class Drafter(Protocol):
    """Guesses the next tokens of many requests at once (a model that drafts reads its weights once for all of them).

    Drafters keep what they know of a request by its State object and bring it up to date from State.tokens alone, so
    that a round that was lost, shortened or made by another drafter cannot confuse them.
    """

    name: str

    def propose(self, wanted: Sequence[tuple[State, int]]) -> list[Draft]:
        """For each (state, n) at most n tokens that may follow state.tokens; fewer, or none, where nothing is known."""

    def forget(self, state: State) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Releases what the drafter holds."""
