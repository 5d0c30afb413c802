"""An answer's text apart: what is thought, what is said, and which tools are called, while it comes.

Neighbours: chat.py and the other APIs feed it. Formats: <think> ... </think> and Hermes' <tool_call> {json}
</tool_call>, as Qwen3's chat template writes them. A tag that is not complete yet is held back, never shown.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Literal

Kind = Literal["reasoning", "content", "call"]
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model calls. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the answer: text of its kind, or a call."""

    kind: Kind
    text: str = ""
    call: Call | None = None


class Splitter:
    """Takes text as it comes and gives the parts that are certain."""

    def __init__(self, *, tools: bool = False, thinking: bool = False) -> None:
        """tools: whether calls are looked for. thinking: the prompt has opened the thought already."""
        self._tools = tools
        self._state: Literal["start", "reasoning", "content", "call"] = "reasoning" if thinking else "start"
        self._held = ""
        self._said = False  # whether something but white space was said: what stands between calls is none
        self._fresh = True  # white space at a thought's beginning, and between thought and answer, is not part of them
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        """More text."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """No more text: what was held back comes out as what it is."""
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._state == "call":  # cut off within a call
            self._close_call(held, parts, closed="")
        else:
            self._fresh = self._fresh and self._state != "start"
            kind: Kind = "reasoning" if self._state == "reasoning" else "content"
            self._say(held.rstrip() if kind == "reasoning" else held, kind, parts)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """One step; False when more text is needed."""
        if self._state == "start":
            begin = self._held.lstrip()
            if begin.startswith(THINK):
                self._held, self._state = begin[len(THINK) :], "reasoning"
                return True
            if THINK.startswith(begin):
                return False
            self._state, self._fresh = "content", False
            return True
        if self._state == "reasoning":
            return self._until(THOUGHT, "reasoning", "content", parts)
        if self._state == "content":
            if self._tools:
                return self._until(CALL, "content", "call", parts)
            self._say(self._held, "content", parts)
            self._held = ""
            return False
        body, tag, rest = self._held.partition(CALLED)
        if tag:
            self._held, self._state = rest, "content"
            self._close_call(body, parts)
        return bool(tag)

    def _until(self, tag: str, kind: Kind, after: Literal["content", "call"], parts: list[Part]) -> bool:
        """Says what comes before the tag; where the tag is complete, goes on after it."""
        body, found, rest = self._held.partition(tag)
        if found:
            self._say(body.rstrip() if kind == "reasoning" or after == "call" else body, kind, parts)
            self._held, self._state = rest, after
            self._fresh = after == "content"
            return True
        keep = next(n for n in range(min(len(tag) - 1, len(body)), -1, -1) if tag.startswith(body[len(body) - n :]))
        sure = body[: len(body) - keep]
        # White space may be what stands before the tag: it waits for what follows.
        sure = sure.rstrip() if kind == "reasoning" or self._tools else sure
        self._held = body[len(sure) :]
        self._say(sure, kind, parts)
        return False

    def _say(self, text: str, kind: Kind, parts: list[Part]) -> None:
        if self._fresh:
            text = text.lstrip()
        if not text or (self.calls and kind == "content" and not text.strip()):
            return
        self._fresh = False
        parts.append(Part(kind, text))

    def _close_call(self, body: str, parts: list[Part], closed: str = CALLED) -> None:
        call = read_call(body)
        if call is None:  # the model wrote something else between the tags: then it is text
            self._say(f"{CALL}{body}{closed}", "content", parts)
        else:
            self.calls += 1
            parts.append(Part("call", call=call))


def read_call(body: str) -> Call | None:
    """The call that stands between the tags; None where there is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{secrets.token_hex(12)}", found["name"], arguments)
