"""The drafter contract. A drafter may be wrong at will: it changes how fast an answer comes, never what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        self._rows: list[tuple[F32, ...]] = []
        self._joined: F32 | None = None  # what is left of those that were put together
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, *taps: F32) -> None:
        """float32 [n, width] each, side by side [n, taps * hidden_size], of the tokens after those held. They are put
        together when they are taken: most tokens are taken with many others."""
        if len(taps[0]):
            self._rows.append(taps)
            self._count += len(taps[0])

    def take(self, n: int) -> F32:
        """The first n >= 1 rows, which are held no longer."""
        if self._rows:
            new = np.concatenate([np.concatenate(of_tap) for of_tap in zip(*self._rows, strict=True)], axis=1)
            self._joined = new if self._joined is None else np.concatenate([self._joined, new])
            self._rows.clear()
        rows = self._joined
        assert rows is not None
        self._joined = rows[n:] if n < len(rows) else None
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

    worth: a token that is reached and accepted with a smaller chance than this is not worth its row in the target's
    pass; 0.0: nobody asks how sure the drafter is, the draft has a fixed length. step: what a further pass of the
    drafter costs, in expected tokens: it is made only where the tokens it may add promise more together.
    So a chain ends after its first token whose chance is smaller than worth + step: what follows is no likelier. A tree
    goes a level deeper while the chances that the level would add, each less `worth` where that is positive, add up to
    more than `step`. It cannot know them, and takes the chances of what came after the text's last token for those of
    what comes after each of its tokens. Its tokens stand in the order of falling chance, every one after its parent, so
    that the first n are the best n. Tokens that turn out not to be worth their row may stay at the end: they get none.
    stretch: a drafter that knows how sure it is may go on to so many tokens while they are worth it.
    chances: turns confidences, each given the token before, into chances; None: they are taken as they are.
    """

    state: State
    most: int
    stretch: int = 0
    worth: float = 0.0
    step: float = 0.0
    chances: Callable[[Sequence[float]], list[float]] | None = None


class Drafter(Protocol):
    """Guesses the next tokens of many requests at once (a model that drafts reads its weights once for all of them).

    Drafters keep what they know of a request by its State object and bring it up to date from State.tokens alone, so
    that a round that was lost, shortened or made by another drafter cannot confuse them.
    """

    name: str
    free: bool  # a draft costs next to nothing (a look-up): it is made first and judged then

    def propose(self, wanted: Sequence[Want]) -> Sequence[Draft | Exception]:
        """For each at most `most` (`stretch`) tokens that may follow state.tokens; fewer, or none, where nothing is
        known.

        What goes wrong with one text alone, such as a constraint that raises, is given back in the place of its draft:
        the others must have the drafts that they would have without it. What is raised concerns all of them.
        """

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
        """Takes what these requests' features hold, so that they do not pile up. What is raised concerns all of
        them."""


Failed = dict[State, Exception]  # what went wrong with single texts


@contextmanager
def apart(failed: Failed, state: State) -> Iterator[None]:
    """What goes wrong in here is this text's matter alone: it is noted, and the others go on."""
    try:
        yield
    except Exception as error:
        failed[state] = error


def drafts_of(proposed: Sequence[Draft | Exception]) -> list[Draft]:
    """The drafts, where all are wanted. Raises the first text's error otherwise."""
    drafts = []
    for each in proposed:
        if isinstance(each, Exception):
            raise each
        drafts.append(each)
    return drafts
