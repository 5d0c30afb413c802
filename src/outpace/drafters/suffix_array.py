"""Suffix array: the places of a text, sorted by the tokens that follow. Its neighbour datastore.py searches in it.

Sorted by the first `depth` tokens only, which is all that a drafter's match needs; equal beginnings stay in the order
of the text. Built group by group: those suffixes are sorted together whose first tokens lie in one range, so that the
memory depends on the group and not on the text. Source: Manber and Myers 1990 for suffix arrays; the sort is an MSD
radix sort down to groups, then as many tokens at a time as fit into one 64-bit key beside the rank so far.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
Tokens = NDArray[np.unsignedinteger]

DEPTH = 16
GROUP = 2 << 20  # suffixes sorted together: about 50 bytes each
_STRIDE = 4 << 20  # tokens looked at together when they are counted and picked


def sorted_suffixes(tokens: Tokens, end: int, *, depth: int = DEPTH, group: int = GROUP) -> Iterator[U32]:
    """The places of all tokens but `end`, which closes each document, in the order of the `depth` tokens from there on.

    tokens: uint16 or uint32, none above `end`, less than 2**32 - depth of them. Yields uint32 pieces.

    Memory beside the tokens and their copy: 50 bytes * group (at least a 32nd of the text), and 13 bytes for each
    suffix whose first token alone makes up more than a group. Time: proportional to the text, with one more look at it
    for each group.
    """
    count = len(tokens)
    group = max(group, count // 32)  # bounds the looks
    # What lies beyond the text reads as its end.
    tokens = np.concatenate([tokens, np.full(depth, end, tokens.dtype)])
    for low, high in _ranges(_count(tokens[:count], end), group):
        waiting = [(_places(tokens[:count], low, high), 0)]
        while waiting:  # a part and how many first tokens all of its suffixes share; in order, the first one last
            places, shared = waiting.pop()
            if shared == depth:  # nothing tells them apart: they are in the text's order already
                yield places
                continue
            if len(places) <= group:
                yield _sort(tokens, places, end, depth, shared)
                continue
            following = tokens[places + np.uint32(shared)]
            ranges = list(_ranges(_count(following, end + 1), group))
            if len(ranges) == 1:
                waiting.append((places, shared + 1))
                continue
            parts = [(places[(following >= low) & (following < high)], shared) for low, high in ranges]
            del places, following
            waiting.extend(reversed(parts))
            del parts


def _count(tokens: Tokens, limit: int) -> NDArray[np.int64]:
    """How often each token below `limit` occurs: int64 [limit]."""
    counts = np.zeros(limit, np.int64)
    for at in range(0, len(tokens), _STRIDE):
        counts += np.bincount(tokens[at : at + _STRIDE], minlength=limit)[:limit]
    return counts


def _ranges(counts: NDArray[np.int64], group: int) -> Iterator[tuple[int, int]]:
    """Ranges [low, high) of tokens that occur at most `group` times together, or of one that occurs more often."""
    low, held = -1, 0
    present = np.flatnonzero(counts).tolist()
    for token, n in zip(present, counts[present].tolist(), strict=True):
        if low >= 0 and held + n > group:
            yield low, token
            low = -1
        if low < 0:
            low, held = token, 0
        held += n
    if low >= 0:
        yield low, present[-1] + 1


def _places(tokens: Tokens, low: int, high: int) -> U32:
    """The places of the tokens in [low, high), ascending."""
    found = []
    for at in range(0, len(tokens), _STRIDE):
        piece = tokens[at : at + _STRIDE]
        found.append((np.flatnonzero((piece >= low) & (piece < high)) + at).astype(np.uint32))
    return np.concatenate(found)


def _sort(tokens: Tokens, places: U32, end: int, depth: int, shared: int) -> U32:
    """The places in the order of the tokens from `shared` to `depth`, then of the text."""
    width = max(1, end.bit_length())
    tied = np.arange(len(places))  # whose order is not certain yet
    rank = np.zeros(len(places), np.uint64)  # of those: equal where all tokens so far are
    rank_width = 0
    while len(tied) and shared < depth:
        taken = min((64 - rank_width) // width, depth - shared)
        keys, here = rank, places[tied]
        for ahead in range(shared, shared + taken):
            keys = keys << np.uint64(width) | tokens[here + np.uint32(ahead)]
        shared += taken
        tied, rank = _settle(places, tied, keys)
        rank_width = int(rank[-1]).bit_length() if len(rank) else 0
    if len(tied):
        _settle(places, tied, rank << np.uint64(32) | places[tied])
    return places


def _settle(
    places: U32, tied: NDArray[np.int64], keys: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Orders the tied places by their keys; returns those that are still tied, and their ranks.

    Keys begin with the rank so far, so that each place stays among those that it was tied with.
    """
    order = np.argsort(keys)
    places[tied] = places[tied[order]]
    keys = keys[order]
    same = np.zeros(len(keys) + 1, np.bool_)
    same[1:-1] = keys[1:] == keys[:-1]
    still = same[1:] | same[:-1]
    # A rank for each run of equal keys, counted from 0 among those that remain.
    rank = np.cumsum(~same[:-1][still]).astype(np.uint64) - np.uint64(1)
    return tied[still], rank
