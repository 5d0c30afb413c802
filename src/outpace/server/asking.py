"""From a request's fields to answers in the making: sampling options, prompts, grammars, tools.

Neighbours: fields.py names the fields, chat.py and the other APIs call this, work.py runs what is made here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api import Answer, LanguageModel
from ..text.grammar import Grammars, check_schema
from ..types import Constraint, SampleOpts, UsageError
from .errors import ApiError, refused
from .fields import ChatRequest, NamedTool, ResponseFormat, Sampling, Tool
from .parts import CALL, CALLED, THINK, THOUGHT, Splitter
from .telling import new_id


@dataclass(slots=True)
class Asked:
    """What a request comes to. makes: one call for each choice, which submits it to the engine."""

    makes: list[Callable[[], Answer]]
    prompt_ids: list[int]
    tools: bool = False
    thinking: bool = False

    def splitter(self) -> Splitter:
        """For a choice's text."""
        return Splitter(tools=self.tools, thinking=self.thinking)


class Asking:
    """Turns requests into answers of one model, which is known under `names`."""

    def __init__(self, model: LanguageModel, names: Sequence[str]) -> None:
        self.model, self.names = model, tuple(names)
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise UsageError("a server needs a model with a tokenizer")
        self.tokenizer = tokenizer
        self.fingerprint = f"fp_{tokenizer.fingerprint()[:12]}"
        self.grammars = Grammars(tokenizer, model.config.vocab_size, sorted(model.engine.end_tokens))

    def check_model(self, name: str) -> None:
        """Raises ApiError for a model that is not served here."""
        if name not in self.names:
            served = ", ".join(self.names)
            message = f"the model {name!r:.100} is not served here, only: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def stamp(self, prefix: str, kind: str, model: str) -> dict[str, Any]:
        """What every answer, and every chunk of one, begins with in OpenAI's API."""
        return {
            "id": new_id(prefix),
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.fingerprint,
        }

    def chat(self, body: ChatRequest) -> Asked:
        """The choices of a conversation."""
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise refused("top_logprobs needs logprobs: true", param="top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise refused("max_tokens and max_completion_tokens say the same: give one", param="max_tokens")
        tools = [] if body.tool_choice == "none" else list(body.tools or [])
        if body.tool_choice not in (None, "none", "auto") and not tools:
            raise refused("tool_choice needs tools", param="tool_choice")
        ids = self.chat_ids(body.messages, tools, body.chat_template_kwargs or {})
        constraint = self._constraint(body, tools)
        thinking = self.thinking(ids)
        if thinking and constraint is not None:
            raise refused(
                "structured answers need a template that does not begin with a thought: set "
                'chat_template_kwargs to {"enable_thinking": false}',
                param="response_format",
            )
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        opts = self.opts(
            body, max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=logprobs, constraint=constraint
        )
        asked = self.choices(ids, body, opts)
        asked.tools, asked.thinking = bool(tools), thinking
        return asked

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        switches: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation."""
        switches = dict(switches or {})
        if taken := sorted({"messages", "tools", "add_generation_prompt"} & switches.keys()):
            raise refused(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
        listed = [tool.model_dump(exclude_none=True) for tool in tools] or None
        try:
            return self.model.chat_ids([dict(m) for m in messages], tools=listed, **switches)
        except UsageError as error:
            raise refused(str(error), param="messages") from None

    def thinking(self, ids: Sequence[int]) -> bool:
        """Whether the prompt ends within a thought that it has opened."""
        end = self.tokenizer.decode(ids[-8:], skip_special=False)
        return end.rstrip().endswith(THINK) and THOUGHT not in end.rpartition(THINK)[2]

    def choices(self, ids: list[int], body: Sampling, opts: SampleOpts) -> Asked:
        """body.n answers to a prompt."""
        said = body.speculative
        more: dict[str, Any] = {}
        if said is not None:
            more["speculate"] = said.enabled
            if said.drafter is not None:
                more["drafter"] = said.drafter
            if said.max_tokens is not None:
                more["most_drafted"] = said.max_tokens

        def make(choice: int) -> Callable[[], Answer]:
            return lambda: self.model.submit(ids, replace(opts, choice=choice), **more)

        return Asked([make(choice) for choice in range(body.n)], ids)

    def opts(self, body: Sampling, **more: Any) -> SampleOpts:
        """Sampling options. Raises ApiError naming what cannot be."""
        stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SampleOpts(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            typical_p=body.typical_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=self._biases(body),
            seed=None if body.seed is None else body.seed % (1 << 64),
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop=stops,
            stop_tokens=tuple(body.stop_token_ids or ()),
            **more,
        )

    def _biases(self, body: Sampling) -> dict[int, float] | None:
        if body.logit_bias is None:
            return None
        biases = {}
        for token, bias in body.logit_bias.items():
            if not token.isascii() or not token.isdigit() or int(token) >= self.model.config.vocab_size:
                raise refused(f"logit_bias: {token!r:.40} is no token id of this model", param="logit_bias")
            biases[int(token)] = bias
        return biases

    # -- structure

    def _constraint(self, body: ChatRequest, tools: Sequence[Tool]) -> Constraint | None:
        wanted = body.response_format
        forced = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
        if forced and wanted is not None and wanted.type != "text":
            raise refused("response_format and a tool that must be called exclude each other", param="response_format")
        try:
            if forced:
                return self.grammars.lark(self._calls(body, tools))
            return None if wanted is None else self._format(wanted)
        except UsageError as error:
            raise refused(str(error), param="tools" if forced else "response_format") from None

    def _format(self, wanted: ResponseFormat) -> Constraint | None:
        if wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return self.grammars.json_object()
        if wanted.json_schema is None:
            raise refused("response_format json_schema needs a json_schema", param="response_format")
        return self.grammars.schema(wanted.json_schema.schema_)

    def _calls(self, body: ChatRequest, tools: Sequence[Tool]) -> str:
        """The grammar of calls that must come."""
        named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        allowed = [tool.function for tool in tools if named in (None, tool.function.name)]
        if not allowed:
            raise refused(f"tool_choice names {named!r:.80}, which is none of the tools", param="tool_choice")
        calls = []
        for function in allowed:
            parameters = function.parameters or {"type": "object"}
            check_schema(parameters)
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": function.name}, "arguments": parameters},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        opening, closing = (self._tag(tag) for tag in (CALL, CALLED))
        more = "" if named is not None or not body.parallel_tool_calls else ' ("\\n" call)*'
        return f'start: call{more}\ncall: {opening} "\\n" body "\\n" {closing}\nbody: %json {json.dumps(schema)}\n'

    def _tag(self, tag: str) -> str:
        """A tag in a grammar: one token where the vocabulary has it as one of its control tokens."""
        return tag if tag in self.tokenizer.control_tokens else json.dumps(tag)
