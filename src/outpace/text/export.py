"""A Hugging Face folder's tokenizer and chat template as GGUF metadata: vocabulary.py's way, backwards.

Neighbours: tokenizer.py and template.py read the folder; models/export.py writes the file. Source: the GGUF
specification (keys `tokenizer.*`); names of pre-tokenizers and of padding tokens as llama.cpp's converter gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import Tokenizer
from outpace.text.vocabulary import CONTROL, NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, splitters
from outpace.types import ModelError

# Encoded before and after; every splitting rule has something to do in it.
PROBE = (
    "Hello, World's  end!\n\n\t3.14159 = 1234567890 don't DON'T we'LL\r\n   x_1+=(y**2)//z;  caf\u00e9 e\u0301 "
    "\u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f642\U0001f469\u200d\U0001f4bb \u0663\u0664 \u00bd "
    "\u00a0 <html>&amp; ... -- ''q'' \x00 \n "
)


def tokenizer_metadata(folder: str | Path, vocab_size: int) -> dict[str, Any]:
    """The keys `tokenizer.*` for a folder's tokenizer.json and chat template, but for the ids of end tokens.

    vocab_size: rows of the embedding; ids without a token become unused ones named [PADn]. Raises ModelError for a
    tokenizer that GGUF has no name for, or that would not come back the same.
    """
    folder = Path(folder)
    tokenizer = Tokenizer.from_folder(folder)
    try:
        metadata = _vocabulary(tokenizer, vocab_size) | _special(tokenizer)
        rebuilt = Tokenizer.from_gguf(metadata)
        for special in (False, True):
            text = PROBE + "".join(tokenizer.control_tokens[:64])
            if rebuilt.encode(text, special=special) != tokenizer.encode(text, special=special):
                raise ModelError("the tokenizer cannot be written as GGUF: it would split text in another way")
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    return metadata | _templates(ChatTemplate.from_folder(folder))


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {vocab_size}")
    state = json.loads(tokenizer.to_json())
    model = state["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise ModelError(f"a {model.get('type')} tokenizer with these options cannot be written as GGUF")
    added = {token["id"]: token for token in state["added_tokens"]}
    for token in added.values():
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise ModelError(
                f"the token {token['content']!r} takes the spaces around it or stands only for whole words, "
                "which GGUF cannot say"
            )
    tokens, types = [], []
    for i in range(vocab_size):
        name = tokenizer.token_text(i)
        tokens.append(f"[PAD{i}]" if name is None else name)
        kind = NORMAL if name is not None else UNUSED
        if i in added:
            kind = CONTROL if added[i]["special"] else USER_DEFINED
        types.append(kind)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(state),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }


def _pre(state: dict[str, Any]) -> str:
    """The name of the pre-tokenizer with the same parts."""
    wanted = (_form(state["normalizer"]), _form(state["pre_tokenizer"]), bool(state["model"].get("ignore_merges")))
    for name in PRE_TOKENIZERS:
        normalizer, splitter, ignore_merges = splitters(name)
        found = None if normalizer is None else json.loads(normalizer.__getstate__())
        if wanted == (_form(found), _form(json.loads(splitter.__getstate__())), ignore_merges):
            return name
    raise ModelError(
        f"its pre-tokenizer is none of those that can be written as GGUF ({', '.join(PRE_TOKENIZERS)}); "
        "use the model's own folder"
    )


def _form(part: Any) -> Any:
    """A part of tokenizer.json without what changes no ids, and without sequences of one."""
    if not isinstance(part, dict):
        return part
    inner = part.get("pretokenizers") or part.get("normalizers")
    if part.get("type") == "Sequence" and inner and len(inner) == 1:
        return _form(inner[0])
    form = {key: value for key, value in part.items() if key not in ("trim_offsets", "pretokenizers", "normalizers")}
    return form | {"parts": [_form(each) for each in inner or ()]}


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    named: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    return named | {"tokenizer.ggml.add_bos_token": tokenizer.add_bos}


def _templates(template: ChatTemplate | None) -> dict[str, Any]:
    """The default template under the key itself, others under their names."""
    if template is None:
        return {}
    key = "tokenizer.chat_template"
    named = {(key if name == "default" else f"{key}.{name}"): text for name, text in template.sources.items()}
    others = sorted(name for name in template.sources if name != "default")
    return named | ({"tokenizer.chat_templates": others} if others else {})
