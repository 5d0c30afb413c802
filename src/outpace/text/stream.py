"""Emitted tokens -> text that may be shown: whole characters, nothing of a stop string or after it."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizer, StopMatcher


class TextStream:
    """The text of one answer. decode.py pushes tokens, the caller takes what is ready."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._ready: list[str] = []
        self._done: list[str] = []

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Takes one token; True once a stop string is complete. may_stop False: its text passes unwatched."""
        text = self._detokenizer.push(token)
        self._ready.append(self._matcher.push(text) if may_stop else text)
        return self._matcher.stop is not None

    def finish(self) -> None:
        """No more tokens: what was held back comes out, unless a stop string ended the text."""
        if self._matcher.stop is None:
            self._ready.append(self._matcher.push(self._detokenizer.flush()))
            self._ready.append(self._matcher.flush())

    def take(self) -> str:
        """Text that became ready since the last call."""
        text = "".join(self._ready)
        self._done.append(text)
        self._ready.clear()
        return text

    @property
    def text(self) -> str:
        """All text so far."""
        self.take()
        self._done = ["".join(self._done)]
        return self._done[0]

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.stop
