"""POST /v1/chat/completions, as OpenAI's API reference describes it, streaming included.

Neighbours: asking.py makes the answers, work.py runs them, parts.py takes their text apart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ..api import Delta, Result
from .asking import Asked, Asking
from .fields import ChatRequest
from .parts import Part, Splitter
from .streaming import merged
from .telling import chat_logprobs, timings, usage
from .work import Job


class Message:
    """A choice's message in the making."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self.content, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []
        self.result: Result | None = None

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """What a round added, as a stream's deltas."""
        parts = self._splitter.push(delta.text)
        if delta.result is not None:
            self.result = delta.result
            parts += self._splitter.finish()
        return [self._add(part) for part in parts]

    def _add(self, part: Part) -> dict[str, Any]:
        if part.call is not None:
            call = {
                "id": part.call.id,
                "type": "function",
                "function": {"name": part.call.name, "arguments": part.call.arguments},
            }
            self.calls.append(call)
            return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}
        if part.kind == "reasoning":
            self.reasoning += part.text
            return {"reasoning": part.text, "reasoning_content": part.text}
        self.content += part.text
        return {"content": part.text}

    @property
    def finish_reason(self) -> str:
        """As OpenAI's API names it."""
        reason = self.result.finish_reason if self.result is not None else "stop"
        return "tool_calls" if self.calls and reason == "stop" else reason

    def whole(self) -> dict[str, Any]:
        """The finished message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.calls:
            message["tool_calls"] = self.calls
        return message


async def answer(asking: Asking, body: ChatRequest, asked: Asked, jobs: list[Job]) -> dict[str, Any]:
    """The whole answer."""
    messages = [Message(asked.splitter()) for _ in jobs]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in jobs]
    async for i, delta in merged(jobs):
        messages[i].take(delta)
        logprobs[i] += chat_logprobs(asking.tokenizer, delta.logprobs)
    results = [message.result for message in messages if message.result is not None]
    return {
        **asking.stamp("chatcmpl", "chat.completion", body.model),
        "choices": [
            {
                "index": i,
                "message": message.whole(),
                "logprobs": {"content": logprobs[i], "refusal": None} if body.logprobs else None,
                "finish_reason": message.finish_reason,
            }
            for i, message in enumerate(messages)
        ],
        "usage": usage(results),
        "timings": timings(results[0].stats),
    }


async def stream(asking: Asking, body: ChatRequest, asked: Asked, jobs: list[Job]) -> AsyncIterator[dict[str, Any]]:
    """The answer in chunks."""
    counted = body.stream_options is not None and body.stream_options.include_usage
    base = asking.stamp("chatcmpl", "chat.completion.chunk", body.model)

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish} | more
        return base | {"choices": [choice]} | ({"usage": None} if counted else {})

    messages = [Message(asked.splitter()) for _ in jobs]
    for i in range(len(jobs)):
        yield chunk(i, {"role": "assistant", "content": ""})
    async for i, delta in merged(jobs):
        pieces = messages[i].take(delta)
        logprobs = chat_logprobs(asking.tokenizer, delta.logprobs)
        accepted = {"accepted": delta.accepted, "tokens": len(delta.token_ids)}
        if logprobs and not pieces:
            pieces = [{}]
        for k, piece in enumerate(pieces):
            more: dict[str, Any] = {"logprobs": {"content": logprobs, "refusal": None}} if logprobs and not k else {}
            yield chunk(i, piece, **more) | ({"speculation": accepted} if not k else {})
        if delta.result is not None:
            yield chunk(i, {}, messages[i].finish_reason) | {"timings": timings(delta.result.stats)}
    if counted:
        results = [message.result for message in messages if message.result is not None]
        yield base | {"choices": [], "usage": usage(results)}
