"""Text to token ids and back, whatever file the vocabulary came in.

Wraps the `tokenizers` library. Neighbours: vocabulary.py builds a tokenizer from GGUF metadata, detokenizer.py streams
text out of ids, template.py renders chats. Knows nothing of models, weights or sampling.
Sources: the tokenizer.json / tokenizer_config.json files of the Hugging Face Hub and the GGUF specification.

Only byte-level BPE is supported: every token is a string of bytes, so ids can be turned back one by one. As in the
reference implementation, a byte for which the vocabulary has no token (a few control characters in SmolLM2) leaves
no trace in the ids.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from outpace.json_file import read_json
from outpace.text.bpe import ShortTexts
from outpace.text.detokenizer import Detokenizer
from outpace.text.vocabulary import UNUSED, Vocabulary, byte_characters, read_vocabulary
from outpace.types import ModelError, UsageError

MAX_FILE_BYTES = 256 << 20
PADDING_NAME = re.compile(r"\[PAD\d+\]")


class Tokenizer:
    """Encodes text and decodes ids. Build it with `from_folder` or `from_gguf`. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | Vocabulary,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        end_ids: Sequence[int] = (),
        add_bos: bool = False,
    ) -> None:
        """tokenizer: byte-level; the library's own, or a vocabulary, of which the library's is made when a text is too
        long for bpe.py. end_ids: tokens that end a turn beside eos."""
        self._vocabulary: Vocabulary | None = None
        self._short: ShortTexts | None = None
        self._built: tokenizers.Tokenizer | None = None
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.RLock()
        self._types = np.zeros(0, np.int64)
        self._strings: Sequence[str | None]
        if isinstance(tokenizer, Vocabulary):
            self._vocabulary, self._short = tokenizer, ShortTexts(tokenizer)
            self.control_ids, self._added = tokenizer.control, tokenizer.added
            self._strings, self._types = tokenizer.tokens, tokenizer.types
        else:
            self._built = tokenizer
            tokenizer.no_truncation()
            tokenizer.no_padding()
            decoder = type(tokenizer.decoder).__name__
            if decoder != "ByteLevel":
                raise ModelError(f"tokenizer.json: its decoder is {decoder}; only byte-level BPE is supported")
            added = tokenizer.get_added_tokens_decoder()
            self.control_ids = frozenset(i for i, token in added.items() if token.special)
            self._added = frozenset(added)
            self._strings = _by_id(tokenizer.get_vocab(with_added_tokens=True))
        self.vocab_size = len(self._strings)
        self._byte_of = byte_characters()
        self.bos_id = self._checked("bos", bos_id)
        self.eos_id = self._checked("eos", eos_id)
        self.pad_id = self._checked("pad", pad_id)
        named = [self.eos_id, *(self._checked("end", i) for i in end_ids)]
        self.end_ids = tuple(dict.fromkeys(i for i in named if i is not None))
        if add_bos and self.bos_id is None:
            raise ModelError("the tokenizer asks for a beginning-of-sequence token but names none")
        self.add_bos = add_bos

    # ------------------------------------------------------------------------------------------------- building

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json of a Hugging Face model folder.

        Raises ModelError, naming the file, when one is missing, damaged or describes an unsupported tokenizer.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        text = _read(file)
        if text is None:
            raise ModelError(f"{folder}: no tokenizer.json; a model folder must have one")
        config = read_json(folder / "tokenizer_config.json", missing={})
        names = read_json(folder / "special_tokens_map.json", missing={}) | config
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
            _add_tokens(tokenizer, config.get("added_tokens_decoder"))
            if getattr(tokenizer.model, "dropout", None):
                raise ModelError("tokenizer.json: has BPE dropout, which makes the ids random; set it to null")
            start = tokenizer.encode("", add_special_tokens=True).ids
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from None
        except BaseException as error:  # the library's own panics are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ModelError(f"{file}: not a tokenizer: {one_line(error)}") from None

        def named(key: str) -> int | None:
            token = token_text(names.get(key))
            if token is None:
                return None
            i = tokenizer.token_to_id(token)
            if i is None:
                raise ModelError(f"{key} is {token!r}, which is not in the vocabulary")
            return int(i)

        try:
            bos = named("bos_token")
            return cls(
                tokenizer,
                bos_id=bos,
                eos_id=named("eos_token"),
                pad_id=named("pad_token"),
                add_bos=bool(config.get("add_bos_token", bos is not None and start[:1] == [bos])) and bos is not None,
            )
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's metadata (key -> value) describes.

        Raises ModelError naming the key that is missing, inconsistent or unsupported.
        """
        vocabulary = read_vocabulary(metadata)

        def number(name: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ModelError(f"tokenizer.ggml.{name}_token_id is {value!r}, not a token id")
            return value

        llama3 = metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")  # begins texts with bos unless told
        return cls(
            vocabulary,
            bos_id=number("bos"),
            eos_id=number("eos"),
            pad_id=number("padding"),
            end_ids=[i for i in (number("eot"), number("eom")) if i is not None],
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", llama3 and number("bos") is not None)),
        )

    # ------------------------------------------------------------------------------------------------- encoding

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text.

        special: False keeps control tokens that are written in the text plain text; True turns them into control
        tokens (for rendered chat templates). add_bos: whether the beginning-of-sequence token comes first; None does
        what the model asks for, except for rendered templates, which write their own.
        Raises UsageError for text that is not Unicode.
        """
        begin = (self.add_bos and not special) if add_bos is None else add_bos
        if begin and self.bos_id is None:
            raise UsageError("this model has no beginning-of-sequence token to add")
        ids = self._ids(text, special)
        return [self.bos_id, *ids] if begin and self.bos_id is not None else ids

    def encode_parts(self, text: str) -> list[int | str]:
        """The text cut at the control tokens written in it: their ids, and the text between them."""
        encoding = self._run(text, True)
        parts: list[int | str] = []
        done = 0
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i in self.control_ids:
                parts += [text[done:start], i] if start > done else [i]
                done = end
        return [*parts, text[done:]] if done < len(text) else parts

    def _ids(self, text: str, special: bool) -> list[int]:
        _check_unicode(text)
        with self._lock:
            found = None if self._short is None else self._short.encode(text, special=special)
        return list(self._run(text, special).ids) if found is None else found

    def _run(self, text: str, special: bool) -> Any:
        _check_unicode(text)
        return (self._parsing if special else self._plain_tokenizer()).encode(text, add_special_tokens=False)

    @property
    def _parsing(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, which turns names of control tokens written in a text into these tokens."""
        with self._lock:
            if self._built is None:
                assert self._vocabulary is not None
                self._built = self._vocabulary.build()
                self._short = self._vocabulary = None
            return self._built

    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """The one that leaves them text."""
        with self._lock:
            if self._plain is None:
                self._plain = _copy(self._parsing)
                self._plain.encode_special_tokens = True
            return self._plain

    # ------------------------------------------------------------------------------------------------- decoding

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD. skip_special leaves control tokens out."""
        skipped: frozenset[int] = self.control_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for an id without a token. UsageError when out of range."""
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token} is out of range: the vocabulary has {self.vocab_size} tokens")
        text = self._strings[token]
        if text is None or token in self._added:
            return (text or "").encode()
        return _to_bytes(text, self._byte_of)

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer that turns ids into text as they come."""
        return Detokenizer(self.token_bytes, self.control_ids if skip_special else frozenset())

    # ----------------------------------------------------------------------------------------------- vocabulary

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary ("<|im_end|>", "Ġthe"), None if there is none."""
        i = self._parsing.token_to_id(token)
        return None if i is None else int(i)

    def token_text(self, token: int | None) -> str | None:
        """A token's name in the vocabulary; None for None or an id without a token."""
        return self._strings[token] if token is not None and 0 <= token < self.vocab_size else None

    @property
    def control_tokens(self) -> list[str]:
        """The names of all control tokens, in the order of their ids."""
        return [name for i in sorted(self.control_ids) if (name := self._strings[i])]

    def is_padding(self, token: int) -> bool:
        """Whether an id only fills the vocabulary up: no token, an unused one, or one named [PADn]."""
        name = self.token_text(token)
        unused = 0 <= token < len(self._types) and bool(self._types[token] == UNUSED)
        return name is None or unused or bool(PADDING_NAME.fullmatch(name))

    @property
    def known_tokens(self) -> int:
        """How many ids there are before the padding at the vocabulary's end."""
        size = self.vocab_size
        while size and self.is_padding(size - 1):
            size -= 1
        return size

    def fingerprint(self) -> str:
        """A hash of the id -> string map, padding at its end left out: equal for equal vocabularies."""
        digest = hashlib.sha256()
        for token in islice(self._strings, self.known_tokens):
            data = (token or "").encode()
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which `from_folder` and other software read."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            "bos_token": self.token_text(self.bos_id),
            "eos_token": self.token_text(self.eos_id),
            "pad_token": self.token_text(self.pad_id),
        }
        (target / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        return str(self._parsing.to_str())

    def _checked(self, name: str, i: int | None) -> int | None:
        if i is not None and not 0 <= i < self.vocab_size:
            raise ModelError(f"the {name} token id {i} is out of range: the vocabulary has {self.vocab_size} tokens")
        return i


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> str | None:
    """None when every id means the same in both, else the first difference in words.

    Padding at the end (see `Tokenizer.is_padding`) may differ: ids that stand for nothing cannot disagree.
    """
    for i in range(max(a.vocab_size, b.vocab_size)):
        if a.token_text(i) != b.token_text(i) and not (a.is_padding(i) and b.is_padding(i)):
            return f"token {i} is {a.token_text(i)!r} in one vocabulary and {b.token_text(i)!r} in the other"
        if (i in a.control_ids) != (i in b.control_ids) and not a.is_padding(i):
            return f"token {i} ({a.token_text(i)!r}) is a control token in only one of the vocabularies"
    return None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode at character {error.start}") from None


def token_text(value: object) -> str | None:
    """The text of a special token as configuration files write it: a string, or an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if not isinstance(value, str) or not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ModelError(f"tokenizer_config.json: {value!r} is not valid Unicode") from None
    return value


def one_line(error: BaseException) -> str:
    """An exception's message on one line of moderate length."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def _read(file: Path) -> str | None:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ModelError(f"{file}: not UTF-8 text") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None


def _add_tokens(tokenizer: tokenizers.Tokenizer, listed: object) -> None:
    """Adds the tokens of tokenizer_config.json's added_tokens_decoder that tokenizer.json does not have."""
    if not isinstance(listed, Mapping):
        return
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for key, entry in sorted(listed.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        content = token_text(entry)
        if content is None or content in known:
            continue
        special = isinstance(entry, Mapping) and bool(entry.get("special"))
        tokenizer.add_tokens([tokenizers.AddedToken(content, special=special, normalized=False)])
        if str(tokenizer.token_to_id(content)) != str(key):
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json {tokenizer.token_to_id(content)}"
            )


def _copy(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that cuts texts in the same way and has the same tokens, without a post-processor.

    The two share the model, which is most of it, where adding the added tokens again gives them the same ids.
    """
    added = tokenizer.get_added_tokens_decoder()
    copy = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    copy.decoder = tokenizer.decoder
    for i in sorted(added):
        copy.add_tokens([added[i]])
    if {i: str(token) for i, token in copy.get_added_tokens_decoder().items()} == {
        i: str(token) for i, token in added.items()
    }:
        return copy
    return tokenizers.Tokenizer.from_str(tokenizer.to_str())


def _by_id(vocabulary: Mapping[str, int]) -> list[str | None]:
    """The tokens in the order of their ids, None where an id has none."""
    size = max(vocabulary.values(), default=-1) + 1
    if not 0 < size <= 4 * len(vocabulary) + 1024:
        raise ModelError(f"tokenizer.json: {len(vocabulary)} tokens with ids up to {size - 1}")
    strings: list[str | None] = [None] * size
    for token, i in vocabulary.items():
        strings[i] = token
    return strings


def _to_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:  # not written in GPT-2's alphabet: the reference takes the text as it is
        return token.encode()
