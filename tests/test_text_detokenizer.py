"""Streaming: no character broken, nothing lost, nothing after a stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.text.detokenizer import Detokenizer, StopMatcher
from outpace.types import UsageError

# Token i stands for the bytes PIECES[i]; the last one is a control token.
PIECES = [bytes([b]) for b in range(256)] + [b"ab", "é".encode(), "日本".encode(), "😀".encode()[:2], b"<|end|>"]
SKIPPED = frozenset([len(PIECES) - 1])
tokens = st.lists(st.one_of(st.integers(0, len(PIECES) - 1), st.sampled_from(list("😀日é€x".encode()))), max_size=40)


def make() -> Detokenizer:
    return Detokenizer(PIECES.__getitem__, SKIPPED)


@settings(max_examples=200, deadline=None)
@given(tokens, st.lists(st.integers(1, 5), max_size=20))
def test_any_split_gives_the_whole_text(ids, sizes):
    whole = b"".join(PIECES[i] for i in ids if i not in SKIPPED).decode("utf-8", errors="replace")
    stream, text, rest = make(), "", list(ids)
    while rest:
        n = sizes.pop() if sizes else 1
        text += stream.push(rest[:n] if n > 1 else rest[0])
        rest = rest[n:]
    text += stream.flush()
    assert text == whole and stream.length == len(whole)
    ends = [stream.token_at(k) for k in range(1, len(whole) + 1)]
    assert ends == sorted(ends) and all(0 <= i < len(ids) for i in ends)


def test_characters_wait_until_complete():
    stream = make()
    a, b, c, d = "😀".encode()
    assert [stream.push(i) for i in (a, b, c)] == ["", "", ""]
    assert stream.push(d) == "😀"
    assert stream.push(a) == "" and stream.push(ord("x")) == "\ufffdx"
    assert stream.push([a, b]) == "" and stream.flush() == "\ufffd" and stream.flush() == ""
    assert [stream.token_at(k) for k in (1, 2, 3, 4)] == [3, 5, 5, 7]
    for outside in (0, 5):
        with pytest.raises(UsageError):
            stream.token_at(outside)


def brute(text: str, stops: list[str]) -> tuple[str, str | None, int, int]:
    """The stop that is complete first; the longest of those complete at the same character."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop, end - len(stop), end
    return text, None, 0, 0


letters = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 4), max_size=20))
def test_stops_equal_brute_force(text, stops, sizes):
    matcher, released, fed = StopMatcher(stops), "", ""
    while len(fed) < len(text):
        n = sizes.pop() if sizes else 1
        chunk = text[len(fed) : len(fed) + n]
        fed += chunk
        released += matcher.push(chunk)
        before, found, _, _ = brute(fed, stops)
        if found is None:  # everything is out but the longest end that may begin a stop
            held = max((k for k in range(len(fed) + 1) if any(s[:k] == fed[len(fed) - k :] for s in stops)), default=0)
            assert released == fed[: len(fed) - held]
        else:
            assert released == before
    released += matcher.flush()
    assert (released, matcher.stop, matcher.start, matcher.end) == brute(text, stops)


def test_stop_over_tokens_names_its_token():
    stream, matcher = make(), StopMatcher(["\nUser:", "END"])
    ids = [*"é ok\nUse".encode(), *b"r", *b": leaks"]
    released = ""
    for i in ids:
        released += matcher.push(stream.push(i))
        if matcher.stop:
            break
    assert released == "é ok" and matcher.stop == "\nUser:" and (matcher.start, matcher.end) == (4, 10)
    assert ids[stream.token_at(matcher.end)] == ord(":")
    assert matcher.push("more") == "" and matcher.flush() == ""


def test_a_long_stop_stays_linear():
    matcher = StopMatcher(["a" * 20_000 + "b"])
    out = "".join(matcher.push("a" * 1000) for _ in range(60))
    assert len(out) == 40_000 and matcher.push("b") == "" and matcher.start == 40_000


def test_empty_stops_are_refused():
    for wrong in ([""], "abc"):
        with pytest.raises(UsageError):
            StopMatcher(wrong)
    assert StopMatcher([]).push("abc") == "abc"
