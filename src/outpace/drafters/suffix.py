"""Suffix automaton: the longest end of the text that occurred before, of any length, and what followed it.

Source: Blumer et al. 1985 for the automaton (linear size, amortised O(1) a token); Oliaro et al. 2024 (SuffixDecoding,
arXiv 2411.04975) for drafting from one. The draft grows with the evidence: a long match promises a long continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Draft, UsageError
from .base import State


class SuffixAutomaton:
    """All substrings of a growing token list; `match` is the state of its longest suffix that occurred before.

    Per state: longest substring length, suffix link, transitions, and the end position of its latest known occurrence.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length = [0]
        self.link = [-1]
        self.next: list[dict[int, int]] = [{}]
        self.end = [0]
        self._last = 0
        self.match, self.match_length = 0, 0

    def extend(self, token: int) -> None:
        """Appends one token."""
        # The text ended in one more occurrence of the old match, and now something follows it.
        self.end[self.match] = len(self.tokens)
        # The match is moved before the token is added, so that it can only be an earlier occurrence.
        self._advance_match(token)
        self.tokens.append(token)
        position = len(self.tokens)
        current = self._state(position, position)
        node = self._last
        while node != -1 and token not in self.next[node]:
            self.next[node][token] = current
            node = self.link[node]
        if node == -1:
            self.link[current] = 0
        else:
            target = self.next[node][token]
            if self.length[node] + 1 == self.length[target]:
                self.link[current] = target
            else:
                clone = self._state(self.length[node] + 1, self.end[target])
                self.next[clone] = dict(self.next[target])
                self.link[clone] = self.link[target]
                while node != -1 and self.next[node].get(token) == target:
                    self.next[node][token] = clone
                    node = self.link[node]
                self.link[target] = self.link[current] = clone
                if self.match == target and self.match_length <= self.length[clone]:
                    self.match = clone
        self._last = current

    def _state(self, length: int, end: int) -> int:
        self.length.append(length)
        self.link.append(-1)
        self.next.append({})
        self.end.append(end)
        return len(self.length) - 1

    def _advance_match(self, token: int) -> None:
        node, length = self.match, self.match_length
        while node != 0 and token not in self.next[node]:
            node = self.link[node]
            length = self.length[node]
        if token in self.next[node]:
            node, length = self.next[node][token], length + 1
        else:
            node, length = 0, 0
        self.match, self.match_length = node, length

    def continuation(self, n: int) -> tuple[int, ...]:
        """At most n tokens that followed the match; () without one. A match that reaches the end goes round."""
        if not self.match_length or n <= 0:
            return ()
        start = self.end[self.match]
        period = len(self.tokens) - start
        return tuple(self.tokens[start + i % period] for i in range(n)) if period else ()


class SuffixDrafter:
    """Drafts what followed the longest earlier occurrence of the text's end: at most `reach` tokens a token matched."""

    name = "suffix"

    def __init__(self, shortest: int = 2, reach: float = 2.0) -> None:
        """shortest: a match below this many tokens promises nothing. Raises UsageError unless both are positive."""
        if shortest < 1 or not reach > 0:
            raise UsageError(f"suffix drafter needs shortest >= 1 and reach > 0, got {shortest} and {reach}")
        self.shortest, self.reach = shortest, reach
        self._automata: dict[State, SuffixAutomaton] = {}

    def propose(self, wanted: Sequence[tuple[State, int]]) -> list[Draft]:
        return [Draft(self._continuation(state, n), source=self.name) for state, n in wanted]

    def matched(self, state: State) -> int:
        """How many of the text's last tokens occurred before; 0 where they are too few to say anything."""
        length = self._automaton(state).match_length
        return length if length >= self.shortest else 0

    def _continuation(self, state: State, n: int) -> tuple[int, ...]:
        return self._automaton(state).continuation(min(n, int(self.matched(state) * self.reach)))

    def _automaton(self, state: State) -> SuffixAutomaton:
        """The request's automaton, brought up to date."""
        automaton = self._automata.setdefault(state, SuffixAutomaton())
        for token in state.tokens[len(automaton.tokens) :]:
            automaton.extend(token)
        return automaton

    def forget(self, state: State) -> None:
        self._automata.pop(state, None)

    def close(self) -> None:
        self._automata.clear()
