"""The fields of requests as pydantic models: what is not named here is refused by name, never dropped.

Neighbours: asking.py turns them into SampleOpts. Bounds are those of a small server: large enough for any real client,
small enough that one request cannot take the machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, MOST_TOOLS, MOST_BIASES = 16, 20, 16, 128, 1024
TEXT = 1 << 22  # characters of a text, long before which a prompt is too long for any context

Text = Annotated[StrictStr, Field(max_length=TEXT)]
Name = Annotated[StrictStr, Field(max_length=256)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e9, le=1e9)]
Count = Annotated[StrictInt, Field(ge=0, le=1 << 31)]
Seed = Annotated[StrictInt, Field(ge=-(1 << 63), le=(1 << 64) - 1)]
Stops = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class Fields(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculative(Fields):
    """How a request is drafted for; never what it says. drafter: this one of the model's alone. max_tokens: most
    tokens of a draft."""

    enabled: StrictBool = True
    drafter: Name | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, le=15)] | None = None


class Sampling(Fields):
    """What all kinds of requests say of choosing tokens, under the names of OpenAI's API, vLLM and llama.cpp."""

    temperature: Annotated[Number, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0.0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100.0, le=100.0)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100.0, le=100.0)] | None = None
    logit_bias: Annotated[dict[StrictStr, Number], Field(max_length=MOST_BIASES)] | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    ignore_eos: StrictBool = False
    stop: Stops | Annotated[list[Stops], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MOST_STOPS)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: StrictBool = False
    speculative: Speculative | None = None
    user: Name | None = None


class StreamOptions(Fields):
    """include_usage: a last chunk with the counts."""

    include_usage: StrictBool = False


class JsonSchema(Fields):
    """OpenAI's json_schema object. strict: answers keep to the schema in any case."""

    name: Name = "schema"
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(Fields):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Fields):
    """A tool that a model may call."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: StrictBool | None = None


class Tool(Fields):
    """A function, as OpenAI's API wraps it."""

    type: Literal["function"]
    function: Function


class NamedTool(Fields):
    """tool_choice: this function."""

    class _Name(Fields):
        name: Name

    type: Literal["function"]
    function: _Name


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[StrictInt, Field(ge=1, le=1 << 31)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=1 << 31)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    model: Name
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=64)] | list[Count] | list[list[Count]]
    max_tokens: Annotated[StrictInt, Field(ge=0, le=1 << 31)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: StrictBool = False
    stream_options: StreamOptions | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: a text, or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[Count], Field(max_length=1 << 20)]
