"""What people see: text as it comes, one line of statistics, dim where there is a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ..api import Result

# A model can write anything, also sequences that command the terminal: those lose their control characters.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show(text: str) -> None:
    """Writes to stdout, at once; a pipe gets the text unchanged."""
    sys.stdout.write(clean(text))
    sys.stdout.flush()


def clean(text: str) -> str:
    """A model's text as stdout may have it: without control characters where that is a terminal."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


@contextlib.contextmanager
def answering() -> Iterator[Callable[[str], None]]:
    """A `show` for the pieces of one answer, which a terminal gets wrapped between words; ends with a line break."""
    wrap = Wrapping(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    try:
        yield (lambda text: show(wrap.add(text))) if wrap is not None else show
    finally:
        show((wrap.end() if wrap is not None else "") + "\n")


def fitted(text: str, stream: TextIO) -> str:
    """The text wrapped between words where the stream is a terminal."""
    if not stream.isatty():
        return text
    wrap = Wrapping(shutil.get_terminal_size().columns)
    return wrap.add(text) + wrap.end()


class Wrapping:
    """Breaks text that comes in pieces before the word that passes the edge. The last word is held until it ends."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0
        self._word = ""

    def add(self, text: str) -> str:
        """What can be written now that this text has come."""
        done = ""
        for character in text:
            if character == "\n":
                done += self.end() + character
                self._column = 0
            elif character.isspace():
                done += self.end()
                width = 8 - self._column % 8 if character == "\t" else 1
                if self._column + width < self._columns:  # at the edge the line break stands for it
                    done += character
                self._column += width
            else:
                self._word += character
                if _width(character) == 2:  # scripts without spaces break anywhere
                    done += self.end()
        return done

    def end(self) -> str:
        """The word that was held."""
        word, self._word = self._word, ""
        if not word:
            return ""
        width = sum(map(_width, word))
        fits = not self._column or self._column + width <= self._columns
        self._column = self._column + width if fits else width
        while self._column > self._columns:  # a word of more than a line, which the terminal breaks itself
            self._column -= self._columns
        return word if fits else "\n" + word


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@contextlib.contextmanager
def typing_hidden() -> Iterator[None]:
    """Meanwhile what is typed does not show, and waits for the next prompt, also past a Ctrl-C."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    hidden = termios.tcgetattr(sys.stdin)
    hidden[3] = hidden[3] & ~termios.ECHO | termios.NOFLSH
    try:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, hidden)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def note(text: str) -> None:
    """One line on stderr, dim on a terminal."""
    text = fitted(text, sys.stderr)
    print(f"\x1b[2m{text}\x1b[0m" if styled(sys.stderr) else text, file=sys.stderr, flush=True)


def styled(stream: TextIO) -> bool:
    """Whether colours are welcome there."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def counted(count: int, noun: str) -> str:
    """1, "token" -> 1 token; 2, "token" -> 2 tokens."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def statistics(result: Result) -> str:
    """The closing line of `outpace generate`; where others than the text itself drafted, what each gave."""
    stats = result.stats
    sources = {name: kept for name, (drafted, kept) in stats.by_source.items() if drafted}
    gave = f" ({', '.join(f'{name} {kept}' for name, kept in sources.items())})" if sources.keys() - {"suffix"} else ""
    ending = ", stopped by the token limit" if result.finish_reason == "length" else ""
    return speed(stats.decode_tokens, stats.decode_s) + (
        f"{counted(stats.tokens, 'token')} in {counted(stats.rounds, 'round')} ({stats.tokens_per_round:.2f} tokens "
        f"per round), drafted {stats.drafted}, accepted {stats.accepted}{gave}{ending}"
    )


def short_statistics(result: Result) -> str:
    """The line after each answer of `outpace chat`."""
    stats = result.stats
    accepted = f"{stats.acceptance:.0%} of {counted(stats.drafted, 'drafted token')} accepted"
    return speed(stats.decode_tokens, stats.decode_s) + (accepted if stats.drafted else "none drafted")


def speed(tokens: int, seconds: float) -> str:
    """The beginning of a line of statistics. Empty where nothing was decoded: the first token comes with the prompt."""
    return f"{tokens / seconds:.1f} tokens/s, " if tokens and seconds else ""
