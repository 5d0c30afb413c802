"""The encoder of short texts against the library's, which takes over from it."""

from __future__ import annotations

import functools
import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

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
