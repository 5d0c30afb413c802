"""A function becomes a command: groups of options are spelled out, and errors become one line and an exit code."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from .terminal import fitted, note

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Other")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer wants it: a parameter whose type is a dataclass stands for that dataclass's fields.

    So that commands share groups of options (options.py). Every command gets --debug.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []

    def add(name: str, default: Any, annotation: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            for field in dataclasses.fields(groups[name]):
                add(field.name, field.default, kinds[field.name])
        else:
            add(name, parameter.default, hints[name])
    add("debug", False, Debug)

    def run(debug: bool, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        try:
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            function(**values)
        except Exception as error:
            if debug:
                raise
            raise typer.Exit(report(error)) from None
        except KeyboardInterrupt:
            note("\n(stopped)")
            raise typer.Exit(130) from None

    # The help's lines are as long as the terminal allows, not as long as the source's.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    run.__name__, run.__doc__ = function.__name__, "\n\n".join(" ".join(text.split()) for text in paragraphs)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def report(error: Exception) -> int:
    """Tells the error in one line on stderr; returns the exit code."""
    from ..types import OutpaceError

    if isinstance(error, BrokenPipeError):
        # Whoever read the output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if isinstance(error, OutpaceError):
        say(str(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        say("out of memory: use a smaller model or a smaller --context")
    elif isinstance(error, OSError):
        say(str(error))
    elif isinstance(error, typer.Exit | typer.Abort):
        raise error
    else:
        say(f"unexpected {type(error).__name__}: {error}. Please report it; --debug shows where it happened")
    return 1


def say(text: str) -> None:
    """One line on stderr."""
    print(fitted(f"outpace: {' '.join(text.split())}", sys.stderr), file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any) -> None:
    say(f"warning: {message}")
