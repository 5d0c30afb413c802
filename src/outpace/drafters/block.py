"""A drafter whose head guesses a whole block of tokens in one pass (DFlash), with DSpark's Markov and confidence heads.

Neighbours: head.py has what drafters with a head have in common, chain.py draws the tokens. A block's rows see each
other, so that all of it is computed even for a short draft; guesses are drawn from left to right, because the Markov
head adds what the token before says. Sources: arXiv 2602.06036 and heads/config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..types import F32, Draft, NumericalError
from .base import Failed, State, Want, apart
from .chain import Chain
from .head import FeatureReader


class BlockDrafter(FeatureReader):
    """Drafts a chain with a dflash head: one pass for all requests."""

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        chains = [Chain(want, self._room(want)) for want in wanted]
        active = {chain.state: chain for chain in chains if chain.goes_on}
        failed: Failed = {}
        with self._or_drop(list(active), failed):
            self._follow(list(active), failed)
            by_rows: dict[int, list[Chain]] = {}
            for state, chain in active.items():
                if state not in failed:
                    with apart(failed, state):
                        self._check_read(state)
                        by_rows.setdefault(self._rows(state), []).append(chain)
            for rows, group in by_rows.items():
                at_once = max(1, self.head.capacity.rows // rows)
                for i in range(0, len(group), at_once):
                    self._blocks(group[i : i + at_once], rows, failed)
        return [failed[chain.state] if chain.state in failed else chain.draft(self.name) for chain in chains]

    @property
    def _skip(self) -> int:
        """Rows of a block before the first one that guesses."""
        return 0 if self.head.config.sample_from_anchor else 1

    def _rows(self, state: State) -> int:
        """Rows of a block at the text's end: fewer than a block has only where the context ends within it."""
        return min(self.head.config.block_size, self.head.capacity.positions - len(state.tokens) + 1)

    def _room(self, want: Want) -> int:
        return max(0, min(super()._room(want), self._rows(want.state) - self._skip))

    def _read(self, batch: Sequence[tuple[State, int]], failed: Failed) -> None:
        for state, n in batch:  # each in a pass of its own
            with apart(failed, state):
                slot, features = self._slot(state).slot, state.features.take(n)
                self._pool.with_room(partial(self.head.read, slot, features))

    def _blocks(self, chains: Sequence[Chain], rows: int, failed: Failed) -> None:
        """One pass; each chain gets its guesses."""
        slots = [self._slot(chain.state).slot for chain in chains]
        anchors = [chain.state.tokens[-1] for chain in chains]
        result = self._pool.with_room(lambda: self.head.block(slots, anchors, rows))
        for i, chain in enumerate(chains):
            own = slice(i * rows, (i + 1) * rows)
            with apart(failed, chain.state):
                self._guess(chain, result.logits[own], result.hidden[own])

    def _guess(self, chain: Chain, logits: F32, hidden: F32) -> None:
        """Draws the chain's tokens from a block's rows."""
        head, before = self.head, chain.state.tokens[-1]
        memory = np.zeros(head.config.markov_rank, np.float32)
        for i, (row, state) in enumerate(zip(logits, hidden, strict=True)):
            if head.config.markov != "none":
                bias, memory = head.markov(before, state, memory)
                row = row + bias
            if i < self._skip:
                continue
            row = self._of_target(self._checked(row))
            sure = self._sure(before, state) if chain.asks else None
            try:
                chain.extend(row, sure)
            except NumericalError:  # the request's masks leave nothing of what this source can say
                return
            if not chain.goes_on:
                return
            before = chain.tokens[-1]

    def _sure(self, before: int, hidden: F32) -> float | None:
        sure = self.head.confidence(before, hidden)
        if sure is not None and not np.isfinite(sure):
            raise NumericalError("its confidence is no number: the head is damaged or overflowed")
        return sure
