"""A drafter whose head guesses a whole block of tokens in one pass (DFlash), with DSpark's Markov and confidence heads.

Neighbours: head.py has what drafters with a head have in common; tree.py and chain.py draw the tokens. A block's rows
see each other, so that all of it is computed even for a short draft. A row guesses its token whatever comes before it,
but for what the Markov head adds by the token before: so a tree needs no further pass. Sources: arXiv 2602.06036 and
heads/config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..backends.head import HeadBackend
from ..types import F32, Draft, NumericalError
from .base import Failed, State, Want, apart
from .chain import Chain
from .head import FeatureReader
from .tree import ROOT, Tree


class BlockDrafter(FeatureReader):
    """Drafts with a dflash head, one pass for all requests: trees by evidence, chains of fixed length."""

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        drafts = [self._begin(want) for want in wanted]
        active = {draft.state: draft for draft in drafts if draft.room > 0}
        failed: Failed = {}
        with self._or_drop(list(active), failed):
            self._follow(list(active), failed)
            by_rows: dict[int, list[Chain | Tree]] = {}
            for state, draft in active.items():
                if state not in failed:
                    with apart(failed, state):
                        self._check_read(state)
                        by_rows.setdefault(self._rows(state), []).append(draft)
            for rows, group in by_rows.items():
                at_once = max(1, self.head.capacity.rows // rows)
                for i in range(0, len(group), at_once):
                    self._blocks(group[i : i + at_once], rows, failed)
        return [failed[draft.state] if draft.state in failed else draft.draft(self.name) for draft in drafts]

    @property
    def _skip(self) -> int:
        """Rows of a block before the first one that guesses."""
        return 0 if self.head.config.sample_from_anchor else 1

    def _rows(self, state: State) -> int:
        """Rows of a block at the text's end: fewer than a block has only where the context ends within it."""
        return min(self.head.config.block_size, self.head.capacity.positions - len(state.tokens) + 1)

    def _begin(self, want: Want) -> Chain | Tree:
        room, levels = self._room(want), max(0, self._rows(want.state) - self._skip)
        if want.worth > 0.0:
            return Tree(want, room if levels else 0, self.head.d2t, self._of_target)
        return Chain(want, min(room, levels))

    def _read(self, batch: Sequence[tuple[State, int]], failed: Failed) -> None:
        for state, n in batch:  # each in a pass of its own
            with apart(failed, state):
                slot, features = self._slot(state).slot, state.features.take(n)
                self._pool.with_room(partial(self.head.read, slot, features))

    def _blocks(self, drafts: Sequence[Chain | Tree], rows: int, failed: Failed) -> None:
        """One pass; each draft gets its guesses."""
        slots = [self._slot(draft.state).slot for draft in drafts]
        anchors = [draft.state.tokens[-1] for draft in drafts]
        result = self._pool.with_room(lambda: self.head.block(slots, anchors, rows))
        for i, draft in enumerate(drafts):
            block = _Block(self.head, result.logits[i * rows :][:rows], result.hidden[i * rows :][:rows])
            with apart(failed, draft.state):
                memory = block.memory
                for row in range(self._skip):
                    memory = block.guess(row, anchors[i], memory)[1]
                if isinstance(draft, Tree):
                    self._grow(draft, block, anchors[i], memory)
                else:
                    self._extend(draft, block, anchors[i], memory)

    def _extend(self, chain: Chain, block: _Block, before: int, memory: F32) -> None:
        """Draws the chain's tokens. before: the newest token. memory: the Markov head's."""
        for row in range(self._skip, len(block.logits)):
            logits, memory = block.guess(row, before, memory)
            spread = self._of_target(self._checked(logits))
            try:
                chain.extend(spread)
            except NumericalError:  # the request's masks leave nothing of what this source can say
                return
            if not chain.goes_on:
                return
            before = chain.tokens[-1]

    def _grow(self, tree: Tree, block: _Block, before: int, memory: F32) -> None:
        """Grows the tree: a row guesses what follows every token of its level."""
        memories = {ROOT: memory}  # of each node: the Markov head's, before the row that guesses what follows it
        for row in range(self._skip, len(block.logits)):
            guesses: list[tuple[F32, float | None]] = []
            after: dict[int, F32] = {}
            for node in tree.frontier:
                token = before if node == ROOT else tree.tokens[node]
                logits, after[node] = block.guess(row, token, memories[node])
                guesses.append((self._checked(logits), self._sure(token, block.hidden[row])))
            tree.grow(guesses)
            memories = {node: after[tree.parents[node]] for node in tree.frontier}

    def _sure(self, before: int, hidden: F32) -> float | None:
        sure = self.head.confidence(before, hidden)
        if sure is not None and not np.isfinite(sure):
            raise NumericalError("its confidence is no number: the head is damaged or overflowed")
        return sure


class _Block:
    """The rows of one request's block: logits [rows, draft vocabulary] without the Markov bias, hidden [rows, H]."""

    def __init__(self, head: HeadBackend, logits: F32, hidden: F32) -> None:
        self.logits, self.hidden = logits, hidden
        self._head = head
        self.memory = np.zeros(head.config.markov_rank, np.float32)

    def guess(self, row: int, before: int, memory: F32) -> tuple[F32, F32]:
        """A row's logits after the token `before`, and the Markov head's memory for the next row."""
        if self._head.config.markov == "none":
            return self.logits[row], memory
        bias, memory = self._head.markov(before, self.hidden[row], memory)
        return self.logits[row] + bias, memory
