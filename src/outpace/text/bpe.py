"""Byte-level BPE of short texts by the native core: what the first prompts need, at once.

The library's own encoder first takes all merges over, which is a tenth of a start (45 ms for 49,000 of them). Here its
normalizer and pre-tokenizer cut a text into words and the core (csrc/vocabulary.h) encodes them, to the same ids; tests
compare the two. Neighbours: vocabulary.py holds the lists, tokenizer.py asks here first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outpace.text.vocabulary import Vocabulary

BUDGET = 4000  # characters in all: from there on the library's speed is worth its wait
LONGEST_WORD = 64  # characters; joining takes their square


class ShortTexts:
    """Encodes a few short texts; says so when it is the library's turn."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names = {vocabulary.tokens[i]: i for i in vocabulary.added}
        self._left = BUDGET

    def encode(self, text: str, *, special: bool) -> list[int] | None:
        """Token ids, None for the library's turn. special: names of control tokens stand for these tokens."""
        self._left -= len(text)
        if self._left < 0:
            return None
        ids: list[int] = []
        for part in self._parts(text, special):
            if isinstance(part, int):
                ids.append(part)
                continue
            normalizer = self._vocabulary.normalizer
            normal = part if normalizer is None else normalizer.normalize_str(part)
            for word, _ in self._vocabulary.splitter.pre_tokenize_str(normal):
                if len(word) > LONGEST_WORD:
                    return None
                ids += self._vocabulary.bpe.encode(word, self._vocabulary.ignore_merges)
        return ids

    def _parts(self, text: str, special: bool) -> Iterator[str | int]:
        """The text cut at the added tokens written in it, the longest where several begin at one place."""
        names = sorted((name for name in self._names if name in text), key=len, reverse=True)
        done = 0
        for found in re.finditer("|".join(map(re.escape, names)), text) if names else ():
            i = self._names[found[0]]
            if i in self._vocabulary.control and not special:  # stays text, and so does what it covers
                continue
            if found.start() > done:
                yield text[done : found.start()]
            yield i
            done = found.end()
        if done < len(text):
            yield text[done:]
