"""A draft that grows level by level where it promises most: the best few tokens after each of its best tokens.

Neighbours: head.py, which computes the logits after all tokens of a level in one pass, and block.py, which has them
of all levels at once. Source: EAGLE-2 (arXiv
2406.16858), whose trees follow the confidences of the head; here what became of tokens of such confidence turns it into
a chance (Want.chances), branches end where their next token is not worth the row that verifies it, and the tree where
the next level does not promise to be worth its pass. A draft of fixed length is a chain, drawn as the request's rule
wants it; under the rejection rule, where it has room, with a second token beside the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..types import F32, I64, Distribution, Draft, NumericalError
from .base import Want

ROOT = -1
_BRANCHES = 8  # most tokens after one


class Tree:
    """One request's draft in the making: at most `room` of the tokens that were looked at.

    frontier: those whose next tokens are wanted, the likeliest first; ROOT is the text's last one. tokens, parents: of
    all tokens looked at, by node.
    """

    def __init__(self, want: Want, room: int, ids: I64 | None, spread: Callable[[F32], F32]) -> None:
        """ids: the tokens that logits are of, None for the whole vocabulary; spread: makes them [vocab_size]."""
        self.state, self.room = want.state, room
        self._ids, self._spread = ids, spread
        self.frontier = [ROOT] if room > 0 else []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._want = want
        self._q: list[Distribution | None] = []
        self._confidence: list[float] = []
        self._reach: list[float] = []  # the chance that a node and all before it are accepted

    def grow(self, guesses: Iterable[tuple[F32, float | None]]) -> None:
        """Gives each node of the frontier its next tokens; guesses: for each of them, taken one by one, logits float32
        [len(ids)] and how likely the best is to be kept, by a source that knows better than its logits."""
        newest = len(self.tokens)
        for node, (row, sure) in zip(self.frontier, guesses, strict=True):
            self._branch(node, row, sure)
        # What follows a node is no likelier than the node: only from the best of all can one of the best follow.
        best = self._best(self.room - 1)
        level = [node for node in best if node >= newest and self._reach[node] >= self._want.worth]
        if self._want.worth <= 0.0:
            self.frontier = level[:1]
        else:
            self.frontier = level if self._promise(level) > self._want.step else []

    def _promise(self, level: Sequence[int]) -> float:
        """How many tokens more than their rows are worth may follow these nodes: as what followed the text, by then."""
        first = [self._reach[node] for node, parent in enumerate(self.parents) if parent == ROOT]
        return sum(max(0.0, self._reach[node] * chance - self._want.worth) for node in level for chance in first)

    def _branch(self, node: int, logits: F32, sure_of_first: float | None) -> None:
        path, want, sampler = self._path(node), self._want, self.state.sampler
        try:
            if want.worth > 0.0:
                alone = self._ids is not None and sampler.as_they_are(self._ids, path)
                row, ids = (logits, self._ids) if alone else (self._spread(logits), None)
                found = sampler.candidates(row, min(self.room, _BRANCHES), path, ids)
                self._q.extend([None] * len(found))
            else:
                drawn = sampler.siblings(self._spread(logits), 2 if node == ROOT and self.room > 2 else 1, path)
                found = [(token, 1.0) for token, _ in drawn]
                self._q.extend(q for _, q in drawn)
        except NumericalError:  # the request's masks leave nothing of what this source can say: the branch ends
            return
        sure = [confidence for _, confidence in found]
        if sure_of_first is not None:  # the others share what is left, as they did
            rest = (1.0 - sure_of_first) / max(1.0 - sure[0], 1e-9)
            sure = [sure_of_first, *(min(1.0, confidence * rest) for confidence in sure[1:])]
        chances = sure if want.chances is None or want.worth <= 0.0 else want.chances(sure)
        self.tokens.extend(token for token, _ in found)
        self.parents.extend([node] * len(found))
        self._confidence.extend(sure)
        before = 1.0 if node == ROOT else self._reach[node]
        self._reach.extend(before * chance for chance in chances)

    def _path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def _best(self, n: int) -> list[int]:
        """The n nodes of the greatest chance, parents before their children."""
        return sorted(range(len(self.tokens)), key=lambda node: (-self._reach[node], node))[:n]

    def draft(self, source: str) -> Draft:
        """The likeliest nodes, likeliest first, up to the first that is not worth its row."""
        nodes, worth = self._best(self.room), self._want.worth
        end = next((i + 1 for i, node in enumerate(nodes) if self._reach[node] < worth), len(nodes))
        nodes = nodes[:end]
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        parents = tuple(place[self.parents[node]] for node in nodes)
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(self._q[node] for node in nodes),
            None if parents == tuple(range(-1, len(nodes) - 1)) else parents,
            source,
            tuple(self._confidence[node] for node in nodes) if worth > 0.0 else None,
        )
