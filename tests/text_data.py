"""A small byte-level vocabulary in GGUF form, an independent byte-level BPE, and texts that are hard to tokenize."""

from __future__ import annotations

import functools
from typing import Any

import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = [
    "",
    "Hello world",
    "  two spaces,\t\ttabs \n\n\n and lines \r\n\r\nend  ",
    "It's I'LL they've you'D 'tis we'ſ",
    "0 12 345 6789 1234567 ٣٤٥ ½ ² Ⅷ x1y22",
    "def f(x):\n    return {'a': [1, 2]}  # ok\n\n\tpass",
    "naïve café Straße Ωμέγα привет שלום مرحبا",
    "日本語のテキスト、中文字符。한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 n\u0303o हिन्दी ไทย",
    "a<|im_end|>b <|im_start|>user\n<think>x</think> <|im_end",
    "\u00a0\u2003\u3000wide\u200b\ufeff spaces\u2028lines",
    "!!! ... ---==> $100.00 (50%) [x] <y> #z @w ~`^|\\/",
]
TRAINING = [*TEXTS, *(f"the quick brown fox {i} jumps over the lazy dog's back in 20{i}" for i in range(60))] * 2

# The split patterns as llama.cpp's documentation of `tokenizer.ggml.pre` spells them: each piece of one pass is split
# again by the next.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PASSES = {
    "gpt-2": [_GPT2],
    "default": [_GPT2],
    "smollm": [r"\p{N}|\P{N}+", _GPT2],
    "qwen2": [_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _TAIL],
    "qwen35": [_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _TAIL],
    "llama-bpe": [_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _TAIL],
    "llama3": [_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _TAIL],
}
NFC = {"qwen2", "qwen35"}


def alphabet() -> dict[int, str]:
    """byte -> GPT-2's character for it, counted out anew."""
    table, extra = {}, 0
    for byte in range(256):
        if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173):
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


@functools.cache
def _trained() -> tuple[tuple[str, ...], tuple[str, ...]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple(" ".join(m) for m in model["merges"])


def metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF tokenizer metadata; `changes` replace keys without their tokenizer.ggml prefix (None removes one)."""
    tokens, merges = _trained()
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *USER_DEFINED],
        "merges": list(merges),
        "token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)) + [4] * len(USER_DEFINED),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        "add_bos_token": False,
    }
    values.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def reference_encode(meta: dict[str, Any], text: str, special: bool) -> list[int]:
    """Byte-level BPE written out: cut at added tokens, split, then merge the pair of lowest rank until none is left."""
    import unicodedata

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = {t: i for i, t in enumerate(tokens)}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(meta["tokenizer.ggml.merges"])}
    whole = meta["tokenizer.ggml.pre"] in ("llama-bpe", "llama3")
    added = [t for t, kind in zip(tokens, types, strict=True) if kind == 4 or (special and kind == 3)]
    table = alphabet()
    result: list[int] = []
    for part in regex.split("(" + "|".join(regex.escape(t) for t in sorted(added, key=len, reverse=True)) + ")", text):
        if part in added:
            result.append(ids[part])
            continue
        pieces = [unicodedata.normalize("NFC", part) if meta["tokenizer.ggml.pre"] in NFC else part]
        for pattern in PASSES[meta["tokenizer.ggml.pre"]]:
            pieces = [found for piece in pieces for found in regex.findall(pattern, piece)]
        for piece in pieces:
            symbols = [table[byte] for byte in piece.encode()]
            if whole and "".join(symbols) in ids:
                result.append(ids["".join(symbols)])
                continue
            while True:
                pairs = list(zip(symbols, symbols[1:], strict=False))
                best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 60), default=None)
                if best is None or best not in ranks:
                    break
                merged, at = [], 0
                while at < len(symbols):
                    both = tuple(symbols[at : at + 2]) == best
                    merged.append("".join(symbols[at : at + 2]) if both else symbols[at])
                    at += 2 if both else 1
                symbols = merged
            result += [ids[s] for s in symbols if s in ids]
    return result
