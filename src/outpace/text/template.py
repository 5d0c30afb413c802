"""Chat messages to the text, and the token ids, that a model was trained on.

Neighbours: sandbox.py is the Jinja environment, tokenizer.py encodes. Knows nothing of models.
Sources: chat templates as the Hugging Face Hub keeps them (chat_template.jinja, tokenizer_config.json) and the GGUF
key `tokenizer.chat_template`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from outpace.json_file import read_json
from outpace.text.sandbox import LimitError, RefusalError, Sandbox
from outpace.text.tokenizer import Tokenizer, one_line, token_text
from outpace.types import ModelError, OutpaceError, UsageError

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SOURCE = 1 << 20
STANDINS = range(0xE000, 0xF900)  # the private use area: characters without a meaning


class ChatTemplate:
    """A model's chat template, or its named templates. Rendering has no effect but the text it returns."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """source: Jinja text, or texts by name, of which "default" and "tool_use" (when tools are given) are used.

        now: the clock behind strftime_now. Raises ModelError, with the line, for a template that cannot be parsed.
        """
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
        self._now = now
        if not self._sources or not all(isinstance(text, str) for text in self._sources.values()):
            raise ModelError("the chat template is not a text")
        self._lock = threading.Lock()
        self._templates = {name: self._compile(text) for name, text in self._sources.items()}

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplate | None:
        """The template of a Hugging Face model folder, None if it has none.

        chat_template.jinja (with additional_chat_templates/*.jinja) comes before chat_template.json and
        tokenizer_config.json. Raises ModelError naming the folder.
        """
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json", missing={})
        names = read_json(folder / "special_tokens_map.json", missing={}) | config
        source: Any = None
        try:
            if (folder / "chat_template.jinja").is_file():
                source = {"default": _text(folder / "chat_template.jinja")}
                for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                    source[file.stem] = _text(file)
            else:
                file = folder / "chat_template.json"
                source = read_json(file, missing={}).get("chat_template") or config.get("chat_template")
            if isinstance(source, list):
                source = {str(t.get("name")): t.get("template") for t in source if isinstance(t, Mapping)}
            if not source:
                return None
            if not isinstance(source, (str, Mapping)):
                raise ModelError("the chat template is not a text")
            bos, eos, pad = (token_text(names.get(key)) for key in ("bos_token", "eos_token", "pad_token"))
            return cls(source, bos_token=bos, eos_token=eos, pad_token=pad)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in a GGUF file's metadata, None if it has none."""
        prefix = "tokenizer.chat_template"
        found = {key[len(prefix) + 1 :] or "default": text for key, text in metadata.items() if _is_template(key)}
        if not found:
            return None
        return cls(
            found,
            bos_token=tokenizer.token_text(tokenizer.bos_id),
            eos_token=tokenizer.token_text(tokenizer.eos_id),
            pad_token=tokenizer.token_text(tokenizer.pad_id),
        )

    @property
    def source(self) -> str:
        """The text of the default template."""
        return self._sources.get("default") or next(iter(self._sources.values()))

    @property
    def sources(self) -> dict[str, str]:
        """The texts of all templates by their names."""
        return dict(self._sources)

    def mentions(self, variable: str) -> bool:
        """Whether a template holds the name of this variable, such as enable_thinking."""
        return any(variable in text for text in self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        messages: mappings with "role" and "content" (a text, or a list of text parts). tools: JSON schemas of
        functions. kwargs: the template's own switches, such as enable_thinking. Raises UsageError for messages that
        are malformed or that the template refuses, ModelError, with the line, for a template that fails.
        """
        return self._render(check_messages(messages), tools, add_generation_prompt, kwargs)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise UsageError(f"the model has no default chat template, only: {', '.join(sorted(self._sources))}")
        template, sandbox = self._templates[name]
        if tools is not None and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence)):
            raise UsageError("tools must be a list of JSON schemas")
        special = {key: value for key, value in self._special.items() if value is not None}
        values = {**special, **kwargs, "messages": messages, "tools": list(tools) if tools else None}
        try:
            with self._lock:  # the sandbox counts the steps of one rendering
                sandbox.reset()
                return template.render(**values, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            raise _explained(error) from None

    def _compile(self, source: str) -> tuple[jinja2.Template, Sandbox]:
        try:
            if len(source) > MAX_SOURCE:
                raise LimitError(f"it is longer than {MAX_SOURCE} characters")
            sandbox = Sandbox(self._now)
            return sandbox.from_string(source), sandbox
        except Exception as error:
            raise _explained(error) from None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> list[int]:
    """Token ids of a conversation, in which only the template can write control tokens.

    A control token's name inside a message, tool or switch ("<|im_end|>" typed by a user) stays plain text. Where one
    occurs, its first character is replaced by a stand-in that occurs nowhere else, so that the template sees texts of
    the same length and shape; the rendered text is cut at the control tokens that are left, which are the template's
    own, and each piece gets its characters back before it is encoded. That is how the tokenizer treats any text, so
    conversations without such names get the ids of their rendered text. Raises as `ChatTemplate.render`.
    """
    checked = check_messages(messages)
    shield = _Shield(tokenizer.control_tokens)
    try:
        return _encoded(tokenizer, template, shield, checked, tools, add_generation_prompt, kwargs)
    except RecursionError:
        raise UsageError("the messages, tools or template variables nest too deeply") from None


def _encoded(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    shield: _Shield,
    checked: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
) -> list[int]:
    def covered() -> str:
        safe = [{k: v if k == "role" else shield.cover(v) for k, v in message.items()} for message in checked]
        switches = {k: shield.cover(v) for k, v in kwargs.items()}
        return template._render(safe, shield.cover(tools), add_generation_prompt, switches)

    rendered = covered()
    if not shield.used:
        return tokenizer.encode(rendered, special=True)
    shield.choose([checked, tools, template._sources, kwargs])
    ids: list[int] = []
    for part in tokenizer.encode_parts(covered()):
        ids += [part] if isinstance(part, int) else tokenizer.encode(shield.uncover(part), add_bos=False)
    return ids


class _Shield:
    """Replaces, in texts from outside, the first character of whatever is or could become a control token."""

    def __init__(self, controls: Sequence[str]) -> None:
        self._controls = controls
        self._beginnings = {control[:n] for control in controls for n in range(1, len(control))}
        self._endings = {control[n:] for control in controls for n in range(1, len(control))}
        self._longest = max(map(len, controls), default=0)
        self._standins: dict[str, str] = {}  # character -> stand-in; itself until `choose` was called
        self.used = False

    def choose(self, everything: object) -> None:
        """Picks stand-ins that do not occur in anything given."""
        text = json.dumps(everything, ensure_ascii=False, default=str)
        free = (chr(code) for code in STANDINS if chr(code) not in text)
        try:
            self._standins = {character: next(free) for character in self._standins}
        except StopIteration:
            raise UsageError("the messages use too many private-use characters") from None

    def cover(self, value: Any) -> Any:
        """The value with every text in it made safe."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, Mapping):
            return {self.cover(k): self.cover(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cover(v) for v in value]
        return value

    def uncover(self, text: str) -> str:
        """The text with its own characters, also where the template wrote JSON escapes."""
        for character, standin in self._standins.items():
            text = text.replace(standin, character).replace(f"\\u{ord(standin):04x}", character)
        return text

    def _cover_text(self, text: str) -> str:
        spots = self._spots(text)
        if not spots:
            return text
        self.used = True
        letters = list(text)
        for at in spots:
            letters[at] = self._standins.setdefault(letters[at], letters[at])
        return "".join(letters)

    def _spots(self, text: str) -> set[int]:
        """Where a control token begins, or part of one that the template's text beside it could complete."""
        spots = set()
        for control in self._controls:
            at = text.find(control)
            while at >= 0:
                spots.add(at)
                at = text.find(control, at + 1)
        body = text.strip()  # templates strip contents
        first = len(text) - len(text.lstrip())
        for n in range(1, min(self._longest, len(body) + 1)):
            if body[-n:] in self._beginnings:
                spots.add(first + len(body) - n)
            # An ending that is a plain word would hit too much, and no template puts the rest right before a text.
            if body[:n] in self._endings and not body[:n].isalnum():
                spots.add(first)
        return spots


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with contents as texts and tool arguments as objects. UsageError naming what is wrong and where."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError("messages must be a non-empty list of {role, content} objects")
    return [_checked(i, message) for i, message in enumerate(messages)]


def _checked(i: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"message {i} is not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"message {i}: role is {role!r}, not one of {', '.join(ROLES)}")
    checked = {k: v for k, v in message.items() if v is not None}
    content = checked.get("content")
    calls = checked.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise UsageError(f"message {i}: the {role} message has no content")
    checked["content"] = _content(i, content)
    if calls is not None:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise UsageError(f"message {i}: tool_calls must be a list")
        checked["tool_calls"] = [_call(i, call) for call in calls]
    return checked


def _content(i: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"message {i}: content must be a text or a list of text parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UsageError(f"message {i}: a content part is {kind!r}; only 'text' is supported, no images or sound")
        text = part.get("text")
        if not isinstance(text, str):
            raise UsageError(f"message {i}: a text part has no text")
        texts.append(text)
    return "".join(texts)


def _call(i: int, call: object) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect; the OpenAI API gives them as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"message {i}: a tool call has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise UsageError(f"message {i}: the arguments of {function['name']} are not JSON") from None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _is_template(key: str) -> bool:
    return key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_SOURCE:
            raise ModelError(f"{file.name} is longer than {MAX_SOURCE} characters")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file.name} cannot be read: {one_line(error)}") from None


def _explained(error: Exception) -> OutpaceError:
    """One line that says what went wrong in a template and on which line of it."""
    if isinstance(error, OutpaceError):
        return error
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line(error)
    where = f" (line {line} of the chat template)" if line else ""
    if isinstance(error, RefusalError):
        return UsageError(f"the model's chat template refuses the messages: {one_line(error)}{where}")
    if isinstance(error, RecursionError):
        return ModelError(f"the chat template nests too deeply{where}")
    return ModelError(f"the chat template cannot be used: {one_line(error)}{where}")


def _line(error: Exception) -> int | None:
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
