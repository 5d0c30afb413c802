"""Ollama's API, so that its clients work unchanged: /api/chat, /api/generate, /api/tags, /api/show, /api/version.

Answers stream by default, one JSON object a line. Source: Ollama's API documentation. What has no meaning here
(keep_alive: the model stays loaded) is accepted where it cannot change an answer; anything else unknown is refused.
Neighbours: as chat.py's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from ..api import Result
from .asking import Asked, Asking
from .chat import Message
from .errors import of, refused
from .fields import MOST_STOPS, MOST_TOOLS, ChatRequest, Fields, Name, Number, Seed, Stops, Text, Tool
from .streaming import merged
from .work import Job


class Options(Fields):
    """Sampling, by Ollama's names. num_ctx: at most what the server was started with."""

    temperature: Annotated[Number, Field(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=1 << 31)] | None = None
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[Number, Field(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0.0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100.0, le=100.0)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100.0, le=100.0)] | None = None
    seed: Seed | None = None
    num_predict: Annotated[StrictInt, Field(ge=-2, le=1 << 31)] | None = None
    num_ctx: Annotated[StrictInt, Field(ge=1)] | None = None
    stop: Annotated[list[Stops], Field(max_length=MOST_STOPS)] | Stops | None = None


class _Asked(Fields):
    model: Name
    stream: StrictBool = True
    format: Any = None
    options: Options | None = None
    keep_alive: Any = None
    think: StrictBool | None = None


class ChatBody(_Asked):
    """POST /api/chat."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None


class GenerateBody(_Asked):
    """POST /api/generate."""

    prompt: Text = ""
    system: Text | None = None
    raw: StrictBool = False


class ShowBody(Fields):
    """POST /api/show."""

    model: Name | None = None
    name: Name | None = None
    verbose: StrictBool = False


def chat_request(asking: Asking, body: _Asked, messages: list[dict[str, Any]], tools: Any = None) -> ChatRequest:
    """The same, as a request of OpenAI's API."""
    options = body.options or Options()
    if options.num_ctx is not None and options.num_ctx > asking.model.target.capacity.positions:
        raise refused(f"num_ctx: the server was started with a context of {asking.model.target.capacity.positions}")
    wanted: Any = None
    if body.format == "json":
        wanted = {"type": "json_object"}
    elif isinstance(body.format, dict):
        wanted = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format not in (None, ""):
        raise refused('format must be "json" or a JSON schema', param="format")
    told = options.model_dump(exclude_none=True, exclude={"num_ctx", "num_predict", "repeat_penalty"})
    if options.repeat_penalty is not None:
        told["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        told["max_tokens"] = options.num_predict
    if body.think is not None:
        told["chat_template_kwargs"] = {"enable_thinking": body.think}
    return ChatRequest(
        model=name_of(asking, body.model), messages=messages, tools=tools, response_format=wanted, **told
    )


def name_of(asking: Asking, name: str) -> str:
    """Ollama's clients add ":latest"."""
    return name.removesuffix(":latest") if name not in asking.names else name


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ollama's messages as OpenAI's. Raises ApiError for images."""
    found = []
    for i, message in enumerate(messages):
        if message.get("images"):
            raise refused(f"message {i} has images: only text is supported", param="messages")
        found.append({k: v for k, v in message.items() if k not in ("images", "thinking", "tool_name")})
    return found


def asked(asking: Asking, body: ChatBody | GenerateBody) -> Asked:
    """The one choice."""
    if isinstance(body, ChatBody):
        return asking.chat(chat_request(asking, body, chat_messages(body.messages), body.tools))
    if body.raw:
        request = chat_request(asking, body, [{"role": "user", "content": ""}])
        asking.check_model(request.model)
        opts = asking.opts(request, max_tokens=request.max_tokens)
        return asking.choices(asking.tokenizer.encode(body.prompt, special=True), request, opts)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return asking.chat(chat_request(asking, body, [*system, {"role": "user", "content": body.prompt}]))


async def lines(body: ChatBody | GenerateBody, found: Asked, jobs: list[Job]) -> AsyncIterator[str]:
    """The answer, an object a line; an error within becomes the last one."""
    try:
        async for each in objects(body, found, jobs):
            yield json.dumps(each, ensure_ascii=False) + "\n"
    except Exception as error:
        yield json.dumps(of(error).ollama()) + "\n"


async def objects(body: ChatBody | GenerateBody, found: Asked, jobs: list[Job]) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces, the last one with counts and durations in nanoseconds."""
    message = Message(found.splitter())
    async for _, delta in merged(jobs):
        for piece in message.take(delta):
            yield _object(body, piece)
    if message.result is not None:
        yield _object(body, {}) | _ending(message, message.result)


async def whole(body: ChatBody | GenerateBody, found: Asked, jobs: list[Job]) -> dict[str, Any]:
    """The answer in one object."""
    message = Message(found.splitter())
    async for _, delta in merged(jobs):
        message.take(delta)
    assert message.result is not None
    calls = {"tool_calls": [{"index": i, **call} for i, call in enumerate(message.calls)]} if message.calls else {}
    thought = {"reasoning": message.reasoning} if message.reasoning else {}
    return _object(body, {"content": message.content, **thought, **calls}) | _ending(message, message.result)


def _object(body: ChatBody | GenerateBody, piece: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    base: dict[str, Any] = {"model": body.model, "created_at": now, "done": False}
    if isinstance(body, GenerateBody):
        thought = {"thinking": piece["reasoning"]} if "reasoning" in piece else {}
        return base | {"response": piece.get("content", "")} | thought
    message: dict[str, Any] = {"role": "assistant", "content": piece.get("content", "")}
    if "reasoning" in piece:
        message["thinking"] = piece["reasoning"]
    if "tool_calls" in piece:
        message["tool_calls"] = [
            {"function": {"name": call["function"]["name"], "arguments": _object_of(call["function"]["arguments"])}}
            for call in piece["tool_calls"]
        ]
    return base | {"message": message}


def _object_of(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"arguments": arguments}


def _ending(message: Message, result: Result) -> dict[str, Any]:
    stats = result.stats
    return {
        "done": True,
        "done_reason": "length" if result.finish_reason == "length" else "stop",
        "total_duration": int(1e9 * (stats.prefill_s + stats.decode_s)),
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": int(1e9 * stats.prefill_s),
        "eval_count": stats.tokens,
        "eval_duration": int(1e9 * stats.decode_s),
    }


def tags(asking: Asking, began: int) -> dict[str, Any]:
    """GET /api/tags: what is served."""
    modified = datetime.fromtimestamp(began, UTC).isoformat().replace("+00:00", "Z")
    return {
        "models": [
            {
                "name": name,
                "model": name,
                "modified_at": modified,
                "size": 0,
                "digest": asking.tokenizer.fingerprint(),
                "details": details(asking),
            }
            for name in asking.names
        ]
    }


def details(asking: Asking) -> dict[str, Any]:
    """What kind of model it is."""
    config = asking.model.config
    return {"format": "outpace", "family": config.architecture, "families": [config.architecture]}


def show(asking: Asking) -> dict[str, Any]:
    """POST /api/show."""
    config, template = asking.model.config, asking.model.template
    return {
        "details": details(asking),
        "template": template.source if template is not None else "",
        "model_info": {
            "general.architecture": config.architecture,
            f"{config.architecture}.context_length": asking.model.target.capacity.positions,
            f"{config.architecture}.embedding_length": config.hidden_size,
            f"{config.architecture}.block_count": config.num_hidden_layers,
        },
        "capabilities": ["completion", *(["tools"] if template is not None and template.mentions("tools") else [])],
    }
