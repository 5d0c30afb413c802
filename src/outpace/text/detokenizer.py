"""Streams text out of token ids: no broken character, and nothing after a stop string.

Neighbours: tokenizer.py hands out a `Detokenizer`; the decoding loop feeds it and a `StopMatcher`.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from outpace.types import UsageError


class Detokenizer:
    """Turns ids into text as they come. However the ids are split into pushes, the texts add up to decode(all)."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int] = frozenset()) -> None:
        """token_bytes: the bytes of an id. skipped: ids that leave no text (control tokens)."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # characters complete after each token, ascending

    def push(self, tokens: int | Iterable[int]) -> str:
        """The characters that one more token, or several, complete. The rest waits for the next push."""
        return "".join(self._one(int(i)) for i in (tokens if isinstance(tokens, Iterable) else [tokens]))

    def _one(self, token: int) -> str:
        data = b"" if token in self._skipped else self._token_bytes(token)
        text = self._decoder.decode(data)
        self._ends.append(self.length + len(text))
        return text

    def flush(self) -> str:
        """U+FFFD for a character that never became complete, else nothing. The stream can go on after it."""
        text = self._decoder.decode(b"", final=True)
        if text and self._ends:
            self._ends[-1] += len(text)
        return text

    @property
    def length(self) -> int:
        """Characters given out so far."""
        return self._ends[-1] if self._ends else 0

    def token_at(self, end: int) -> int:
        """Index of the pushed token that completed the first `end` characters (1 <= end <= length)."""
        if not 1 <= end <= self.length:
            raise UsageError(f"character {end} is outside the text's {self.length} characters")
        return bisect_left(self._ends, end)


class StopMatcher:
    """Finds the first stop string in a stream of text and lets nothing of it, or after it, through.

    The stop that is complete first wins; of those complete at the same character, the longest (earliest start). So
    the result does not depend on how the text is split into pushes. Text is held back only while it may be the
    beginning of a stop.

    stop: the stop string found, or None. start, end: where it begins and ends, in characters from the beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise UsageError("stop strings must be a list of non-empty strings")
        # Longest first, so that the first match found at a character is the one that starts earliest.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of each stop's beginning that the text now ends with
        self._held = ""
        self._seen = 0
        self.stop: str | None = None
        self.start = self.end = 0

    def push(self, text: str) -> str:
        """The text that is now known to come before any stop. Empty once a stop was found."""
        if self.stop is not None:
            return ""
        pending = self._held + text
        for at, character in enumerate(text):
            for k, stop in enumerate(self._stops):
                if self._advance(k, character) == len(stop):
                    self.stop, self.end = stop, self._seen + at + 1
                    self.start = self.end - len(stop)
                    self._held = ""
                    return pending[: len(pending) - len(text) + at + 1 - len(stop)]
        self._seen += len(text)
        keep = len(pending) - max(self._matched, default=0)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, k: int, character: str) -> int:
        """One step of Knuth, Morris and Pratt's matcher for stop k (SIAM J. Comput. 6(2), 1977)."""
        stop, matched = self._stops[k], self._matched[k]
        while matched and stop[matched] != character:
            matched = self._borders[k][matched - 1]
        self._matched[k] = matched + (stop[matched] == character)
        return self._matched[k]


def _borders(word: str) -> list[int]:
    """For each prefix of the word: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    for i in range(1, len(word)):
        k = borders[i - 1]
        while k and word[k] != word[i]:
            k = borders[k - 1]
        borders[i] = k + (word[k] == word[i])
    return borders
