"""What people see: text as it comes, one line of statistics, dim where there is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ..api import Result

# A model can write anything, also sequences that command the terminal: those lose their control characters.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show(text: str) -> None:
    """Writes a piece of an answer to stdout, at once; a pipe gets it unchanged."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """One line on stderr, dim on a terminal."""
    print(f"\x1b[2m{text}\x1b[0m" if _styled(sys.stderr) else text, file=sys.stderr, flush=True)


def _styled(stream: TextIO) -> bool:
    import os

    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def statistics(result: Result) -> str:
    """The closing line of `outpace generate`."""
    stats = result.stats
    ending = ", stopped by the token limit" if result.finish_reason == "length" else ""
    return (
        f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens} tokens in {stats.rounds} rounds "
        f"({stats.tokens_per_round:.2f} tokens per round), drafted {stats.drafted}, accepted {stats.accepted}{ending}"
    )


def short_statistics(result: Result) -> str:
    """The line after each answer of `outpace chat`."""
    stats = result.stats
    accepted = f"{stats.acceptance:.0%} of {stats.drafted} drafted tokens accepted" if stats.drafted else "none drafted"
    return f"{stats.tokens_per_second:.1f} tokens/s, {accepted}"
