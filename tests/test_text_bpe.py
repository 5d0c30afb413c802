"""The encoder of short texts against the library's, which takes over from it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace._native import Bpe, Texts, strings
from outpace.text import bpe
from outpace.text.bpe import ShortTexts
from outpace.text.tokenizer import Tokenizer
from outpace.text.vocabulary import read_vocabulary
from text_data import CONTROL, PASSES, TEXTS, USER_DEFINED, metadata

PARTS = [*TEXTS, *CONTROL, *USER_DEFINED, "<|", "im_end|>", "<|im_start", "<think", "\u0301", "a\u0308", "\x00"]


@functools.cache
def pair(pre: str) -> tuple[ShortTexts, tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Ours, and the library's two: for control tokens as tokens, and as text."""
    vocabulary = read_vocabulary(metadata(pre))
    plain = vocabulary.build()
    plain.encode_special_tokens = True
    return ShortTexts(vocabulary), vocabulary.build(), plain


def check(pre: str, text: str) -> None:
    ours, parsing, plain = pair(pre)
    for special, library in ((True, parsing), (False, plain)):
        ours._left = 1 << 30
        found = ours.encode(text, special=special)
        if found is None:  # only for a word of more letters
            assert len(text.encode()) > bpe.LONGEST_WORD
        else:
            assert found == library.encode(text, add_special_tokens=False).ids, (special, text)


@pytest.mark.parametrize("pre", sorted(PASSES))
def test_ids_are_the_librarys(pre: str) -> None:
    for text in ("", *PARTS, *map("".join, itertools.product(PARTS[-12:], repeat=2))):
        check(pre, text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=12), max_size=6), st.sampled_from(sorted(PASSES)))
def test_any_text_gets_the_librarys_ids(parts: list[str], pre: str) -> None:
    check(pre, "".join(parts))


def test_the_longest_name_wins_and_what_a_control_token_covers_stays_text() -> None:
    names = ["<a>", "<a><b>", "<b>x"]
    tokens = [*metadata()["tokenizer.ggml.tokens"], *names]
    types = [*metadata()["tokenizer.ggml.token_type"], 3, 4, 4]
    vocabulary = read_vocabulary(metadata(tokens=tokens, token_type=types))
    plain = vocabulary.build()
    plain.encode_special_tokens = True
    for text in ("<a><b>x", "<a>", "<a><a><b>", "<b>x<a>", "q<a>x<b>x"):
        for special, library in ((True, vocabulary.build()), (False, plain)):
            want = library.encode(text, add_special_tokens=False).ids
            assert ShortTexts(vocabulary).encode(text, special=special) == want, (text, special)


def test_long_texts_are_the_librarys_turn() -> None:
    text = "some words " * 300
    tokenizer = Tokenizer.from_gguf(metadata())
    first = tokenizer.encode(text[:1000])
    assert tokenizer._built is None
    assert tokenizer.encode(text[:1000]) == first
    assert tokenizer._built is None
    tokenizer.encode(text)
    assert tokenizer._built is not None
    assert tokenizer.encode(text[:1000]) == first
    long_word = Tokenizer.from_gguf(metadata())
    assert long_word.encode("x" * 1000) == tokenizer.encode("x" * 1000)
    assert long_word._built is not None


def test_both_know_the_same_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    control, added, strings = tokenizer.control_ids, tokenizer._added, list(tokenizer._strings)
    library = tokenizer._parsing.get_added_tokens_decoder()
    assert control == {i for i, token in library.items() if token.special}
    assert added == set(library)
    again = Tokenizer(tokenizer._parsing, bos_id=1, eos_id=2, pad_id=0)
    assert list(again._strings) == strings
    assert (again.control_ids, again._added) == (control, added)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), max_size=8))
def test_texts_are_a_list_of_strings(items: list[str]) -> None:
    try:
        texts = Texts(items)
    except UnicodeEncodeError:
        assert any("\ud800" <= character <= "\udfff" for item in items for character in item)
        return
    assert texts == items
    assert list(texts) == items
    assert texts == Texts(items)
    assert texts != [*items, ""]
    assert not items or texts != Texts([*items[:-1], items[-1] + "x"])
    assert [texts[i - len(items)] for i in range(len(items))] == items
    assert texts.longest == max((len(item.encode()) for item in items), default=0)
    assert isinstance(texts, Sequence)
    for wrong in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            texts[wrong]


def test_strings_of_a_file_that_only_together_are_text() -> None:
    def data(*items: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(b"".join(len(item).to_bytes(8, "little") + item for item in items), np.uint8)

    snowman = "\N{SNOWMAN}".encode()
    whole = data(b"", snowman, b"a")
    assert strings(whole, 0, 3) == (["", "\N{SNOWMAN}", "a"], len(whole))
    assert strings(whole[:-1], 0, 3) == (["", "\N{SNOWMAN}"], len(whole) - 9)
    for parts in ((snowman[:1], snowman[1:]), (snowman, snowman[:2]), (b"\xff",)):
        with pytest.raises(UnicodeDecodeError):
            strings(data(*parts), 0, len(parts))


def test_a_later_merge_of_the_same_pair_counts_and_the_leftmost_is_first() -> None:
    tokens = Texts(["a", "b", "c", "ab", "bc", "abc", "aa", "\N{SNOWMAN}"])
    assert Bpe(tokens, Texts(["a b", "b c", "a b"])).encode("abc", False) == [0, 4]
    assert Bpe(tokens, Texts(["a a"])).encode("aaab", False) == [6, 0, 1]
    assert Bpe(tokens, Texts([])).encode("a\N{SNOWMAN}z", False) == [0, 7]
    assert Bpe(tokens, Texts([])).encode("abc", True) == [5]
    for wrong in (["a"], ["a b c"], ["a z"], ["z a"], ["b a"], [" a"], ["a "]):
        with pytest.raises(ValueError, match="merge"):
            Bpe(tokens, Texts(wrong))
