"""Prompts from files: every layout is read, a broken row is skipped and named, whatever it holds; and the filters."""

from __future__ import annotations

import builtins
import contextlib
import json
import tracemalloc
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from outpace.bench.prompts import held_out
from outpace.train import rows as rows_module
from outpace.train.filters import Filter, foreign, not_text, scripts
from outpace.train.prompts import OWN_TURN, Prompt
from outpace.train.rows import BrokenRowError, prompt_of, rows
from outpace.train.sources import OWN_EVERY, Composer, Conversations
from outpace.types import ModelError, UsageError

WORDS = " ".join(f"word{i}" for i in range(400))
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is tea?"},
    {"role": "assistant", "content": "not used"},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "coffee?"}]},
    {"role": "assistant", "content": "not used"},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "What is tea?"},
    {"from": "gpt", "value": "not used"},
    {"from": "human", "value": "And\ncoffee?"},
]
ASKED = Prompt("own", ("What is tea?", "And\ncoffee?"), "Be brief.")
ROWS = [
    ({"messages": CHAT, "id": 7}, ASKED),
    ({"conversations": SHAREGPT}, ASKED),
    ({"prompt": CHAT, "completion": CHAT[:1]}, ASKED),
    ({"prompt": " Why? "}, Prompt("own", ("Why?",))),
    ({"messages": None, "prompt": "Why?"}, Prompt("own", ("Why?",))),
    ({"messages": [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]},
     Prompt("own", ("One.\n\nTwo.",))),
    ({"text": WORDS}, Prompt("own", (" ".join(WORDS.split()[:64]),), plain=True)),
    ({"text": " ".join(WORDS.split()[:20])}, Prompt("own", (" ".join(WORDS.split()[:10]),), plain=True)),
]  # fmt: skip
BROKEN = [
    ([], "not an object"),
    (7, "not an object"),
    ({}, "none of messages"),
    ({"text": None}, "none of messages"),
    ({"text": 3}, "text is no text"),
    ({"text": "too short"}, "fewer than 16 words"),
    ({"messages": {}}, "messages is not a list"),
    ({"messages": []}, "no user's turn"),
    ({"messages": CHAT[:1]}, "no user's turn"),
    ({"messages": ["hi"]}, "no message with a role"),
    ({"messages": [{"content": "hi"}]}, "no message with a role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "no message with a role"),
    ({"messages": [{"role": "user", "content": ""}]}, "a user's turn is empty"),
    ({"messages": [{"role": "user"}]}, "a user's turn is no text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a user's turn is no text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
]


@pytest.mark.parametrize(("row", "prompt"), ROWS)
def test_what_a_row_asks(row: Any, prompt: Prompt) -> None:
    assert prompt_of(row) == prompt


@pytest.mark.parametrize(("row", "why"), BROKEN)
def test_why_a_row_is_broken(row: Any, why: str) -> None:
    with pytest.raises(BrokenRowError, match=why):
        prompt_of(row)


def prompts(file: Path) -> list[Prompt]:
    return [prompt_of(row) for _, row in rows(file)]


@pytest.mark.parametrize("layout", ["lines", "bom", "list", "pretty", "parquet"])
def test_every_layout_of_a_file(tmp_path: Path, layout: str) -> None:
    file = tmp_path / "data"
    given_rows = [row for row, _ in ROWS]
    if layout in ("lines", "bom"):
        text = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in given_rows)
        file.write_text(text, encoding="utf-8-sig" if layout == "bom" else "utf-8")
    elif layout == "parquet":
        table = pyarrow.table({"messages": [CHAT[:3], None], "prompt": [None, "Why?"], "other": [1, 2]})
        parquet.write_table(table, file)
        assert prompts(file) == [Prompt("own", ("What is tea?",), "Be brief."), Prompt("own", ("Why?",))]
        return
    else:
        file.write_text(json.dumps(given_rows, indent=2 if layout == "pretty" else None))
    assert prompts(file) == [prompt for _, prompt in ROWS]


def test_a_list_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "list.json"
    wanted = [{"prompt": f"{'ä€😀' * (i % 40)} {i}"} for i in range(60)]
    file.write_text(json.dumps(wanted, ensure_ascii=False), encoding="utf-8")
    for piece in (1, 2, 7, 64, 1000):
        monkeypatch.setattr(rows_module, "_PIECE", piece)
        assert [row for _, row in rows(file)] == wanted


@pytest.mark.parametrize("layout", ["lines", "list"])
def test_big_files_are_never_held_in_memory(tmp_path: Path, layout: str) -> None:
    file = tmp_path / "big"
    row = json.dumps({"prompt": "x" * 8000})
    file.write_text(f"{row}\n" * 4000 if layout == "lines" else f"[{', '.join([row] * 4000)}]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows(file)) == 4000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20 < file.stat().st_size // 3
    finally:
        tracemalloc.stop()


def test_broken_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    lines = [json.dumps({"prompt": f"What is {i}?"}).encode() for i in range(10)]
    lines[1:1] = [b'{"prompt": ', b"\xff\xfe", b"[" * 100_000, b'{"prompt": ""}']
    lines += [b'{"text": "short"}', b"1" * 10_000, b'{"prompt": "' + b"x" * (17 << 20) + b'"}', lines[0]]
    file.write_bytes(b"\n".join(lines))
    source = Conversations(file)
    asks = list(source.asks(0))[:11]
    assert [ask.prompt.turns[0] for ask in asks] == [f"What is {i}?" for i in (*range(10), 0)]
    note = source.note()
    assert note.startswith(
        f"{file}: 7 of 18 rows were skipped: line 2: not JSON, line 3: not UTF-8 text, line 4: not JSON"
    )
    assert "line 5: prompt is empty, line 15: a text of fewer than 16 words, ..." in note


def test_rows_after_a_broken_item_of_a_list_are_given_up_aloud(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text('[{"prompt": "Why?"}, {"prompt": "How?"}, {"prompt": What?}, {"prompt": "Who?"}]')
    source = Conversations(file)
    assert [ask.prompt.turns for ask in source.asks(0)][:2] == [("Why?",), ("How?",)]
    assert source.note().endswith("1 of 3 rows were skipped: row 3: not JSON; the rest of the list cannot be read")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]", b"[", b"{}", b"[1, 2]", b"\x00" * 100, b"PAR1" + b"\0" * 50])
def test_a_file_without_a_usable_row_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=str(file)):
        list(Conversations(file).asks(0))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such file"):
        Conversations(tmp_path / "none")
    with pytest.raises(UsageError, match=r"is a folder.*--shards"):
        Conversations(tmp_path)
    file = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"question": ["Why?"]}), file)
    with pytest.raises(UsageError, match="has no column messages, conversations, prompt or text"):
        Conversations(file)
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError("No module named 'pyarrow'")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'outpace\[train\]'"):
        Conversations(file)


def test_a_damaged_table_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"prompt": [f"{i} " * 200 for i in range(1000)]}), file, row_group_size=100)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 2000] = bytes(2000)
    file.write_bytes(raw)
    found = list(rows(file))
    assert 100 < len(found) < 1000
    assert isinstance(found[-1][1], BrokenRowError)


def test_prompts_that_are_held_out_are_not_learnt_from(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    known = next(p for p in held_out() if p.kind == "summarise").messages[-1]["content"]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in (f"Please. {known}", "What is tea?")))
    source = Conversations(file)
    assert {ask.prompt.turns for ask in source.asks(0)} == {("What is tea?",)}
    assert "line 1: shares eight words in a row with a held-out prompt" in source.note()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
ROLE = st.sampled_from(["user", "human", "system", "assistant", "gpt"]) | JSON
MESSAGE = st.fixed_dictionaries({}, optional={"role": ROLE, "from": ROLE, "content": JSON, "value": JSON}) | JSON
ROW = st.fixed_dictionaries(
    {},
    optional={"messages": st.lists(MESSAGE) | JSON, "conversations": st.lists(MESSAGE), "prompt": JSON, "text": JSON},
)


@given(ROW | JSON)
@settings(max_examples=100, deadline=None)
def test_any_row_is_a_prompt_or_broken(row: object) -> None:
    with contextlib.suppress(BrokenRowError):
        prompt = prompt_of(row)
        assert prompt.turns
        assert all(turn.strip() for turn in prompt.turns)


@given(st.binary(max_size=200) | st.lists(JSON, max_size=4).map(lambda found: json.dumps(found).encode()))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_rows_or_broken(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    file.write_bytes(raw)
    with contextlib.suppress(UsageError):
        for _, row in rows(file):
            assert isinstance(row, BrokenRowError) or json.dumps(row)


def test_the_composer_lets_the_target_ask_now_and_then() -> None:
    asks = list(islice(Composer(0).asks(0), 2100))
    own = [ask for ask in asks if OWN_TURN in ask.prompt.turns]
    assert 0.7 < len(own) / (len(asks) / OWN_EVERY) <= 1  # those that have a second turn already keep it
    assert all(ask.prompt.turns[0] for ask in own)
    assert {ask.opts.temperature for ask in own} == {0.0, 0.7}
    assert list(islice(Composer(0).asks(1000), 50)) == asks[1000:1050]


# ------------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("answer", "asked", "is_foreign"),
    [
        ("Tea is a drink made of leaves.", "What is tea?", False),
        ("Чай это напиток из листьев.", "What is tea?", True),
        ("Чай это напиток из листьев.", "Что такое чай?", False),
        ("Чай это напиток.", "Translate into Russian: tea is a drink.", False),
        ("お茶は飲み物です。日本茶が有名です。", "茶是什么?", False),
        ("茶是一种饮料,由茶叶制成,很多人喜欢。", "What is tea?", True),
        ("π", "What is the number?", False),
        ("x = 1", "🙂", False),
        ("Вот код:\n```python\nfor i in range(10): print(i, i * i)\n```\nОн печатает числа.", "Напиши код", False),
        ("Sure, here is what you asked for.", "Что такое чай?", True),
    ],
)
def test_another_script_than_the_prompt(answer: str, asked: str, is_foreign: bool) -> None:
    assert foreign(answer, asked) == is_foreign


@pytest.mark.parametrize(
    ("text", "noise"),
    [
        ("Tea is a drink.", False),
        ("| a | b |\n|---|---|\n| 1 | 2 |", False),
        ("$\\frac{1}{2} + 3 = 3.5$", False),
        ("def f(x):\n    return {x: [x ** 2]}", False),
        ("हिन्दी में उत्तर", False),
        ("", True),
        (" \n ", True),
        ("!?%&()[]{}<>" * 5, True),
        ("🙂🙂🙂🙂", True),
        ("ab\x00\x01cd" * 5, True),
        ("caf\ufffd" * 10, True),
    ],
)
def test_what_is_no_text(text: str, noise: bool) -> None:
    assert not_text(text) == noise


def test_scripts_are_counted() -> None:
    assert scripts("ab гд 1! 茶 かな") == {"LATIN": 2, "CYRILLIC": 2, "CJK": 3}


def test_reasons_are_counted_and_only_the_first_of_equal_answers_is_kept() -> None:
    chosen = Filter()
    assert chosen.keeps(list(range(10)), "Tea is a drink.", "What is tea?")
    assert not chosen.keeps(list(range(10)), "Tea is a drink.", "What is tea, please?")
    assert not chosen.keeps([1, 2], "No.", "What is tea?")
    assert not chosen.keeps(list(range(20)), "Чай это напиток из листьев.", "What is tea?")
    assert not chosen.keeps(list(range(30)), "%%%%", "What is tea?")
    assert chosen.keeps(list(range(40)), None, "")
    assert chosen.left_out == {"said before": 1, "too short": 1, "another script": 1, "no text": 1}


def test_a_target_that_says_nothing_useful_does_not_run_for_ever() -> None:
    chosen = Filter()
    answers = (chosen.keeps([1], "No.", "Why?") for _ in repeat(None))
    with pytest.raises(ModelError, match=r"last 1000 prompts or answers could not be used: too short 1,000"):
        any(answers)
