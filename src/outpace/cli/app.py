"""The commands put together. One file each holds what a command does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .bench import kernels, start
from .bench_drafter import drafter
from .bench_head import head
from .chat import chat
from .command import command, say
from .export import export
from .generate import generate
from .index import index
from .inspect import inspect
from .manage import info, models, pull, rm
from .quantize import quantize
from .quick import PlainValues, leave
from .serve import serve
from .train import train


class PlainFlags:
    """Help in which a flag has no type beside it."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            PlainValues.install(param)
        return params


class Command(PlainFlags, TyperCommand):
    """One command."""


class Commands(PlainFlags, TyperGroup):
    """All commands. What the parser refuses is told as every other error is: one line, exit code 2."""

    def main(self, args: Any = None, prog_name: Any = None, *, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        """Runs the command line; ends the process unless standalone_mode is off."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **more)
        try:
            sys.exit(super().main(args, prog_name, standalone_mode=False, **more))
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # typer has brought click's exceptions along under more than one name.
            if not hasattr(error, "format_message"):
                raise
            if text := error.format_message():  # nothing when the help was shown instead
                say(text if text.endswith(("?", ".")) else f"{text}.")
            sys.exit(2)


COMMANDS = {
    f.__name__: f for f in (generate, chat, serve, pull, models, rm, info, inspect, export, quantize, index, train)
}
BENCH = {function.__name__: function for function in (kernels, start, head, drafter)}  # outpace bench NAME
NAMES = (*COMMANDS, "bench")


def build(names: Iterable[str] = NAMES) -> typer.Typer:
    """The command line with these commands: to run one, the others need not be put together."""
    app = typer.Typer(
        cls=Commands,
        help="The same words, faster: lossless speculative decoding on your own machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        if name in COMMANDS:
            app.command(cls=Command)(command(COMMANDS[name]))
    if "bench" in names:
        bench = typer.Typer(cls=Commands, help="Measures this machine and outpace on it.", no_args_is_help=True)
        for function in BENCH.values():
            bench.command(cls=Command)(command(function))
        app.add_typer(bench, name="bench")
    app.callback()(_options)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"outpace {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Runs the command line and ends the process: 0, 1 failure, 2 wrong usage, 130 Ctrl-C, 141 nobody reads."""
    # A descriptor that the caller closed is no stream at all: then nothing is read and nobody sees what is written.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 (as long-lived as the process)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not an error in the middle of an answer.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    named = [name for name in sys.argv[1:2] if name in NAMES]
    try:
        build(named or NAMES)(prog_name="outpace")
    except SystemExit as end:
        leave(end)
        raise
