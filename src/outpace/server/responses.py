"""POST /v1/responses, as OpenAI's API reference describes it: text, tools, structured answers, streaming.

Neighbours: as chat.py's. Nothing is stored: `store` may only be false, and a previous response cannot be named.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from .asking import Asked, Asking
from .chat import Message
from .errors import of, refused
from .fields import MOST_TOOLS, ChatRequest, Fields, Name, Number, Seed, Speculative, Text
from .streaming import merged
from .telling import new_id
from .work import Job


class FunctionTool(Fields):
    """A function; this API does not wrap it."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedFunction(Fields):
    """tool_choice: this function."""

    type: Literal["function"]
    name: Name


class TextFormat(Fields):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(Fields):
    """How the text is."""

    format: TextFormat | None = None


class Body(Fields):
    """The request."""

    model: Name
    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[Number, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    seed: Seed | None = None
    stream: StrictBool = False
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: StrictBool = True
    text: TextOptions | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    user: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculative: Speculative | None = None


def asked(asking: Asking, body: Body) -> Asked:
    """The one choice."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            _add(i, item, messages)
    tools: Any = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    return asking.chat(
        ChatRequest(
            model=body.model,
            messages=messages,
            max_completion_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=_format(body),
            chat_template_kwargs=body.chat_template_kwargs,
            speculative=body.speculative,
        )
    )


def _format(body: Body) -> Any:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        raise refused("text.format json_schema needs a schema", param="text.format")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "schema", "schema": wanted.schema_}}


def _add(i: int, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """An item of the input as a message of the chat API."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = "".join(_text(i, part) for part in content)
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})
    elif kind != "reasoning":  # earlier thoughts are not shown to the model again
        raise refused(f"input {i}: items of type {kind!r:.40} are not supported", param="input")


def _text(i: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
        raise refused(f"input {i}: a content part is {kind!r:.40}; only text is supported", param="input")
    return str(part["text"])


class _Response:
    """The response in the making: its items, in order."""

    def __init__(self, body: Body, found: Asked) -> None:
        self.body, self.message = body, Message(found.splitter())
        self.output: list[dict[str, Any]] = []
        self.base: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": body.top_p,
        }

    def told(self, status: str) -> dict[str, Any]:
        """As it is now."""
        found = self.base | {"status": status, "output": self.output, "usage": None}
        result = self.message.result
        if result is None:
            return found
        if result.finish_reason == "length":
            found |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        prompt, tokens = len(result.prompt_ids), len(result.token_ids)
        found["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": result.stats.cached_prompt_tokens},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }
        return found


def _new_item(kind: str, piece: dict[str, Any]) -> dict[str, Any]:
    if kind == "function_call":
        call = piece["tool_calls"][0]
        item = {"id": new_id("fc"), "type": kind, "status": "in_progress", "call_id": call["id"]}
        return item | {"name": call["function"]["name"], "arguments": ""}
    if kind == "reasoning":
        return {"id": new_id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
    return {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}


async def answer(body: Body, found: Asked, jobs: list[Job]) -> dict[str, Any]:
    """The whole answer."""
    last: dict[str, Any] = {}
    async for event in _events(body, found, jobs):
        last = event
    response: dict[str, Any] = last["response"]
    return response


async def events(body: Body, found: Asked, jobs: list[Job]) -> AsyncIterator[str]:
    """The answer as named server-sent events; an error within becomes the last one."""
    number = 0
    try:
        async for each in _events(body, found, jobs):
            yield _sse(each, number)
            number += 1
    except Exception as error:
        told = of(error)
        yield _sse(
            {"type": "error", "code": told.code or told.kind, "message": told.message, "param": told.param}, number
        )


def _sse(event: dict[str, Any], number: int) -> str:
    data = json.dumps(event | {"sequence_number": number}, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n"


async def _events(body: Body, found: Asked, jobs: list[Job]) -> AsyncIterator[dict[str, Any]]:
    response = _Response(body, found)
    yield {"type": "response.created", "response": response.told("in_progress")}
    yield {"type": "response.in_progress", "response": response.told("in_progress")}
    open_kind = ""
    async for _, delta in merged(jobs):
        for piece in response.message.take(delta):
            kind = "function_call" if "tool_calls" in piece else "reasoning" if "reasoning" in piece else "message"
            if kind != open_kind or kind == "function_call":
                for event in _closed(response, open_kind):
                    yield event
                open_kind = kind
                response.output.append(_new_item(kind, piece))
                at, item = len(response.output) - 1, response.output[-1]
                yield {"type": "response.output_item.added", "output_index": at, "item": json.loads(json.dumps(item))}
                if kind != "function_call":
                    part = _part(kind, "")
                    item["content"].append(part)
                    where = {"item_id": item["id"], "output_index": at, "content_index": 0}
                    yield {"type": "response.content_part.added", **where, "part": dict(part)}
            yield _grown(response, kind, piece)
    for event in _closed(response, open_kind):
        yield event
    told = response.told("completed")
    yield {"type": f"response.{told['status']}", "response": told}


def _part(kind: str, text: str) -> dict[str, Any]:
    return (
        {"type": "reasoning_text", "text": text}
        if kind == "reasoning"
        else {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [],
        }
    )


def _grown(response: _Response, kind: str, piece: dict[str, Any]) -> dict[str, Any]:
    at, item = len(response.output) - 1, response.output[-1]
    where = {"item_id": item["id"], "output_index": at}
    if kind == "function_call":
        item["arguments"] = piece["tool_calls"][0]["function"]["arguments"]
        return {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
    text = piece["reasoning" if kind == "reasoning" else "content"]
    item["content"][0]["text"] += text
    name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
    return {"type": name, **where, "content_index": 0, "delta": text} | (
        {} if kind == "reasoning" else {"logprobs": []}
    )


def _closed(response: _Response, kind: str) -> list[dict[str, Any]]:
    """The events that end the newest item."""
    if not kind:
        return []
    at, item = len(response.output) - 1, response.output[-1]
    item["status"] = "completed"
    where: dict[str, Any] = {"item_id": item["id"], "output_index": at}
    found: list[dict[str, Any]] = []
    if kind == "function_call":
        found.append(
            {
                "type": "response.function_call_arguments.done",
                **where,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        )
    else:
        part = item["content"][0]
        where["content_index"] = 0
        name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
        found.append({"type": name, **where, "text": part["text"]} | ({} if kind == "reasoning" else {"logprobs": []}))
        found.append({"type": "response.content_part.done", **where, "part": part})
    return [*found, {"type": "response.output_item.done", "output_index": at, "item": item}]
