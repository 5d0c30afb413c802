"""How a head of heads/reference.py drafts along a text, for tests: read what the target left behind, then guess.

slots = extend(head, features, tokens, cache)     what the target's pass left behind, committed
guesses = draft(head, slots, n, choose, cache)    the cache is as before afterwards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.cache import KVCache
from outpace.heads.reference import AutoregressiveHead, BlockHead, Head
from outpace.types import F32

Choose = Callable[[F32], int]  # logits float32 [draft vocabulary] -> target token id


@dataclass(frozen=True, slots=True)
class Slots:
    """What `extend` computed. token: the newest one, which follows the last feature.

    logits: float32 [n, draft vocabulary] and hidden: float32 [n, H] of each slot; none (n = 0) for dflash.
    """

    token: int
    logits: F32
    hidden: F32


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft token: the target id chosen of logits float32 [draft vocabulary]; hidden float32 [H].

    confidence: the head's own estimate that it is kept, where it has one.
    """

    token: int
    logits: F32
    hidden: F32
    confidence: float | None = None


def target_id(head: Head, draft_id: int) -> int:
    """The target's id of a draft vocabulary entry."""
    return draft_id if head.d2t is None else int(head.d2t[draft_id])


def first_state(head: Head) -> F32:
    """What the recurrent Markov head begins a block with: zeros [R]."""
    return np.zeros(head.config.markov_rank, np.float32)


def extend(head: Head, features: F32, tokens: Sequence[int], cache: KVCache) -> Slots:
    """Commits the next n slots: features float32 [n, taps * T], tokens [n], each the one after its feature."""
    assert features.shape == (len(tokens), head.config.feature_width)
    if isinstance(head, BlockHead):
        head.read(features, cache)
        none = np.zeros((0, head.config.draft_vocab_size), np.float32)
        return Slots(tokens[-1], none, np.zeros((0, head.config.layers.hidden_size), np.float32))
    assert isinstance(head, AutoregressiveHead)
    rows = [step(head, token, head.fuse(row), cache) for token, row in zip(tokens, features, strict=True)]
    return Slots(tokens[-1], np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))


def step(head: AutoregressiveHead, token: int, hidden: F32, cache: KVCache) -> tuple[F32, F32]:
    """The next slot, committed: token with a feature [H]. Result as `AutoregressiveHead.row`."""
    cache.append(1)
    result = head.row(token, hidden, 0, np.arange(cache.length + 1), cache)
    cache.commit([0])
    return result


def draft(head: Head, slots: Slots, n: int, choose: Choose, cache: KVCache) -> list[Guess]:
    """At most n guesses for the tokens after slots.token; the cache's committed slots stay as they are."""
    guesses: list[Guess] = []
    if isinstance(head, BlockHead):  # computed whole: its rows see each other
        skip = 0 if head.config.sample_from_anchor else 1
        before, state = slots.token, first_state(head)
        block = head.block(slots.token, cache)
        if skip:
            _, state = head.markov(before, block[0], state)
        for row in block[skip : skip + n]:
            bias, state = head.markov(before, row, state)
            logits = head.layers.logits(row) + bias
            confidence = head.confidence(before, row)
            before = choose(logits)
            guesses.append(Guess(before, logits, row, confidence))
        return guesses
    assert isinstance(head, AutoregressiveHead)
    length = cache.length
    logits, hidden = slots.logits[-1], slots.hidden[-1]
    while len(guesses) < n:
        if guesses:
            logits, hidden = step(head, guesses[-1].token, hidden, cache)
        guesses.append(Guess(choose(logits), logits, hidden))
    cache.truncate(length)
    return guesses
