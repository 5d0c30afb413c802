"""The tokenizer against an independent byte-level BPE, and against hostile metadata and folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.text.tokenizer import Tokenizer, same_vocabulary
from outpace.types import ModelError, UsageError
from text_data import CONTROL, PASSES, TEXTS, USER_DEFINED, metadata, reference_encode


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


@pytest.mark.parametrize("pre", sorted(PASSES))
@pytest.mark.parametrize("special", [False, True])
def test_ids_equal_the_reference(pre, special):
    meta = metadata(pre)
    ours = Tokenizer.from_gguf(meta)
    for text in TEXTS:
        assert ours.encode(text, special=special) == reference_encode(meta, text, special), text


def test_the_pre_tokenizers_differ_where_they_should():
    """Guards the test above: on these texts a wrong choice of pre-tokenizer gives other ids."""
    ids = {pre: [Tokenizer.from_gguf(metadata(pre)).encode(t) for t in TEXTS] for pre in PASSES}
    kinds = ["gpt-2", "qwen2", "qwen35", "llama-bpe"]
    assert all(ids[a] != ids[b] for a in kinds for b in kinds if a != b)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["smollm", "qwen2", "llama-bpe"]))
def test_any_text_equals_the_reference(text, pre):
    meta = metadata(pre)
    assert _cached(pre).encode(text) == reference_encode(meta, text, False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*TEXTS, *CONTROL, *USER_DEFINED, "<|", "im_end|>"]), max_size=6))
def test_texts_come_back(parts):
    text = "".join(parts)
    tok = _cached("smollm")
    assert tok.decode(tok.encode(text), skip_special=False) == text
    assert tok.decode(tok.encode(text, special=True), skip_special=False) == text


_made: dict[str, Tokenizer] = {}


def _cached(pre: str) -> Tokenizer:
    return _made.setdefault(pre, Tokenizer.from_gguf(metadata(pre)))


def test_control_tokens_are_text_unless_asked_for(tokenizer):
    text = "a<|im_end|>b<think>"
    end, think = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<think>")
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert end not in plain
    assert end in parsed
    assert think in plain
    assert think in parsed
    assert tokenizer.decode(parsed) == "ab<think>"
    assert tokenizer.decode(parsed, skip_special=False) == text
    assert tokenizer.encode_parts("<|im_start|>x y<|im_end|><|im_end|>z") == [1, "x y", 2, 2, "z"]


def test_beginning_of_sequence():
    with_bos = Tokenizer.from_gguf(metadata(add_bos_token=True))
    plain = Tokenizer.from_gguf(metadata()).encode("Hello")
    assert with_bos.encode("Hello") == [1, *plain]
    assert with_bos.encode("Hello", special=True) == plain  # a template writes its own
    assert with_bos.encode("Hello", add_bos=False) == plain
    assert Tokenizer.from_gguf(metadata(add_bos_token=None)).encode("Hello") == plain
    llama = Tokenizer.from_gguf(metadata("llama-bpe", add_bos_token=None))
    assert llama.encode("Hello")[0] == 1
    with pytest.raises(ModelError, match="beginning-of-sequence"):
        Tokenizer.from_gguf(metadata(add_bos_token=True, bos_token_id=None))


def test_token_bytes_spell_the_text(tokenizer):
    for text in TEXTS:
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert tokenizer.decode([tokenizer.token_id("ð")]) == "\ufffd"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="out of range"):
            tokenizer.token_bytes(wrong)
    with pytest.raises(UsageError, match="not valid Unicode at character 1"):
        tokenizer.encode("a\ud800")


def test_end_tokens(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.end_ids) == (1, 2, 0, (2,))
    assert Tokenizer.from_gguf(metadata(eot_token_id=0)).end_ids == (2, 0)


def test_numpy_arrays_in_metadata(tokenizer):
    types = np.array(metadata()["tokenizer.ggml.token_type"], dtype=np.int32)
    assert Tokenizer.from_gguf(metadata(token_type=types)).encode("a<|im_end|>") == tokenizer.encode("a<|im_end|>")


def test_folder_equals_gguf(tmp_path):
    for pre in ("smollm", "qwen2", "llama-bpe"):
        gguf = Tokenizer.from_gguf(metadata(pre))
        gguf.save(tmp_path / pre)
        folder = Tokenizer.from_folder(tmp_path / pre)
        assert same_vocabulary(gguf, folder) is None
        assert folder.fingerprint() == gguf.fingerprint()
        assert (folder.bos_id, folder.eos_id, folder.pad_id) == (1, 2, 0)
        for text in TEXTS:
            for special in (False, True):
                assert folder.encode(text, special=special) == gguf.encode(text, special=special)


def test_folder_details(tmp_path):
    Tokenizer.from_gguf(metadata()).save(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    size = len(data["model"]["vocab"])
    config = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {str(size): {"content": "<new>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    tok = Tokenizer.from_folder(tmp_path)
    ids = tok.encode("Hello world, this is long")
    assert ids[0] == 1
    assert tok.decode(ids) == "Hello world, this is long"
    assert tok.eos_id == 2
    assert tok.token_id("<new>") == size
    config["added_tokens_decoder"] = {"7": {"content": "<new>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'<new>' the id 7"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", "[" * 100_000, "not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "bos_token is"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "eos_token is '<nope>'"),
        ("tokenizer_config.json", b"\xff", "not UTF-8"),
    ],
)
def test_damaged_folders(tmp_path, file, text, message):
    Tokenizer.from_gguf(metadata()).save(tmp_path)
    path = tmp_path / file
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=message) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).count(str(tmp_path)) == 1


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    Tokenizer.from_gguf(metadata()).save(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["vocab"]["far"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="ids up to"):
        Tokenizer.from_folder(tmp_path)

    del data["model"]["vocab"]["far"]
    data["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="BPE dropout, which makes the ids random"):
        Tokenizer.from_folder(tmp_path)
    data["model"]["dropout"] = None
    data["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="its decoder is Fuse; only byte-level"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; supported: smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "abc"}, "tokens is missing or not a list"),
        ({"tokens": ["a", 5]}, "entry 1 is not a string"),
        ({"tokens": ["a", "\ud800"]}, "entry 1 is not a string"),
        ({"tokens": ["a", "a"], "merges": [], "token_type": None}, "'a' is both token 0 and 1"),
        ({"tokens": ["a", ""], "merges": [], "token_type": None}, "token 1 is empty"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a"]}, "entry 0 is 'a'"),
        ({"merges": ["a b c"]}, "entry 0 is 'a b c'"),
        ({"merges": ["a b c", "d"]}, "entry 0 is 'a b c'"),  # as many parts as two merges have
        ({"merges": ["a ", "b"]}, "entry 0 is 'a '"),
        ({"merges": ["q \u4e00"]}, "needs the token"),
        ({"token_type": [1, 2]}, "one number for each"),
        ({"token_type": "x"}, "one number for each"),
        ({"eos_token_id": 1 << 40}, "eos token id 1099511627776 is out of range"),
        ({"bos_token_id": -1}, "bos token id -1"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'"),
        ({"eot_token_id": 99_999}, "end token id 99999"),
    ],
)
def test_hostile_metadata(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Tokenizer.from_gguf(metadata(**changes))
    assert "\n" not in str(error.value)


def test_a_wrong_token_type_is_named():
    types = metadata()["tokenizer.ggml.token_type"]
    for wrong in (0, 7, "1", None, 1.0):
        with pytest.raises(ModelError, match="token 5 has type"):
            Tokenizer.from_gguf(metadata(token_type=[*types[:5], wrong, *types[6:]]))


def test_vocabularies_are_compared():
    meta = metadata()
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    a = Tokenizer.from_gguf(meta)
    padded = Tokenizer.from_gguf(metadata(tokens=[*tokens, "[PAD1]", "fill"], token_type=[*types, 1, 5]))
    assert same_vocabulary(a, padded) is None
    assert same_vocabulary(padded, a) is None
    assert a.fingerprint() == padded.fingerprint()
    longer = Tokenizer.from_gguf(metadata(tokens=[*tokens, "real"], token_type=[*types, 1]))
    assert same_vocabulary(a, longer) == f"token {len(tokens)} is None in one vocabulary and 'real' in the other"
    assert a.fingerprint() != longer.fingerprint()
    swapped = Tokenizer.from_gguf(metadata(tokens=[tokens[1], tokens[0], *tokens[2:]]))
    assert same_vocabulary(a, swapped).startswith("token 0 is '<|endoftext|>' in one")
    retyped = Tokenizer.from_gguf(metadata(token_type=[*types[:2], 1, *types[3:]]))
    assert "control token in only one" in same_vocabulary(a, retyped)


def test_llama3_takes_a_whole_word_that_merges_do_not_reach():
    tokens, types = metadata()["tokenizer.ggml.tokens"], metadata()["tokenizer.ggml.token_type"]
    for pre, whole in (("llama-bpe", True), ("llama3", True), ("qwen2", False)):
        meta = metadata(pre, tokens=[*tokens, "Ġxylophone"], token_type=[*types, 1])
        ids = Tokenizer.from_gguf(meta).encode("a xylophone")
        assert (ids[-1] == len(tokens)) == whole
        assert ids == reference_encode(meta, "a xylophone", False)
