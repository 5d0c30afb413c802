"""Drafters with a learned head, which reads the target's hidden states instead of running a model of its own.

Neighbours: decode.py hands over the hidden states (State.features), backends/head.py is the head, tree.py grows the
draft; block.py is the drafter whose head guesses a whole block. A head's slot s pairs the feature at s with the token
at s + 1. So a text of n tokens, whose last one the target has not read, gives the head n - 1 slots, and the newest of
them guesses the token that comes next: reading on and the first guess are one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..backends.head import HeadBackend, HeadPass, HeadRows
from ..slots import SlotPool
from ..types import F32, Draft, NumericalError, UsageError
from .base import Failed, State, Want, apart
from .tree import ROOT, Tree

_LONG = 16  # rows that are read together with the one that is drafted from
_READ_ROWS = 256  # of a pass that catches up


class FeatureReader:
    """What all drafters with a head have in common: slots that follow the texts, as far as features go."""

    free = False

    def __init__(self, head: HeadBackend, name: str | None = None) -> None:
        """name: the head's algorithm by default. The caller has checked that the head is made for the target."""
        self.head, self.name = head, name or head.config.algorithm
        self.taps = head.config.taps
        self._pool = SlotPool(head)
        self._held: dict[State, _Held] = {}
        self._spread = np.full(head.config.layers.vocab_size, -np.inf, np.float32)  # outside the draft vocabulary

    def begin(self, state: State, held: int) -> int:
        slot, known = self._pool.open(state, state.tokens)
        # The last row of an old text may pair its feature with a token that this text goes on without.
        rows = min(held, max(0, known - 1))
        self.head.truncate(slot, rows)
        self._held[state] = _Held(slot)
        return rows

    def absorb(self, states: Sequence[State]) -> None:
        failed: Failed = {}
        with self._or_drop(states, failed):
            self._follow(states, failed)
        for error in failed.values():
            raise error

    def _follow(self, states: Sequence[State], failed: Failed) -> None:
        """Reads what there is to read of these texts."""
        while True:
            budget, batch = min(_READ_ROWS, self.head.capacity.rows), []
            for state in states:
                n = 0
                if state not in failed:
                    with apart(failed, state):
                        n = min(budget, self._readable(state))
                if n > 0:
                    budget -= n
                    batch.append((state, n))
            if not batch:
                return
            self._read(batch, failed)

    def _readable(self, state: State) -> int:
        """Features that can be read now: of tokens whose next one is known, as far as the head's slot reaches."""
        features, positions = state.features, self.head.capacity.positions
        if len(features) and features.start >= positions:
            features.take(len(features))
        elif features.start != self.head.length(self._slot(state).slot):
            raise UsageError(f"{self.name} was not told of this text before its hidden states came: call begin first")
        return min(len(features), len(state.tokens) - 1 - features.start, positions - features.start)

    def _read(self, batch: Sequence[tuple[State, int]], failed: Failed) -> None:
        """Takes so many features of each text into its slot."""
        raise NotImplementedError

    def _slot(self, state: State) -> _Held:
        if state not in self._held:
            raise UsageError(f"{self.name} does not know this text: call begin first")
        return self._held[state]

    def _check_read(self, state: State) -> None:
        """Raises UsageError unless all tokens before the last one were read."""
        if self.head.length(self._slot(state).slot) < len(state.tokens) - 1:
            raise UsageError("hidden states of this text are missing")

    def _room(self, want: Want) -> int:
        """Most tokens of the draft: none where the head's slot does not reach to the text's end."""
        left = self.head.capacity.positions - len(want.state.tokens)
        return min(max(want.most, want.stretch), left + 2) if len(want.state.tokens) > 1 and left >= -1 else 0

    def _checked(self, logits: F32) -> F32:
        """Logits [draft vocabulary]. Raises NumericalError for values, UsageError for a shape that cannot be."""
        if logits.shape != (self.head.config.draft_vocab_size,):
            raise UsageError(f"its logits have the shape {list(logits.shape)}")
        if not np.isfinite(logits).all():
            raise NumericalError("its logits hold values that are no numbers: the head is damaged or overflowed")
        return logits

    def _of_target(self, logits: F32) -> F32:
        """Logits [draft vocabulary] over the target's vocabulary, good until the next call."""
        if self.head.d2t is None:
            return logits
        self._spread[self.head.d2t] = logits
        return self._spread

    @contextmanager
    def _or_drop(self, states: Sequence[State], failed: Failed) -> Iterator[None]:
        """Gives up the slots of texts that failed in here; of all of them, whatever fails or interrupts: nobody knows
        then what they hold."""
        try:
            yield
        except BaseException:
            self._drop(states)
            raise
        self._drop(failed)

    def _drop(self, states: Iterable[State]) -> None:
        for state in states:
            self._held.pop(state, None)
            self._pool.drop(state)

    def forget(self, state: State) -> None:
        if state in self._held:
            with suppress(Exception):  # then the slot is given up
                self.absorb([state])  # a text that goes on from here finds it read
        if state in self._held:
            self._pool.close(state, state.tokens)
            del self._held[state]
        else:  # none, or interrupted while it was opened
            self._pool.drop(state)

    def close(self) -> None:
        for state in list(self._held):
            self.forget(state)
        self._pool.clear()


@dataclass(slots=True)
class _Held:
    """A text's slot, and what its newest row gave: logits [draft vocabulary] and hidden [H]."""

    slot: int
    logits: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    hidden: F32 = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(slots=True)
class _Growth:
    """A tree, and of the nodes that the head has read: their pending rows and hidden states."""

    tree: Tree
    slot: int
    rows: dict[int, int]
    hidden: dict[int, F32]


class HeadDrafter(FeatureReader):
    """Drafts with an mtp or eagle3 head: a pass for each level of the draft, for all requests together."""

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        trees = [Tree(want, self._room(want), self.head.d2t, self._of_target) for want in wanted]
        growing = {tree.state: tree for tree in trees if tree.frontier}
        failed: Failed = {}
        with self._or_drop(list(growing), failed):
            self._follow(list(growing), failed)
            work = []
            for state, tree in growing.items():
                if state not in failed:
                    with apart(failed, state):
                        work.append(self._planted(tree))
            while work := [each for each in work if each.tree.frontier and each.tree.state not in failed]:
                self._level(work, failed)
        return [failed[tree.state] if tree.state in failed else tree.draft(self.name) for tree in trees]

    def _readable(self, state: State) -> int:
        # Rows that nobody asks the results of cost half: behind a long run the text's newest one goes alone.
        n = super()._readable(state)
        return n - (n > _LONG and state.features.start + 1 + n == len(state.tokens))

    def _read(self, batch: Sequence[tuple[State, int]], failed: Failed) -> None:
        shares, newest = [], []
        for state, n in batch:
            start, held = state.features.start, self._slot(state)
            tokens = state.tokens[start + 1 : start + 1 + n]
            last = start + 1 + n == len(state.tokens)  # what follows the text is guessed by no other row
            newest += [held] if last else []
            shares.append(HeadRows(held.slot, tokens, state.features.take(n), logits=[n - 1] if last else []))
        result = self._pool.with_room(lambda: self.head.forward(shares))
        for share in shares:
            self.head.commit(share.slot, range(len(share.tokens)))
        for held, logits, hidden in zip(newest, result.logits, result.hidden, strict=True):
            held.logits, held.hidden = logits, hidden

    def _planted(self, tree: Tree) -> _Growth:
        """The tree with the tokens that the text's newest row guesses."""
        self._check_read(tree.state)
        held = self._slot(tree.state)
        growth = _Growth(tree, held.slot, {ROOT: -1}, {ROOT: held.hidden})
        tree.grow([(self._checked(held.logits), None)])
        self._fit(growth)
        return growth

    def _level(self, work: Sequence[_Growth], failed: Failed) -> None:
        """Reads the frontiers of all trees, and gives their nodes the tokens that they guess."""
        shares = []
        for growth in work:
            tree, rows = growth.tree, growth.rows
            parents = [tree.parents[node] for node in tree.frontier]
            tokens, states = (
                [tree.tokens[node] for node in tree.frontier],
                np.stack([growth.hidden[p] for p in parents]),
            )
            behind = [rows[parent] for parent in parents]
            # What an older draft left pending goes with the first pass.
            shares.append(HeadRows(growth.slot, tokens, states, own=True, append=len(rows) > 1, parents=behind))
        at = 0
        result = self._forward(shares)
        for growth, share in zip(work, shares, strict=True):
            end = at + len(share.tokens)
            for node, hidden in zip(growth.tree.frontier, result.hidden[at:end], strict=True):
                growth.rows[node] = len(growth.rows) - 1
                growth.hidden[node] = hidden
            with apart(failed, growth.tree.state):
                growth.tree.grow((self._checked(row), None) for row in result.logits[at:end])
                self._fit(growth)
            at = end

    def _fit(self, growth: _Growth) -> None:
        """Cuts the frontier to what the slot and a pass can take."""
        pending = len(growth.rows) - 1
        left = self.head.capacity.positions - self.head.length(growth.slot) - pending
        growth.tree.frontier = growth.tree.frontier[: min(left, self.head.capacity.rows)]

    def _forward(self, shares: Sequence[HeadRows]) -> HeadPass:
        """One pass, or as many as the rows need."""
        passes: list[list[HeadRows]] = [[]]
        for share in shares:
            if sum(len(each.tokens) for each in [*passes[-1], share]) > self.head.capacity.rows:
                passes.append([])
            passes[-1].append(share)
        results = [self._pool.with_room(partial(self.head.forward, batch)) for batch in passes]
        if len(results) == 1:
            return results[0]
        logits, hidden = ([getattr(result, part) for result in results] for part in ("logits", "hidden"))
        return HeadPass(np.concatenate(logits), np.concatenate(hidden))
