"""The drafter contract. A drafter may be wrong at will: it changes how fast an answer comes, never what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(slots=True)
class Want:
    """A request for a draft of at most `most` tokens.

    A drafter that knows how sure it is stops after the first token whose chance of being reached and accepted is
    smaller than `worth`, and may go on to `stretch` tokens while it is not. chances: turns confidences along a chain
    into the chance of each token, given the one before; None: they are taken as they are.
    """

    state: State
    most: int
    stretch: int = 0
    worth: float = 0.0
    chances: Callable[[Sequence[float]], list[float]] | None = None


class Drafter(Protocol):
    """Guesses the next tokens of many requests at once (a model that drafts reads its weights once for all of them).

    Drafters keep what they know of a request by its State object and bring it up to date from State.tokens alone, so
    that a round that was lost, shortened or made by another drafter cannot confuse them.
    """

    name: str
    free: bool  # a draft costs next to nothing (a look-up): it is made first and judged then

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        """For each at most `most` (`stretch`) tokens that may follow state.tokens; fewer, or none, where nothing is
        known."""

    def forget(self, state: State) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Releases what the drafter holds."""
