"""How good a head is: on answers that the target gave, how many of its guesses it would have kept.

Neighbours: loop.py trains. Along a greedy answer a chain's guess counts only while all before it were right, so that
the tokens before it are the answer's own: one pass over the answer tells what every round of a real decoding would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..types import I64
from .batches import batch_of
from .data import Example
from .module import HeadModule
from .torch_or_say import torch


@dataclass(slots=True)
class Score:
    """tried[i], kept[i]: rounds in which guess i + 1 was reached, and right. rounds, tokens: of the decoding."""

    tried: list[int]
    kept: list[int]
    rounds: int = 0
    tokens: int = 0
    first: int = 0  # anchors, of all, whose first guess is right
    anchors: int = 0
    by_rank: list[int] = field(default_factory=lambda: [0] * 8)  # anchors whose right token is the head's n-th guess

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, matches: list[list[bool]]) -> None:
        """An answer. matches[a][i]: whether guess i + 1 of a draft from anchor a is right."""
        at = 0
        while at < len(matches):
            kept = 0
            for right in matches[at]:
                self.tried[kept] += 1
                if not right:
                    break
                self.kept[kept] += 1
                kept += 1
                if kept == len(self.tried):
                    break
            self.rounds += 1
            gained = min(kept + 1, len(matches) - at)
            self.tokens += gained
            at += gained


def score(head: HeadModule, lm_head: torch.Tensor, d2t: I64, sequences: Sequence[Example], drafts: int = 7) -> Score:
    """Decodes greedy answers as chains of `drafts` guesses. lm_head: [draft vocabulary, H]."""
    result = Score([0] * drafts, [0] * drafts)
    ids = torch.from_numpy(d2t)
    for start in range(0, len(sequences), 8):
        group = sequences[start : start + 8]
        batch = batch_of(group)
        guesses, ranked = [], None
        with torch.no_grad():
            for final in head.steps(batch, drafts):
                logits = final.to(lm_head.dtype) @ lm_head.T
                if ranked is None:
                    ranked = ids[logits.float().topk(min(8, len(d2t)), -1).indices].numpy()
                guesses.append(ids[logits.argmax(-1)].numpy())
        for b, sequence in enumerate(group):
            answer = sequence.tokens[sequence.answer :]
            # The guess of step j from anchor a is for answer token a + j + 1.
            rows = [
                [bool(guesses[j][b, a] == answer[a + j + 1]) for j in range(drafts) if a + j + 1 < len(answer)]
                for a in range(len(answer) - 1)
            ]
            result.add(rows)
            result.anchors += len(rows)
            result.first += sum(row[0] for row in rows)
            assert ranked is not None
            hits = ranked[b, : len(rows)] == answer[1:, None]
            for rank, count in enumerate(np.asarray(hits).sum(0)):
                result.by_rank[rank] += int(count)
    return result
