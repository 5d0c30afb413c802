"""`outpace chat`: a conversation on the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import say
from .options import Model, Quiet, Sampling, System, Think, check_think, template_variables, within
from .terminal import answering, counted, fitted, note, short_statistics, show, speed, typing_hidden

if TYPE_CHECKING:
    from ..api import LanguageModel, Result
    from ..types import SampleOpts

HELP = """\
/help                this text
/reset               forget the conversation, keep the system message
/system TEXT         set the system message; without TEXT remove it
/set NAME VALUE      set a sampling parameter, such as /set temperature 0.7; VALUE none unsets it
/set                 list the sampling parameters
/think on|off|auto   thinking, where the model's template has it
/stats               totals of this session
/save FILE           write the conversation as JSON
/load FILE           read a conversation
/exit                leave, as Ctrl-D does
End a line with \\ to go on in the next, or put several lines between \"\"\" and \"\"\".
//... sends a message that begins with /. Ctrl-C stops an answer."""

DEFAULT_MAX_TOKENS = 1024  # of one answer: small models may go round in circles for as long as they are let

SETTABLE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "seed",
    "max_tokens",
    "min_tokens",
    "rule",
    "ignore_eos",
)


def chat(*, model: Model, system: System = None, think: Think = None, sampling: Sampling, quiet: Quiet = False) -> None:
    """Holds a conversation. /help lists the commands."""
    opts = sampling.opts()
    with model.load(quiet=quiet) as loaded:
        check_think(loaded, think)
        session = Session(loaded, opts, speculate=not model.no_speculation, think=think, quiet=quiet)
        if system:
            session.messages = [{"role": "system", "content": system}]
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # makes input() edit lines and recall earlier ones
            note(f"{loaded.name}. /help lists the commands, Ctrl-D leaves.")
        session.run()


class Session:
    """A conversation with its settings. messages: those of `LanguageModel.chat`."""

    def __init__(
        self, model: LanguageModel, opts: SampleOpts, *, speculate: bool = True, think: bool | None = None, quiet: bool
    ) -> None:
        self.model = model
        self.opts = opts
        self.speculate = speculate
        self.think = think
        self.quiet = quiet
        self.messages: list[dict[str, Any]] = []
        self.answers = self.tokens = self.decode_tokens = self.rounds = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def run(self) -> None:
        """Reads messages and commands until the input ends or /exit."""
        from ..types import ContextError, OutpaceError

        while True:
            try:
                text = read_message()
                if text is None:
                    break
                if text.startswith("/") and not text.startswith("//"):
                    if not self.command(text):
                        return
                elif text.strip():
                    self.answer(text[1:] if text.startswith("//") else text)
            except ContextError as error:
                say(f"{error}: {self.way_out()}")
            except OutpaceError as error:
                say(str(error))
            except KeyboardInterrupt:
                note("\n(Ctrl-D leaves)")
        if sys.stdin.isatty():
            show("\n")

    # -- answers

    def answer(self, text: str) -> None:
        """Sends a message and shows the answer; what was shown stays in the conversation, even when interrupted."""
        self.messages.append({"role": "user", "content": text})
        shown: list[str] = []
        result: Result | None = None
        try:
            ids = self.model.chat_ids(self.messages, **template_variables(self.think))
            limit = self.opts.max_tokens or DEFAULT_MAX_TOKENS
            opts = within(self.model, self.opts, ids, limit)
            # Closing the stream cancels the request and leaves the model usable.
            stream = self.model.stream(ids, opts, speculate=self.speculate)
            with contextlib.closing(stream) as deltas, typing_hidden(), answering() as write:
                for delta in deltas:
                    shown.append(delta.text)
                    write(delta.text)
                    result = delta.result
        except KeyboardInterrupt:
            note("(stopped)")
            return
        finally:
            if answer := "".join(shown):
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
        if result is None:
            return
        self.answers += 1
        self.tokens += result.stats.tokens
        self.decode_tokens += result.stats.decode_tokens
        self.rounds += result.stats.rounds
        self.drafted += result.stats.drafted
        self.accepted += result.stats.accepted
        self.seconds += result.stats.decode_s
        if not self.quiet:
            note(short_statistics(result))
        if result.finish_reason == "length":
            # Said even when quiet: who reads the answer must know that it is not the whole of it.
            reached = opts.max_tokens
            if reached is not None and reached < limit:
                note(f"(cut off: the context is full; {self.way_out()})")
            else:
                note(f"(cut off after {counted(limit, 'token')}; /set max_tokens N allows more)")

    def way_out(self) -> str:
        """What can be done when the context is full."""
        largest = self.model.config.max_position_embeddings
        more = f", or start again with a --context of up to {largest}"
        return "/reset forgets the conversation" + (more if self.model.target.capacity.positions < largest else "")

    def done(self, text: str) -> None:
        """Says that a command has worked."""
        if not self.quiet:
            note(text)

    # -- commands

    def command(self, line: str) -> bool:
        """Runs a /command; False when it ends the session. Raises UsageError for one that is wrong."""
        from ..types import UsageError

        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: show(fitted(HELP, sys.stdout) + "\n"),
            "reset": self.reset,
            "system": lambda: self.set_system(rest),
            "set": lambda: self.set_parameter(rest),
            "think": lambda: self.set_think(rest),
            "stats": self.show_stats,
            "save": lambda: self.save(rest),
            "load": lambda: self.load(rest),
        }
        if name not in commands:
            raise UsageError(f"no command /{name}: /help lists them")
        commands[name]()
        return True

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.done("the conversation is forgotten" + (", the system message stays" if self.messages else ""))

    def set_system(self, text: str) -> None:
        """Sets, replaces or (empty) removes the system message."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest
        self.done("the system message is " + ("set" if text else "removed"))

    def set_parameter(self, entry: str) -> None:
        """NAME VALUE, the value as JSON or a plain text; nothing lists the values. Raises UsageError."""
        from ..types import SampleOpts, UsageError

        if not entry:
            values = self.values()
            show("".join(f"{name.ljust(max(map(len, values)))}  {_plain(values[name])}\n" for name in values))
            return
        name, _, text = entry.partition(" ")
        name = name.replace("-", "_")
        if name not in SETTABLE or not text.strip():
            raise UsageError(f"/set NAME VALUE, where NAME is one of {', '.join(SETTABLE)}")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = None if text.strip() == "none" else text.strip()
        if value is None:
            value = getattr(SampleOpts(), name)
        elif name == "stop":
            value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else (str(value),)
        elif name == "logit_bias":
            value = _biases(value)
        self.opts = replace(self.opts, **{name: value})
        self.done(f"{name} is {_plain(self.values()[name])}")

    def values(self) -> dict[str, Any]:
        """The sampling parameters that hold for the next answer."""
        opts = self.opts.with_defaults({**self.model.defaults, "max_tokens": DEFAULT_MAX_TOKENS})
        return {name: getattr(opts, name) for name in SETTABLE}

    def set_think(self, text: str) -> None:
        """on, off or auto. Raises UsageError."""
        from ..types import UsageError

        choices = {"on": True, "off": False, "auto": None}
        if text not in choices:
            raise UsageError("/think on, off or auto")
        check_think(self.model, choices[text])
        self.think = choices[text]
        self.done(f"thinking is {text}" if text != "auto" else "thinking is left to the model's template")

    def show_stats(self) -> None:
        """Totals over the answers of this session."""
        mean = self.tokens / self.rounds if self.rounds else 0.0
        show(
            f"{counted(self.answers, 'answer')}, {counted(self.tokens, 'token')} in {counted(self.rounds, 'round')} "
            f"({mean:.2f} tokens per round), "
            f"{speed(self.decode_tokens, self.seconds)}drafted {self.drafted}, accepted {self.accepted}\n"
        )

    def save(self, name: str) -> None:
        """Writes the messages as a JSON list. Raises UsageError or ModelError."""
        from ..weights.files import replacing

        path = _path(name, "save")
        with replacing(path) as file:
            file.write(json.dumps(self.messages, ensure_ascii=False, indent=2).encode() + b"\n")
        self.done(f"{counted(len(self.messages), 'message')} written to {path}")

    def load(self, name: str) -> None:
        """Reads messages that `save` wrote, in place of this conversation's. Raises UsageError."""
        from ..text.template import check_messages
        from ..types import UsageError

        path = _path(name, "load")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"{path}: not JSON text") from None
        try:
            self.messages = check_messages(messages)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        self.done(f"{counted(len(self.messages), 'message')} read from {path}")


def read_message() -> str | None:
    """One message: a line, lines joined by a trailing backslash, or lines between triple quotes. None at the end."""
    from ..types import UsageError

    try:
        line = _line("> ")
        if line is None:
            return None
        lines = [line]
        if line.startswith('"""'):
            lines = [line[3:]]
            while not lines[-1].endswith('"""'):
                following = _line('" ')
                if following is None:
                    return "\n".join(lines)
                lines.append(following)
            return "\n".join(lines)[:-3].strip("\n")
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            following = _line("\\ ")
            if following is None:
                break
            lines.append(following)
        return "\n".join(lines)
    except UnicodeDecodeError:
        raise UsageError("the input is not UTF-8 text") from None


def _line(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _plain(value: object) -> str:
    """A value as /set takes it."""
    return "none" if value is None or value == () else value if isinstance(value, str) else json.dumps(value)


def _path(name: str, command: str) -> Path:
    from ..types import UsageError

    if not name:
        raise UsageError(f"/{command} FILE")
    return Path(name).expanduser()


def _biases(value: object) -> dict[int, float]:
    from ..types import UsageError

    try:
        return {int(token): bias for token, bias in value.items()}  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        raise UsageError('/set logit_bias {"ID": BIAS, ...}') from None
