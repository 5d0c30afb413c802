"""Byte-level BPE as GGUF files describe it, turned into a `tokenizers.Tokenizer`.

Neighbours: tokenizer.py wraps what is built here. Knows nothing of models or files: it takes a metadata mapping.
Sources: the GGUF specification (keys `tokenizer.ggml.*`), GPT-2's byte-to-character map (Radford et al. 2019), and for
the pre-tokenizers the split patterns in the tokenizer.json of each model family, which llama.cpp names by
`tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from outpace._native import Bpe, Texts
from outpace.types import I64, ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type
MAX_TOKENS = 1 << 21  # ten times the largest vocabulary in use
MAX_TOKEN_BYTES = 1 << 18

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
PRE_TOKENIZERS = ("smollm", "qwen2", "qwen35", "llama-bpe", "llama3", "gpt-2", "default")


def byte_characters() -> dict[str, int]:
    """GPT-2's map, character -> byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary, checked.

    tokens: by id. types: NORMAL and so on, int64 by id. merges: "a b", the earliest first. bpe: encodes words by them.
    normalizer (or None), splitter, ignore_merges: as `splitters`. control: ids of control tokens. added: ids of tokens
    that are recognised as a whole wherever they are written, control tokens and the user's own.
    """

    tokens: Texts
    types: I64
    merges: Texts
    bpe: Bpe
    normalizer: Any
    splitter: Any
    ignore_merges: bool
    control: frozenset[int]
    added: frozenset[int]

    def build(self) -> Tokenizer:
        """The library's tokenizer of this vocabulary."""
        parts = " ".join(self.merges).split(" ")
        pairs = list(zip(parts[::2], parts[1::2], strict=True)) if len(self.merges) else []
        ids = {token: i for i, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=self.ignore_merges))
        if self.normalizer is not None:
            tokenizer.normalizer = self.normalizer
        tokenizer.pre_tokenizer = self.splitter
        tokenizer.decoder = decoders.ByteLevel()
        # One call a run keeps the ids' order; an added token that is already in the vocabulary keeps its id.
        for special, some in ((True, self.control), (False, self.added - self.control)):
            tokenizer.add_tokens([AddedToken(self.tokens[i], special=special, normalized=False) for i in sorted(some)])
        return tokenizer


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that GGUF metadata describes.

    Vocabularies are large and every start waits for this: lists are checked as a whole, and one by one only when there
    is something to complain of.

    Raises ModelError naming the key for a kind that is not supported or a value that cannot be right.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') is supported")
    tokens = _texts(metadata, "tokenizer.ggml.tokens", MAX_TOKENS)
    merges = _texts(metadata, "tokenizer.ggml.merges", 4 * MAX_TOKENS)
    types = _types(metadata, len(tokens))
    normalizer, splitter, ignore_merges = splitters(metadata.get("tokenizer.ggml.pre"))
    try:
        bpe = Bpe(tokens, merges)
    except ValueError as error:
        _check_merges(_check_tokens(tokens), merges)
        raise ModelError(f"tokenizer.ggml.tokens and merges do not fit: {error}") from None
    control = frozenset(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
    added = control.union(np.flatnonzero(types == USER_DEFINED).tolist())
    return Vocabulary(tokens, types, merges, bpe, normalizer, splitter, ignore_merges, control, added)


def splitters(pre: object) -> tuple[Any, Any, bool]:
    """What `tokenizer.ggml.pre` names: the normalizer or None, the pre-tokenizer, and whether a word that is a token
    is taken without asking the merges. Raises ModelError for an unknown name."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own pattern
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    match pre:
        case "smollm":
            return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]), False
        case "qwen2":
            return normalizers.NFC(), pre_tokenizers.Sequence([split(QWEN2), to_bytes]), False
        case "qwen35":
            return normalizers.NFC(), pre_tokenizers.Sequence([split(QWEN35), to_bytes]), False
        case "llama-bpe" | "llama3":
            return None, pre_tokenizers.Sequence([split(LLAMA3), to_bytes]), True
        case "gpt-2" | "default":
            return None, words, False
    raise ModelError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(PRE_TOKENIZERS)}")


def _texts(metadata: Mapping[str, Any], key: str, most: int) -> Texts:
    values: Any = metadata.get(key)
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ModelError(f"{key} is missing or not a list of strings")
    if len(values) > most:
        raise ModelError(f"{key} has {len(values)} entries, more than {most}")
    try:
        texts = values if isinstance(values, Texts) else Texts(values)
    except (TypeError, UnicodeEncodeError):  # not all of them are strings, or some have lone surrogates
        texts = None
    if texts is None or texts.longest > MAX_TOKEN_BYTES:
        for i, value in enumerate(values):
            if not isinstance(value, str) or not _is_unicode(value) or len(value.encode()) > MAX_TOKEN_BYTES:
                raise ModelError(f"{key}: entry {i} is not a string of at most {MAX_TOKEN_BYTES} bytes")
        raise ModelError(f"{key} is not a list of strings")
    return texts


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _types(metadata: Mapping[str, Any], count: int) -> I64:
    key = "tokenizer.ggml.token_type"
    values: Any = metadata.get(key)
    if values is None:
        return np.full(count, NORMAL, np.int64)
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)) or len(values) != count:
        raise ModelError(f"{key} must hold one number for each of the {count} tokens")
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        for i, value in enumerate(values):
            if not isinstance(value, int) or not NORMAL <= value <= BYTE:
                raise ModelError(f"{key}: token {i} has type {value!r}, not one of 1 to 6")
    types = np.array(values, dtype=np.int64)
    if wrong := np.flatnonzero((types < NORMAL) | (types > BYTE)).tolist():
        raise ModelError(f"{key}: token {wrong[0]} has type {types[wrong[0]]}, not one of 1 to 6")
    return types


def _check_tokens(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id. No token may be empty, none may be there twice."""
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not token:
            raise ModelError(f"tokenizer.ggml.tokens: token {i} is empty")
        if ids.setdefault(token, i) != i:
            raise ModelError(f"tokenizer.ggml.tokens: {token!r} is both token {ids[token]} and {i}")
    return ids


def _check_merges(ids: Mapping[str, int], merges: Sequence[str]) -> None:
    """Every merge must be two tokens whose union is one."""
    for i, merge in enumerate(merges):
        _check_merge(ids, i, merge)


def _check_merge(ids: Mapping[str, int], index: int, merge: str) -> None:
    parts = merge.split(" ")
    if len(parts) != 2 or not all(parts):
        raise ModelError(f"tokenizer.ggml.merges: entry {index} is {merge!r}, not two tokens with a space between")
    for part in (*parts, "".join(parts)):
        if part not in ids:
            raise ModelError(f"tokenizer.ggml.merges: entry {index} needs the token {part!r}, which does not exist")
