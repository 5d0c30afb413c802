"""Where prompts come from: the composer, or a file of the user's own conversations or texts.

Neighbours: prompts.py composes, rows.py reads files, answers.py has the target answer. Every prompt has a number, and
the same source gives the same prompt the same number, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from ..types import SampleOpts, UsageError
from .filters import HeldOutRuns
from .prompts import OWN_TURN, Prompt, compose
from .rows import BrokenRowError, fingerprint_of, prompt_of, rows

TEMPERATURE = 0.7  # of the answers that are sampled: every second one
OWN_EVERY = 21  # one composed prompt of so many goes on with a question that the target asks itself
PASSES = 4  # over a file, all but the first with sampled answers only: what is learnt from four times over is known
_NAMED = 5  # skipped rows


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its number and how it is to be answered."""

    number: int
    prompt: Prompt
    opts: SampleOpts


class Source(Protocol):
    """Prompts in an order. facts: what tells the source apart, kept beside the data that are made with it."""

    @property
    def facts(self) -> dict[str, object]: ...

    def asks(self, start: int) -> Iterator[Ask]:
        """The prompts from this number on."""

    def note(self) -> str:
        """What there is to say about the prompts that were read so far, in one line; "" where there is nothing."""


class Composer:
    """Prompts of our own writing, without end and without repeats."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def facts(self) -> dict[str, object]:
        return {"composer": self.seed}

    def asks(self, start: int) -> Iterator[Ask]:
        for i, prompt in enumerate(islice(compose(self.seed), start, None), start):
            if i % OWN_EVERY == OWN_EVERY // 2 and len(prompt.turns) == 1:
                prompt = replace(prompt, turns=(*prompt.turns, OWN_TURN))
            yield Ask(i, prompt, _opts(i, sampled=i % 2 == 1))

    def note(self) -> str:
        return ""


class Conversations:
    """The prompts of a file (rows.py), several times over. Raises UsageError when it cannot be read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._skipped: list[str] = []  # the first few
        self._count = self._skips = 0  # of the first pass
        next(rows(file), None)  # one that cannot be read is refused now
        self._print = fingerprint_of(file)

    @property
    def facts(self) -> dict[str, object]:
        return {"file": self._print}

    def asks(self, start: int) -> Iterator[Ask]:
        """Raises UsageError when no row is of use."""
        number = 0
        for i in range(PASSES):
            for prompt in self._prompts(first=i == 0):
                if number >= start:
                    yield Ask(number, prompt, _opts(number, sampled=i > 0 or number % 2 == 1))
                number += 1
            if not number:
                raise UsageError(self.note() or f"{self.file}: is empty")

    def _prompts(self, first: bool) -> Iterator[Prompt]:
        held_out = HeldOutRuns()
        if first:
            self._skipped, self._count, self._skips = [], 0, 0
        for where, row in rows(self.file):
            try:
                prompt = prompt_of(row)
                if any(map(held_out.in_, (prompt.system, *prompt.turns))):
                    raise BrokenRowError("shares eight words in a row with a held-out prompt")
            except BrokenRowError as error:
                if first:
                    self._skips += 1
                    if self._skips <= _NAMED:
                        self._skipped.append(f"{where}: {error}")
            else:
                self._count += first
                yield prompt

    def note(self) -> str:
        if not self._skips:
            return ""
        more = ", ..." if self._skips > _NAMED else ""
        read = self._count + self._skips
        what = "no row can be used" if not self._count else f"{self._skips} of {read} rows were skipped"
        return f"{self.file}: {what}: {', '.join(self._skipped)}{more}"


def _opts(number: int, sampled: bool) -> SampleOpts:
    return SampleOpts(temperature=TEMPERATURE if sampled else 0.0, seed=number)
