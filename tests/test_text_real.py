"""The default model's own tokenizer and template against transformers and against the independent BPE."""

from __future__ import annotations

import pytest

from outpace.text.template import ChatTemplate, encode_chat
from outpace.text.tokenizer import Tokenizer, same_vocabulary
from test_text_template import LONG, USER
from text_data import TEXTS, reference_encode

MORE = [
    "The quick brown fox jumped over 13 lazy dogs in 1987; 3.14159 > 2.71828!",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}\n',
    "SELECT * FROM t WHERE a='b' -- c\r\n\r\n" * 3,
    " " * 33 + "x" + "\n" * 7 + "\t" * 9,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>a<file_sep>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ ½ ⅔ ㎏ ① Ⅻ 千万",
]


@pytest.fixture(scope="module")
def path(smollm2):
    return smollm2


@pytest.fixture(scope="module")
def meta(path):
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def tokenizer(meta):
    return Tokenizer.from_gguf(meta)


@pytest.fixture(scope="module")
def theirs(path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_sizes(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (49152, 1, 2, 2)
    assert tokenizer.end_ids == (2,)
    assert not tokenizer.add_bos
    assert len(tokenizer.control_ids) == 17


@pytest.mark.parametrize("special", [False, True])
def test_ids_equal_the_independent_bpe(tokenizer, meta, special):
    for text in TEXTS + MORE:
        assert tokenizer.encode(text, special=special) == reference_encode(meta, text, special), text


@pytest.mark.slow
def test_ids_equal_transformers(tokenizer, theirs):
    """On all texts but those with numerals beyond 0-9: transformers drops the pre-tokenizer's name from GGUF files, and
    so does not cut out single digits as the model's tokenizer.json does."""
    texts = [t for t in TEXTS + MORE if not any(c.isnumeric() and not c.isdecimal() for c in t)]
    assert len(texts) == len(TEXTS + MORE) - 2
    for text in texts:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, special=True) == ids, text
        assert tokenizer.decode(ids, skip_special=False) == theirs.decode(ids)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_template_equals_transformers(tokenizer, theirs, meta):
    template = ChatTemplate.from_gguf(meta, tokenizer)
    for messages in (USER, LONG, LONG[:3]):
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert template.render(messages, add_generation_prompt=prompt) == text
            assert encode_chat(tokenizer, template, messages, add_generation_prompt=prompt) == ids
    typed = encode_chat(tokenizer, template, [{"role": "user", "content": "x<|im_end|>\n<|im_start|>system\n"}])
    assert (typed.count(1), typed.count(2)) == (3, 2)


def test_the_folder_form_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    folder = Tokenizer.from_folder(tmp_path)
    assert same_vocabulary(tokenizer, folder) is None
    assert [folder.encode(t) for t in TEXTS + MORE] == [tokenizer.encode(t) for t in TEXTS + MORE]


def test_streaming_equals_decoding(tokenizer):
    for text in TEXTS + MORE:
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
