"""The commands put together. One file each holds what a command does."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .chat import chat
from .command import command
from .generate import generate
from .manage import info, models, pull, rm

app = typer.Typer(
    help="The same words, faster: lossless speculative decoding on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _function in (generate, chat, pull, models, rm, info):
    app.command()(command(_function))


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
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
    app(prog_name="outpace")
