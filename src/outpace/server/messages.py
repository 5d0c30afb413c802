"""POST /v1/messages, as Anthropic's API reference describes it: text, thinking, tools, streaming.

Neighbours: as chat.py's. Content blocks of other kinds than text, tool_use and tool_result are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from .asking import Asked, Asking
from .chat import Message
from .errors import of, refused
from .fields import MOST_STOPS, MOST_TOOLS, ChatRequest, Fields, Name, Number, Stops, Text
from .streaming import merged
from .telling import new_id
from .work import Job


class ToolSpec(Fields):
    """A tool."""

    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class ToolChoice(Fields):
    """Whether and which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: StrictBool = False


class Thinking(Fields):
    """Whether the model thinks before it answers. budget_tokens cannot be kept to and is refused."""

    type: Literal["enabled", "disabled"]


class TextBlock(Fields):
    """A piece of the system prompt."""

    type: Literal["text"]
    text: Text
    cache_control: dict[str, Any] | None = None


class Metadata(Fields):
    """Whose request it is."""

    user_id: Name | None = None


class Body(Fields):
    """The request."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[StrictInt, Field(ge=1, le=1 << 31)]
    system: Text | list[TextBlock] | None = None
    temperature: Annotated[Number, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=1 << 31)] | None = None
    stop_sequences: Annotated[list[Stops], Field(max_length=MOST_STOPS)] | None = None
    stream: StrictBool = False
    tools: Annotated[list[ToolSpec], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None


def asked(asking: Asking, body: Body) -> Asked:
    """The one choice."""
    system = body.system if isinstance(body.system, str) else "".join(block.text for block in body.system or ())
    messages = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        messages += _converted(i, message)
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in body.tools or ()
    ]
    choice: Any = None
    if body.tool_choice is not None:
        kind = body.tool_choice.type
        choice = {"auto": "auto", "none": "none", "any": "required"}.get(kind)
        if kind == "tool":
            choice = {"type": "function", "function": {"name": body.tool_choice.name or ""}}
    more: dict[str, Any] = {}
    if body.thinking is not None:
        more["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    return asking.chat(
        ChatRequest(
            model=body.model,
            messages=messages,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
            **more,
        )
    )


def _converted(i: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as OpenAI's API has it: results of tools become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise refused(f"message {i}: role is {role!r:.40}, not user or assistant", param="messages")
    if unknown := sorted(message.keys() - {"role", "content"}):
        raise refused(f"message {i}: unknown parameter: {unknown[0]:.40}", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise refused(f"message {i}: content must be a text or a list of blocks", param="messages")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            results.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _result(i, block)}
            )
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            continue  # earlier thoughts are not shown to the model again
        else:
            raise refused(
                f"message {i}: a content block is {kind!r:.40}; only text and tools are supported", param="messages"
            )
    found = results
    if texts or calls:
        found = [*results, {"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})]
    return found


def _result(i: int, block: dict[str, Any]) -> str:
    content = block.get("content", "")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(c, dict) and isinstance(c.get("text"), str) for c in content):
        return "".join(c["text"] for c in content)
    raise refused(f"message {i}: a tool's result must be text", param="messages")


def _stop(message: Message) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(
        message.finish_reason, "end_turn"
    )
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(message: Message) -> dict[str, int]:
    stats = message.result.stats if message.result is not None else None
    return {"input_tokens": stats.prompt_tokens if stats else 0, "output_tokens": stats.tokens if stats else 0}


async def answer(body: Body, found: Asked, jobs: list[Job]) -> dict[str, Any]:
    """The whole answer."""
    message = Message(found.splitter())
    async for _, delta in merged(jobs):
        message.take(delta)
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        content.append({"type": "text", "text": message.content})
    for call in message.calls:
        function = call["function"]
        content.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": content,
        **_stop(message),
        "usage": _usage(message),
    }


async def events(body: Body, found: Asked, jobs: list[Job]) -> AsyncIterator[str]:
    """The answer as named server-sent events; an error within becomes the last one."""
    try:
        async for each in _events(body, found, jobs):
            yield f"event: {each['type']}\ndata: {json.dumps(each, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"event: error\ndata: {json.dumps(of(error).anthropic())}\n\n"


async def _events(body: Body, found: Asked, jobs: list[Job]) -> AsyncIterator[dict[str, Any]]:
    start: dict[str, Any] = {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(found.prompt_ids), "output_tokens": 0},
    }
    yield {"type": "message_start", "message": start}
    message = Message(found.splitter())
    index, open_kind = -1, ""
    async for _, delta in merged(jobs):
        for piece in message.take(delta):
            kind = "thinking" if "reasoning" in piece else "tool_use" if "tool_calls" in piece else "text"
            if kind != open_kind or kind == "tool_use":
                if open_kind:
                    yield {"type": "content_block_stop", "index": index}
                index, open_kind = index + 1, kind
                yield {"type": "content_block_start", "index": index, "content_block": _opened(kind, piece)}
            yield {"type": "content_block_delta", "index": index, "delta": _delta(kind, piece)}
    if open_kind:
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _stop(message), "usage": _usage(message)}
    yield {"type": "message_stop"}


def _opened(kind: str, piece: dict[str, Any]) -> dict[str, Any]:
    if kind == "tool_use":
        call = piece["tool_calls"][0]
        return {"type": kind, "id": call["id"], "name": call["function"]["name"], "input": {}}
    return {"type": kind, kind: ""}


def _delta(kind: str, piece: dict[str, Any]) -> dict[str, Any]:
    if kind == "tool_use":
        return {"type": "input_json_delta", "partial_json": piece["tool_calls"][0]["function"]["arguments"]}
    if kind == "thinking":
        return {"type": "thinking_delta", "thinking": piece["reasoning"]}
    return {"type": "text_delta", "text": piece["content"]}
