"""A draft that grows token by token, drawn from a model's logits, until one more is not worth its row.

Neighbours: draft_model.py and block.py, which differ in where the logits come from; tree.py grows in breadth, too.
"""

from __future__ import annotations

from ..types import F32, Distribution, Draft
from .base import Want


class Chain:
    """One request's draft in the making; at most `room` tokens."""

    def __init__(self, want: Want, room: int) -> None:
        self.state, self.room = want.state, room
        self.tokens: list[int] = []
        self.goes_on = room > 0
        self._want = want
        self._q: list[Distribution | None] = []
        self._confidence: list[float] = []
        self._reach = 1.0  # chance that all tokens so far are accepted

    @property
    def asks(self) -> bool:
        """Whether anyone asks how sure its tokens are: nobody does of a draft of fixed length."""
        return self._want.worth > 0.0

    def extend(self, logits: F32, sure: float | None = None) -> None:
        """Draws the next token from float32 [vocab_size] as the request's sampler does (coupled noise, or from q).

        sure: how likely it is to be kept, by a source that knows better than its logits.
        """
        sampler = self.state.sampler
        token, q = sampler.draft(logits, self.tokens)
        want = self._want
        self.tokens.append(token)
        self._q.append(q)
        if self.asks:
            sure = sampler.confidence(logits, token) if sure is None else sure
            self._confidence.append(sure)
            self._reach *= sure if want.chances is None else want.chances((sure,))[0]
        # This token is paid for; the question is whether another one is worth its draft and its row.
        self.goes_on = len(self.tokens) < self.room and self._reach >= want.worth + want.step

    def draft(self, source: str) -> Draft:
        sure = tuple(self._confidence) if self.asks else None
        return Draft(tuple(self.tokens), tuple(self._q), source=source, confidence=sure)
