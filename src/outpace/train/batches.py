"""Batches: sequences of about the same length side by side, as arrays that the head's steps read.

Neighbours: data.py has the sequences, eagle3.py computes. Shapes: B sequences, T their most tokens, A their most
anchors. An anchor is a slot from which a draft starts: anchor a of a sequence is position answer - 1 + a, and step j of
its draft guesses the token after position answer + a + j, whose probabilities the target's state there gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..types import I64
from .data import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens: int64 [B, T]; states: float16 [B, T, taps, hidden]; both zero after a sequence's end.

    answers: int64 [B], the answers' first positions. counts: int64 [B], their tokens: as many anchors and labels.
    """

    tokens: I64
    states: NDArray[np.float16]
    answers: I64
    counts: I64

    @property
    def anchors(self) -> int:
        """A."""
        return int(self.counts.max())


def batch_of(sequences: Sequence[Example]) -> Batch:
    """Sequences side by side. Each has at least one token before its answer."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens: I64 = np.zeros((len(sequences), longest), np.int64)
    states = np.zeros((len(sequences), longest, *sequences[0].states.shape[1:]), np.float16)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence.tokens)] = sequence.tokens
        states[i, : len(sequence.tokens)] = sequence.states
    answers: I64 = np.array([sequence.answer for sequence in sequences], np.int64)
    lengths: I64 = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    return Batch(tokens, states, answers, lengths - answers)


def batches(sequences: Sequence[Example], positions: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """One epoch in an order of its own, from batch `start` on: batches of about `positions` anchors, of sequences of
    similar length."""
    rng = random.Random(f"batches {seed}")
    order = list(range(len(sequences)))
    rng.shuffle(order)
    found: list[list[int]] = []
    chunk = 512  # sequences among which lengths are sorted: enough for little padding, few enough to stay mixed
    for at in range(0, len(order), chunk):
        group: list[int] = []
        for i in sorted(order[at : at + chunk], key=lambda i: len(sequences[i].tokens) - sequences[i].answer):
            most = len(sequences[i].tokens) - sequences[i].answer  # ascending: the longest so far
            if group and most * (len(group) + 1) > positions:
                found.append(group)
                group = []
            group.append(i)
        if group:
            found.append(group)
    rng.shuffle(found)
    for group in found[start:]:
        yield batch_of([sequences[i] for i in group])
