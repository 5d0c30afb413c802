"""What is not worth learning from: answers that are too short, loop, leave the prompt's script, or came before.

Neighbours: answers.py and via.py ask for each answer; data.py keeps the counts beside the data. Every rule is about the
text itself and can be told in one line; nothing here is a model.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ..bench.prompts import held_out
from ..types import ModelError

Tokens = Sequence[int] | NDArray[np.int32]

SHORTEST = 6  # tokens; an answer of fewer teaches nothing
MOST_IN_A_ROW = 1000
RUN = 8  # words in a row that no prompt may share with the held-out ones
_CODE = re.compile(r"```.*?(```|\Z)", re.DOTALL)
_MARKUP = frozenset("|-_=*#>`~+.:")  # of tables, headings and lists: neither for nor against
_JAPANESE = ("HIRAGANA", "KATAKANA")


class Filter:
    """Decides which answers are kept. left_out: how many are not, by reason.

    known: digests of the answers that are kept already.
    """

    def __init__(self, known: Iterable[bytes] = ()) -> None:
        self.left_out: Counter[str] = Counter()
        self._known = set(known)
        self._in_a_row = 0

    def keeps(self, tokens: Tokens, text: str | None, asked: str) -> bool:
        """Whether an answer is kept. tokens: up to where it begins to loop. text: None where nothing can be read, as
        without a tokenizer. asked: all that was said before."""
        reason = ""
        if len(tokens) < SHORTEST:
            reason = "too short"
        elif text is not None and not_text(text):
            reason = "no text"
        elif text is not None and foreign(text, asked):
            reason = "another script"
        elif digest(tokens) in self._known:
            reason = "said before"
        if reason:
            self.leave_out(reason)
            return False
        self._known.add(digest(tokens))
        self._in_a_row = 0
        return True

    def leave_out(self, reason: str) -> None:
        """Counts what is left out. Raises ModelError when nothing else comes: it could go on for ever."""
        self.left_out[reason] += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise ModelError(f"the last {MOST_IN_A_ROW} prompts or answers could not be used: {told(self.left_out)}")


def told(left_out: Mapping[str, int]) -> str:
    """Counts in words: the most frequent reason first."""
    return ", ".join(f"{reason} {count:,}" for reason, count in Counter(left_out).most_common())


def digest(tokens: Tokens) -> bytes:
    """Eight bytes that tell answers apart."""
    return blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()


def loop_start(tokens: Sequence[int], most: int = 48, times: int = 3, least: int = 24) -> int | None:
    """Where the loop into which the text has fallen comes round for the second time; None where it is in none.

    A loop is an end that repeats with a period of at most `most` tokens, `times` times and over `least` tokens.
    """
    n = len(tokens)
    for period in range(1, most + 1):
        span = max(times * period, least)
        if n < span or tokens[n - 1] != tokens[n - 1 - period]:
            continue
        begin = n - 1 - period
        while begin >= 0 and tokens[begin] == tokens[begin + period]:
            begin -= 1
        begin += 1  # the first token of the periodic end
        if n - begin >= span:
            return begin + period
    return None


def not_text(text: str) -> bool:
    """Whether a text is mostly something else: over 2 % of characters that nobody writes, or under 30 % letters and
    digits among those that are neither spaces nor markup."""
    if not text.strip():
        return True
    kinds = Counter(unicodedata.category(c)[0] for c in text if c not in _MARKUP and not c.isspace())
    odd = kinds["C"] + text.count("\ufffd")
    return odd > 0.02 * len(text) or kinds["L"] + kinds["N"] + kinds["M"] < 0.3 * kinds.total()


def foreign(answer: str, asked: str) -> bool:
    """Whether most letters of an answer, code aside, are of a script that does not occur in what was asked. Questions
    about translation may be answered in any."""
    found, known = scripts(_CODE.sub("", answer)), scripts(asked)
    if found.total() < 10 or not known or "translat" in asked.lower():
        return False
    script, count = found.most_common(1)[0]
    return script not in known and count > found.total() / 2


def scripts(text: str) -> Counter[str]:
    """How many letters a text has of each script. Japanese counts as one with Chinese."""
    return Counter(map(_script, filter(str.isalpha, text)))


@lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str:
    """The first word of the letter's Unicode name: LATIN, CYRILLIC, CJK, ..."""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if name in _JAPANESE else name


class HeldOutRuns:
    """The runs of eight words of the held-out prompts, which nothing that is learnt from may contain."""

    def __init__(self) -> None:
        self._runs = set[tuple[str, ...]]().union(
            *(_runs(message["content"]) for prompt in held_out() for message in prompt.messages)
        )

    def in_(self, text: str) -> bool:
        """Whether a text shares one."""
        return not self._runs.isdisjoint(_runs(text))


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
