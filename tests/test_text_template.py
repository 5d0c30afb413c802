"""Chat templates: the text transformers gives, harmless whatever the template does, safe whatever the user types."""

from __future__ import annotations

import itertools
import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.text.template import ChatTemplate, encode_chat
from outpace.text.tokenizer import Tokenizer
from outpace.types import ModelError, UsageError
from text_data import TEXTS, metadata

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The behaviour of Qwen3's template in our words: system and tools, thinking kept only after the last question, tool
# calls and answers in tags, an empty thought when thinking is off.
QWEN3 = """
{%- macro turn(role, text) %}{{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{%- endmacro %}
{%- set first = messages[0].role == 'system' %}
{%- if tools %}
    {%- set ns = namespace(listed='') %}
    {%- for tool in tools %}{%- set ns.listed = ns.listed + '\n' + (tool | tojson) %}{%- endfor %}
    {{- turn('system', (messages[0].content + '\n\n' if first else '') + '# Tools\n<tools>' + ns.listed + '\n</tools>') }}
{%- elif first %}
    {{- turn('system', messages[0].content) }}
{%- endif %}
{%- set last = namespace(query=messages | length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if last.seeking and message.role == 'user' and not (message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set last.seeking = false %}
        {%- set last.query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- turn(message.role, message.content) }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

USER = [{"role": "user", "content": "Why is the sky <blue>?\n"}]
LONG = [
    {"role": "system", "content": "  Be brief & 'kind'. "},
    {"role": "user", "content": "Weather in Paris é?"},
    {
        "role": "assistant",
        "content": "<think>\nI should ask.\n</think>\n\nLet me see.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris <é>"}}}],
    },
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "<think>Fine.</think>21 degrees"},
    {"role": "user", "content": "<think> and </think> are words\n\n"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"a": "<b>"}}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(metadata("qwen2"))


@pytest.fixture(scope="module")
def transformers_tokenizer(tokenizer, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("source", [CHATML, QWEN3], ids=["chatml", "qwen3"])
def test_text_and_ids_equal_transformers(source, tokenizer, transformers_tokenizer):
    ours = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    options = itertools.product(
        [USER, LONG, LONG[:3], LONG[:5]], [None, TOOLS], [True, False], [{}, {"enable_thinking": False}]
    )
    for messages, tools, prompt, extra in options:
        kwargs = {"tools": tools, "add_generation_prompt": prompt, **extra}
        text = transformers_tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)
        ids = transformers_tokenizer.apply_chat_template(messages, chat_template=source, return_dict=False, **kwargs)
        assert ours.render(messages, **kwargs) == text
        assert encode_chat(tokenizer, ours, messages, **kwargs) == ids


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{{ messages[0]['content'] | trim }}{{ eos_token }}{{ unknown }}{{ none }}{{ 1.5 }}{{ true }}",
        "  {% if true %}  \n  a\n{% endif %}\n{{ tools is none }} {{ x | default('d') }}",
        "{{ {'b': '<é>&', 'a': [1, none, true]} | tojson }}{{ [1, {'a': 2}] | tojson(indent=2) }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "a{% generation %}b{{ messages[0].role }}{% endgeneration %}c",
        "{{ strftime_now('%Y') }}",
        "{% macro m(x, y='z') %}[{{ x ~ y }}]{% endmacro %}{{ m('q') | upper }}{{ m(x='r', y='s') }}",
        "{% for m in messages recursive %}{{ m.role }}{% if loop.depth < 3 %}{{ loop([m]) }}{% endif %}{% endfor %}",
        "{% for k, v in {'x': 1, 'y': 2} | items if v > 1 %}{{ k }}{{ loop.last }}{{ loop.length }}{% else %}-{% endfor %}",
        "{% filter upper %}abc{{ 'd' }}{% endfilter %}{% set y | replace('q', 'w') %}qq{% endset %}{{ y }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | join('-', attribute='role') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a-b'.split('-') | last }}",
        "{{ 'x' * 3 + 'y' }}{{ 2 ** 5 % 7 }}{{ [1] + [2] }}{{ 'aXa'.replace('a', 'b') }}{{ 'l\nm' | indent(2) }}",
        "{{ '{} of {}'.format(1, 'x') }}{{ 'a'.join(['1', '2']) }}{{ '7'.zfill(3) }}{{ 'b a' | title }}",
    ],
)
def test_conventions_equal_transformers(source, transformers_tokenizer):
    expected = transformers_tokenizer.apply_chat_template(USER, chat_template=source, tokenize=False)
    template = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    assert template.render(USER, add_generation_prompt=False) == expected


def test_the_clock_can_be_set():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 1, 2))
    assert template.render(USER) == "02 Jan 2026"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) if n else 0 }}{{ m(n - 1) if n else 0 }}{% endmacro %}{{ m(25) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=2) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% for i in range(90000) %}{{ '" + "a" * 1000 + "' }}{% endfor %}",
        "{% set x %}{% for i in range(90000) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ (2**32) ** 999999999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000d}'.format(1) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
        "{{ (['a' * 10**6] * 10**5) | join }}",
        "{{ ('b' * 10**6).join(['a'] * 10**5) }}",
        "{{ 'a' | indent(10**10, true) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_can_do_no_harm(source):
    with pytest.raises(ModelError, match="chat template") as error:
        ChatTemplate("\n\n" + source).render(USER)
    assert "line 3" in str(error.value) and "\n" not in str(error.value)


def test_template_errors():
    with pytest.raises(ModelError, match=r"line 2 of the chat template"):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(UsageError, match=r"refuses the messages: roles must alternate \(line 2"):
        ChatTemplate("a\n{{ raise_exception('roles must\nalternate') }}").render(USER)
    with pytest.raises(ModelError, match="longer than"):
        ChatTemplate("a" * (1 << 21))
    with pytest.raises(ModelError, match="not a text"):
        ChatTemplate({"default": None})


def test_named_templates(tmp_path):
    named = {"default": "plain", "tool_use": "tools"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": k, "template": v} for k, v in named.items()]})
    )
    for template in (
        ChatTemplate(named),
        ChatTemplate.from_folder(tmp_path),
        ChatTemplate.from_gguf(
            {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"},
            Tokenizer.from_gguf(metadata()),
        ),
    ):
        assert template.render(USER) == "plain" and template.render(USER, tools=TOOLS) == "tools"
    with pytest.raises(UsageError, match="only: tool_use"):
        ChatTemplate({"tool_use": "x"}).render(USER)


def test_where_a_folder_keeps_its_template(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_gguf({}, Tokenizer.from_gguf(metadata())) is None
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path).render(USER) == "config </s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.from_folder(tmp_path).render(USER) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ eos_token }}")
    assert ChatTemplate.from_folder(tmp_path).render(USER) == "jinja </s>"
    (tmp_path / "chat_template.jinja").write_text("{{")
    with pytest.raises(ModelError, match=str(tmp_path)):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ([1], "message 0 is not an object"),
        ([{"role": "robot", "content": "x"}], "role is 'robot', not one of system"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"content": "x"}], "role is None"),
        ([*USER, {"role": "user"}], "message 1: the user message has no content"),
        ([{"role": "assistant", "content": None}], "has no content"),
        ([{"role": "user", "content": 5}], "must be a text or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'; only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has no text"),
        ([{"role": "assistant", "content": "", "tool_calls": {}}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "no function name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "f are not JSON"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(UsageError, match=message):
        ChatTemplate(CHATML).render(messages)


def test_content_parts_and_json_arguments():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate("{{ messages[0].content }}").render(parts) == "ab"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "f", "arguments": {"x": "é"}}' in ChatTemplate(QWEN3).render(messages)
    assert call["function"]["arguments"] == '{"x": "é"}'  # the caller's own message is left alone


# ------------------------------------------------------------------------------------------- typed control tokens

PIECES = [*TEXTS, "<|im_end|>", "<|im_start|>system\n", "<|im_", "<", "end|>", "|>", ">", "\ue000", "<tool_response>"]
contents = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([CHATML, QWEN3]), contents, contents, st.sampled_from(["a", "x<|im_end|>y"]))
def test_only_the_template_writes_control_tokens(source, question, answer, key):
    tok, template = _tokenizer(), ChatTemplate(source)
    call = {"function": {"name": "f", "arguments": {key: question}}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, "tool_calls": [call]},
        {"role": "tool", "content": question},
        {"role": "user", "content": answer},
    ]
    ids = encode_chat(tok, template, messages)
    assert tok.decode(ids, skip_special=False) == _nfc(template.render(messages))
    starts = [i for i, token in enumerate(ids) if token == 1]
    ends = [i for i, token in enumerate(ids) if token == 2]
    assert len(starts) == 5 and len(ends) == 4
    assert [tok.decode(ids[i + 1 : i + 3])[:1] for i in starts] == [
        "u",
        "a",
        *("t" if source == CHATML else "u"),
        "u",
        "a",
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([CHATML, QWEN3]), st.lists(st.sampled_from([t for t in PIECES if "<|im" not in t]), max_size=5))
def test_without_control_tokens_the_ids_are_those_of_the_text(source, parts):
    tok, template = _tokenizer(), ChatTemplate(source)
    messages = [{"role": "user", "content": "".join(parts)}, {"role": "user", "content": "<"}]
    if "<|" in messages[0]["content"]:
        return
    assert encode_chat(tok, template, messages) == tok.encode(template.render(messages), special=True)


def test_control_tokens_through_json_escapes():
    template = ChatTemplate("<|im_start|>{{ messages[0].content | tojson(ensure_ascii=true) }}<|im_end|>")
    ids = encode_chat(_tokenizer(), template, [{"role": "user", "content": "é<|im_end|>"}])
    assert _tokenizer().decode(ids, skip_special=False) == '<|im_start|>"\\u00e9<|im_end|>"<|im_end|>'
    assert ids.count(2) == 1


def test_control_tokens_completed_by_the_template():
    tok = _tokenizer()
    for source, content in (("<{{ messages[0].content }}", "|im_end|>"), ("{{ messages[0].content }}>", " <|im_end| ")):
        template = ChatTemplate(source.replace("}}", "| trim }}"))
        assert 2 in tok.encode(template.render([{"role": "user", "content": content}]), special=True)
        ids = encode_chat(tok, template, [{"role": "user", "content": content}])
        assert 2 not in ids and tok.decode(ids, skip_special=False) == "<|im_end|>"


_made: list[Tokenizer] = []


def _tokenizer() -> Tokenizer:
    if not _made:
        _made.append(Tokenizer.from_gguf(metadata("qwen2")))
    return _made[0]


def _nfc(text: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", text)
