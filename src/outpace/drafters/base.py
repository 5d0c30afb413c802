"""The drafter contract. A drafter may be wrong at will: it changes how fast an answer comes, never what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from ..sampling import Sampler
from ..types import F32, Draft


class Features:
    """The target's tapped hidden states of a request's latest tokens, until the drafter that reads them takes them.

    start: position of the first one held. Those before were taken, or are not known because the target's slot held the
    tokens already.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._rows: list[F32] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, rows: F32) -> None:
        """float32 [n, taps * hidden_size] of the tokens after those held."""
        if len(rows):
            self._rows.append(rows)
            self._count += len(rows)

    def take(self, n: int) -> F32:
        """The first n >= 1 rows, which are held no longer."""
        rows = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        self._rows = [rows[n:]] if n < len(rows) else []
        self._count -= n
        self.start += n
        return rows[:n]


@dataclass(eq=False, slots=True)
class State:
    """What a drafter may see of one request.

    tokens: prompt and emitted tokens, growing. sampler: draws a drafter's tokens as the target will (Sampler.draft).
    features: hidden states of tokens that the target has read, for the drafter with a learned head.
    """

    tokens: list[int]
    sampler: Sampler
    features: Features = field(default_factory=Features)


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


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states; a decoder has one at most.

    taps: which ones, as backends/base.py counts them; State.features holds them side by side in this order.
    """

    taps: tuple[int, ...]

    def begin(self, state: State, held: int) -> int:
        """A new request, of whose tokens the target's slot holds the first `held` already. Returns how many of them the
        drafter can do without the features of, `held` at most: the target reads the others again."""

    def absorb(self, states: Sequence[State]) -> None:
        """Takes what these requests' features hold, so that they do not pile up."""
