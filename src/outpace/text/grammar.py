"""Grammars that an answer must keep to, by the llguidance library: JSON, a JSON schema, Lark.

Neighbours: types.Constraint is the interface, sampling.py masks every verified row by it, proposing.py cuts drafts that
break it before they cost a row. The library is an extra (outpace[serve]) and imported when it is first used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Constraint, NumericalError, UsageError
from .tokenizer import Tokenizer, one_line

MAX_DEPTH, MAX_SCHEMA = 32, 1 << 16  # of a schema: levels, characters


class Grammars:
    """Makes constraints for one model's vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: ids that may end an answer where the grammar allows it to end."""
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(end_tokens)
        self._lock = threading.Lock()
        self._library: Any = None

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.schema({"type": "object"})

    def schema(self, schema: Mapping[str, Any]) -> Constraint:
        """JSON that a schema allows. Raises UsageError for a schema that is too large or deep, or not supported."""
        library = self._of_library()
        check_schema(schema)
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(dict(schema))
        except ValueError as error:
            raise UsageError(f"the JSON schema cannot be used: {one_line(error)}") from None
        return self._matcher(grammar, "the JSON schema")

    def lark(self, text: str) -> Constraint:
        """A text of this Lark grammar, in which <name> stands for a control token and %json {...} for a schema."""
        library = self._of_library()
        return self._matcher(library.LLMatcher.grammar_from_lark(text), "the grammar")

    def _of_library(self) -> Any:
        try:
            import llguidance
        except ImportError:
            raise UsageError("structured answers need llguidance: pip install 'outpace[serve]'") from None
        return llguidance

    def _matcher(self, grammar: str, what: str) -> Constraint:
        library = self._of_library()
        with self._lock:
            if self._library is None:
                wrapper = library.TokenizerWrapper(_Words(self._tokenizer, self._vocab_size, self._ends))
                self._library = library.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._ends)
        try:
            matcher = library.LLMatcher(self._library, grammar, log_level=0)
        except ValueError as error:
            raise UsageError(f"{what} cannot be used: {one_line(error)}") from None
        if matcher.is_error():
            raise UsageError(f"{what} cannot be used: {_first_line(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size)


class Grammar:
    """A matcher of the library as types.Constraint."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self, ahead: Sequence[int]) -> NDArray[np.bool_] | None:
        """Allowed tokens [vocab_size]. Raises NumericalError where the library gives up."""
        matcher = self._matcher
        if ahead and not matcher.consume_tokens(list(ahead)):
            raise NumericalError(f"the grammar refuses a token that it allowed: {_first_line(matcher.get_error())}")
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if ahead:
            matcher.rollback(len(ahead))
        if matcher.is_error():
            raise NumericalError(f"the grammar became too complex: {_first_line(matcher.get_error())}")
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def cut(self, draft: Sequence[int]) -> int:
        """How many of these tokens the grammar allows."""
        return int(self._matcher.validate_tokens(list(draft)))

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves past emitted tokens; past the end nothing more can come."""
        if not self._matcher.is_stopped():
            self._matcher.try_consume_tokens(list(tokens))

    def fork(self) -> Grammar:
        """An independent copy."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)


class _Words:
    """A vocabulary as the library wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = tokenizer.bos_id
        words = [b"" if tokenizer.is_padding(i) else tokenizer.token_bytes(i) for i in range(known)]
        self.tokens = words + [b""] * (vocab_size - known)
        self.special_token_ids = sorted(tokenizer.control_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_bos=False)


def check_schema(schema: object) -> None:
    """Raises UsageError for a schema that is no object, too long or too deep."""
    if not isinstance(schema, Mapping):
        raise UsageError("a JSON schema must be an object")
    try:
        if len(json.dumps(schema)) > MAX_SCHEMA:
            raise UsageError(f"the JSON schema is longer than {MAX_SCHEMA} characters")
    except (TypeError, ValueError, RecursionError):
        raise UsageError("the JSON schema is no JSON, or nests too deeply") from None
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        ]
        if not level:
            return
    raise UsageError(f"the JSON schema nests deeper than {MAX_DEPTH} levels")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown"])[0][:200]
