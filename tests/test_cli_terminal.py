"""What a terminal shows: text wrapped between words in whatever pieces it comes, typing hidden during an answer."""

from __future__ import annotations

import contextlib
import os
import pty
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.cli.command import say
from outpace.cli.terminal import Wrapping, answering, counted, note, typing_hidden


def wrapped(text: str, columns: int, pieces: int = 1) -> str:
    wrap = Wrapping(columns)
    parts = [text[i : i + pieces] for i in range(0, len(text), pieces)]
    return "".join(map(wrap.add, parts)) + wrap.end()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four", "one two \nthree four"),
        ("1234567890 a", "1234567890\na"),
        ("123456789 a", "123456789\na"),
        ("12345678 a", "12345678 a"),
        ("12345678 ab", "12345678 \nab"),
        ("a 12345678901234 b", "a \n12345678901234 b"),  # the terminal itself breaks the long one
        ("    x = 1\n\n    y", "    x = 1\n\n    y"),
        ("日本語日本語日", "日本語日本\n語日"),
        ("ab e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301 c", "ab e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301\nc"),
    ],
)
def test_lines_break_between_words(text: str, expected: str) -> None:
    assert wrapped(text, 10) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "bcd", "  ", " ", "\n", "efghij"]), max_size=40), st.integers(1, 5))
def test_wrapping_only_moves_line_breaks(parts: list[str], pieces: int) -> None:
    text = " ".join(parts)
    shown = wrapped(text, 8, pieces)
    assert shown == wrapped(text, 8)
    assert shown.split() == text.split()
    assert all(len(line) <= 8 for line in shown.split("\n"))


def test_a_pipe_gets_every_piece_at_once_and_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 100 + "wo"
    with answering() as show:
        show(long)
        assert capsys.readouterr().out == long
        show("rd")
    assert capsys.readouterr().out == "rd\n"


def test_an_interrupted_answer_shows_its_last_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with contextlib.suppress(KeyboardInterrupt), answering() as show:
        show("one tw")
        assert capsys.readouterr().out == "one "
        raise KeyboardInterrupt
    assert capsys.readouterr().out == "tw\n"


def test_typing_is_hidden_and_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        before = termios.tcgetattr(stdin)
        assert before[3] & termios.ECHO
        with contextlib.suppress(KeyboardInterrupt), typing_hidden():
            assert not termios.tcgetattr(stdin)[3] & termios.ECHO
            raise KeyboardInterrupt
        assert termios.tcgetattr(stdin) == before


def test_lines_of_our_own_are_wrapped_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    say("a line of more than twenty")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    say("a line of more than twenty")
    note("a line of more than twenty")
    line = "a line of more than twenty"
    assert capsys.readouterr().err == f"outpace: {line}\noutpace: a line of \nmore than twenty\n{line[:19]}\ntwenty\n"


def test_counted() -> None:
    assert [counted(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
