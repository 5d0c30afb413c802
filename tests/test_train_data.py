"""Training data on disk: what the target said and thought, resumed after a kill, refused for another target."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_folder
from outpace import api
from outpace.api import LanguageModel
from outpace.train import answers, data, filters, sources
from outpace.train.batches import batch_of, batches
from outpace.train.data import Example, Shards, fingerprint, record
from outpace.train.filters import loop_start
from outpace.train.prompts import OWN_TURN, Prompt
from outpace.train.sources import Composer, Conversations
from outpace.types import ModelError, UsageError

TAPS = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    monkeypatch.setattr(data, "SHARD_ANSWERS", 8)
    monkeypatch.setattr(data, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(data, "TURN_TOKENS", 8)
    monkeypatch.setattr(data, "PROMPT_TOKENS", 200)
    monkeypatch.setattr(filters, "not_text", lambda text: False)  # all that a random model says is noise
    with api.load(folder, draft="none", slots=4, cache=False, threads=1) as loaded:
        yield loaded


def make(model: LanguageModel, out: Path, tokens: int | None, **more: Any) -> int:
    return record(model, out, **{"made_by": "me", "taps": TAPS, "tokens": tokens, "source": Composer(0), **more})


def test_states_are_those_of_a_pass_over_the_same_tokens(model: LanguageModel, tmp_path: Path) -> None:
    assert make(model, tmp_path, 60) >= 60
    shards = Shards(tmp_path, "me")
    assert shards.answers >= 60
    assert model.stats.cached_prompt_tokens > 0  # of prompts that begin as others do, only the rest was read
    for example in shards.sequences:
        tokens = [int(token) for token in example.tokens]
        result = model.generate(tokens, max_tokens=1, temperature=0.0, taps=TAPS)
        for i, tap in enumerate(TAPS):
            np.testing.assert_array_equal(example.states[:, i], result.taps[tap].astype(np.float16))
    # The answers are the target's own: the greedy ones are what it says to the prompt.
    said = [
        model.generate([int(t) for t in e.tokens[: e.answer]], max_tokens=len(e.tokens) - e.answer, temperature=0.0)
        for e in shards.sequences
    ]
    own = [s.token_ids == e.tokens[e.answer :].tolist() for s, e in zip(said, shards.sequences, strict=True)]
    assert 0 < sum(own) < len(own)  # about half of them


def test_a_shard_that_was_interrupted_is_made_again(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    make(model, whole, 150)
    make(model, cut, 60)
    before = (cut / data.INDEX).read_bytes()
    written = data._write

    def killed(folder: Path, number: int, *rest: Any) -> Any:
        written(folder, number, *rest)
        raise SystemExit  # after the arrays, before the index: as kill -9 there would leave it

    monkeypatch.setattr(data, "_write", killed)
    with pytest.raises(SystemExit):
        make(model, cut, 150)
    assert (cut / data.INDEX).read_bytes() == before
    monkeypatch.undo()
    Shards(cut, "me")  # what is complete can be used


def as_set(folder: Path) -> set[tuple[bytes, bytes, int]]:
    return {(e.tokens.tobytes(), e.states.tobytes(), e.answer) for e in Shards(folder, "me").sequences}


def write_questions(file: Path, count: int) -> Conversations:
    """Prompts, every third with a second turn."""

    def turns(i: int) -> list[dict[str, str]]:
        asked = [{"role": "user", "content": f"What is {i}?"}]
        if i % 3 == 0:
            asked += [{"role": "assistant", "content": "not used"}, {"role": "user", "content": "And then?"}]
        return asked

    file.write_text("\n".join(json.dumps({"messages": turns(i)}) for i in range(count)))
    return Conversations(file)


@pytest.fixture
def questions(tmp_path: Path) -> Conversations:
    return write_questions(tmp_path / "questions.jsonl", 20)


@pytest.mark.filterwarnings("ignore:all prompts are answered")
def test_runs_that_are_interrupted_give_what_one_run_gives(
    model: LanguageModel, questions: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    monkeypatch.setattr(sources, "PASSES", 1)
    make(model, one, 10**6, source=questions)
    runs = 0
    while True:

        def interrupt(tokens: int, prompts: int, seconds: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        runs, left = runs + 1, 5
        try:
            make(model, many, 10**6, source=questions, progress=interrupt)
        except KeyboardInterrupt:
            assert not model.engine.running
        else:
            break
        assert runs < 100
    assert runs > 3
    assert as_set(many) == as_set(one)
    assert len(Shards(many, "me").sequences) == len(as_set(many))  # nothing twice
    last = json.loads((many / data.INDEX).read_text())["shards"][-1]
    assert (last["next"], last["open"]) == (20, [])


def test_a_later_pass_over_a_file_is_sampled_and_the_last_one_ends(
    model: LanguageModel, questions: Conversations, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="all prompts are answered"):
        make(model, tmp_path / "out", 10**6, source=questions)
    asks = list(questions.asks(0))
    assert len(asks) == 80
    assert [ask.opts.temperature for ask in asks] == [*[0.0, 0.7] * 10, *[0.7] * 60]
    assert len({ask.opts.seed for ask in asks}) == 80
    assert list(questions.asks(33)) == asks[33:]
    # Each prompt is asked again, and what is said twice is kept once.
    answers = [bytes(e.tokens[e.answer :]) for e in Shards(tmp_path / "out", "me").sequences]
    assert len(answers) == len(set(answers)) > 40


def test_ctrl_c_keeps_the_answers_that_are_complete(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def interrupt(tokens: int, prompts: int, seconds: float) -> None:
        told.append(tokens)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(model, tmp_path, 1000, progress=interrupt)
    assert len(Shards(tmp_path, "me").sequences) == len({0, *told}) - 1 > 0
    assert not model.engine.running
    last = json.loads((tmp_path / data.INDEX).read_text())["shards"][-1]
    assert 0 < len(last["open"]) <= 4  # the slots' and no more: they are asked again


@pytest.mark.filterwarnings("ignore:all prompts are answered")
@pytest.mark.parametrize("passes", range(2, 40, 3))
def test_the_time_may_be_over_at_any_moment(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Also while the target writes the user's turn, of which no hidden states are kept."""
    own = Prompt("chat", ("Tell me more.", OWN_TURN), "")
    monkeypatch.setattr(sources, "compose", lambda seed: iter([own] * 24))
    left = passes

    def now() -> float:
        nonlocal left
        left -= 1
        return 0.0 if left > 0 else 1e9

    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=now))
    out = tmp_path / "data"
    make(model, out, None, seconds=5.0)
    if (out / data.INDEX).exists():
        assert all(np.isfinite(each.states).all() for each in Shards(out, "me").sequences)


def test_data_of_another_target_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    make(model, tmp_path, 10)
    with pytest.raises(UsageError, match="another target"):
        Shards(tmp_path, "somebody else")
    with pytest.raises(UsageError, match="another target"):
        make(model, tmp_path, 100, made_by="somebody else")
    with pytest.raises(UsageError, match="another taps"):
        make(model, tmp_path, 100, taps=(1, 2))


def test_data_of_other_prompts_are_refused(model: LanguageModel, questions: Conversations, tmp_path: Path) -> None:
    composed, asked = tmp_path / "composed", tmp_path / "asked"
    make(model, composed, 10)
    make(model, asked, 10, source=questions)
    with pytest.raises(UsageError, match="composed prompts of seed 0, without --data: use a new folder"):
        make(model, composed, 100, source=Composer(1))
    with pytest.raises(UsageError, match="composed prompts of seed 0, without --data: use a new folder"):
        make(model, composed, 100, source=questions)
    with pytest.raises(UsageError, match="made with --data FILE: use a new folder"):
        make(model, asked, 100)
    questions.file.write_text(questions.file.read_text() + '\n{"prompt": "One more?"}')
    with pytest.raises(UsageError, match="--data FILE, another one, or it has changed"):
        make(model, asked, 100, source=Conversations(questions.file))
    moved = questions.file.rename(tmp_path / "moved.jsonl")
    moved.write_text(moved.read_text().removesuffix('\n{"prompt": "One more?"}'))
    make(model, asked, 30, source=Conversations(moved))  # a file is known by what is in it


def test_data_from_before_there_were_other_sources_go_on(model: LanguageModel, tmp_path: Path) -> None:
    make(model, tmp_path, 40)
    index = json.loads((tmp_path / data.INDEX).read_text())
    del index["source"], index["by"]
    for shard in index["shards"]:
        del shard["open"], shard["left_out"]
    (tmp_path / data.INDEX).write_text(json.dumps(index | {"seed": 0}))
    assert make(model, tmp_path, 100) >= 100
    assert Shards(tmp_path, "me").answers >= 100
    (tmp_path / data.INDEX).write_text(json.dumps(index | {"seed": 1}))
    with pytest.raises(UsageError, match="composed prompts of seed 1"):
        make(model, tmp_path, 100)


@pytest.mark.filterwarnings("ignore:all prompts are answered")
def test_a_model_without_a_chat_template_learns_from_texts(model: LanguageModel, tmp_path: Path) -> None:
    model.template = None
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{i} " * 40}) for i in range(6)))
    make(model, tmp_path / "out", 10**6, source=Conversations(file))
    prompts = {bytes(e.tokens[: e.answer]) for e in Shards(tmp_path / "out", "me").sequences}
    assert model.tokenizer is not None
    beginnings = [model.tokenizer.encode(" ".join([str(i)] * 20)) for i in range(6)]  # a half of each
    assert prompts == {np.array(ids, np.int32).tobytes() for ids in beginnings}
    with pytest.raises(UsageError, match="no chat template: train it on texts"):
        make(model, tmp_path / "composed", 100)


def test_two_processes_do_not_write_at_once(model: LanguageModel, tmp_path: Path) -> None:
    def second(tokens: int, prompts: int, seconds: float) -> None:
        with pytest.raises(UsageError, match="another process"):
            make(model, tmp_path, 10)

    make(model, tmp_path, 10, progress=second)


def test_a_changed_model_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    same = tiny_folder.write(tmp_path)
    assert fingerprint(same, "int8") == fingerprint(folder, "int8")
    assert fingerprint(same, "bf16") != fingerprint(folder, "int8")
    weights = same / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    assert fingerprint(same, "int8") != fingerprint(folder, "int8")


def test_a_folder_with_a_gguf_file_has_its_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    one = fingerprint(tmp_path, "int8")
    file.write_bytes(b"two")
    assert fingerprint(tmp_path, "int8") != one


@pytest.mark.parametrize("damage", ["short", "gone", "rows", "index", "format"])
def test_damaged_data_are_named(model: LanguageModel, tmp_path: Path, damage: str) -> None:
    make(model, tmp_path, 30)
    states, rows, index = (tmp_path / name for name in ("00000.states.npy", "00000.rows.npy", data.INDEX))
    if damage == "short":
        states.write_bytes(states.read_bytes()[:-100])
    elif damage == "gone":
        states.unlink()
    elif damage == "rows":
        array = np.load(rows)
        array[0, 2] = 10**6
        np.save(rows, array)
    elif damage == "index":
        index.write_text('{"shards": [{}], "format": 1}')
    else:
        index.write_text(index.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises((ModelError, UsageError), match=str(tmp_path)):
        Shards(tmp_path, "me")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data_=st.data())
@settings(max_examples=80, deadline=None)
def test_a_damaged_index_is_one_clear_line(data_: st.DataObject) -> None:
    shard = {"sequences": 1, "tokens": 9, "answers": 7, "next": 4, "milliseconds": 5, "open": [2], "left_out": {"x": 1}}
    index: dict[str, Any] = {"format": 1, "target": "me", "taps": [0], "hidden": 4, "source": {"composer": 0}}
    index |= {"by": "engine", "shards": [shard, dict(shard)]}
    where = data_.draw(st.sampled_from([index, shard, index["source"], shard["left_out"]]))
    name = data_.draw(st.sampled_from([*where, "new"]))
    if name in where and data_.draw(st.booleans()):
        del where[name]
    else:
        where[name] = data_.draw(JUNK)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / data.INDEX).write_text(json.dumps(index))
        with pytest.raises((ModelError, UsageError), match=folder) as caught:
            Shards(Path(folder), "me")  # there are no arrays
        assert "\n" not in str(caught.value)
        with contextlib.suppress(ModelError, UsageError):
            data.check(Path(folder), data._index(Path(folder)) or {}, {"source": {"composer": 1}, "by": "server"})


def test_no_data_and_a_full_disk(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no training data"):
        Shards(tmp_path, "me")
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match=r"take about .* but 1.0 kB are free on the disk"):
        make(model, tmp_path, 10)
    # Told beforehand, also where a shard alone would fit.
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    with pytest.raises(ModelError, match="take about"):
        make(model, tmp_path, 10**8)
    make(model, tmp_path, 10)
    with pytest.raises(ModelError, match="take about"):
        make(model, tmp_path, None, seconds=10**9)  # at the rate so far


def test_a_disk_that_fills_up_leaves_whole_shards(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, written = data._put, 0

    def full(file: Any, parts: Any) -> None:
        nonlocal written
        written += 1
        if written == 5:  # the second shard's states
            file.write(b"x" * 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(file, parts)

    monkeypatch.setattr(data, "_put", full)
    with pytest.raises(ModelError, match=r"00001\.states\.npy: cannot be written: No space left"):
        make(model, tmp_path, 1000)
    assert len(Shards(tmp_path, "me").sequences) == 8
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"lock", data.INDEX, *(f"00000.{name}.npy" for name in ("tokens", "states", "rows"))}
    monkeypatch.setattr(data, "_put", put)
    assert make(model, tmp_path, 120) >= 120


KILLED = """
import sys
from pathlib import Path
from outpace import api
from outpace.train import answers, data, filters, sources
filters.not_text = lambda text: False
sources.PASSES = 1
data.SHARD_ANSWERS, data.ANSWER_TOKENS, data.TURN_TOKENS, data.PROMPT_TOKENS = 4, 12, 8, 200
with api.load(sys.argv[1], draft="none", slots=4, cache=False, threads=1) as model:
    def progress(tokens, prompts, seconds): print(tokens, flush=True)
    more = {"made_by": "me", "taps": (0, 2), "source": sources.Conversations(Path(sys.argv[3])), "tokens": 10**6}
    data.record(model, Path(sys.argv[2]), **more, progress=progress)
"""


@pytest.mark.filterwarnings("ignore:all prompts are answered")
def test_kill_9_at_any_time_loses_only_unfinished_answers(
    model: LanguageModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process, killed in the midst of writing again and again, makes what a process left alone makes."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), **os.environ}
    monkeypatch.setattr(sources, "PASSES", 1)
    questions = write_questions(tmp_path / "many.jsonl", 200)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    kept = 0
    for lines in (9, 40, 27):
        command = [sys.executable, "-c", KILLED, str(folder), str(out), str(questions.file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        assert process.wait() == -9
        process.stdout.close()
        shards = Shards(out, "me")
        assert shards.answers >= max(kept, told[-1] - 4 * 12)  # all but a shard that was not full
        kept = shards.answers
    (out / ".00099.states.npy.1.1.part").write_bytes(b"what a killed process leaves")
    make(model, out, 10**6, source=questions)
    assert not list(out.glob(".*.part"))
    make(model, whole, 10**6, source=questions)
    assert as_set(out) == as_set(whole)
    assert len(Shards(out, "me").sequences) == len(as_set(out)) > 100


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        (list(range(100)), None),
        ([1, 2, 3, *[7] * 24], 4),
        ([1, 2, 3, *[7] * 23], None),
        ([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 3], 9),
        ([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 3, 1, 2], 9),
        ([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 3, 5], None),
        (list(range(48)) * 3, 48),
        (list(range(49)) * 3, None),
        ([], None),
    ],
)
def test_a_loop_is_cut_where_it_comes_round(tokens: list[int], cut: int | None) -> None:
    assert loop_start(tokens) == cut


def test_batches_hold_every_sequence_once() -> None:
    rng = np.random.default_rng(0)
    examples = []
    for i in range(60):
        n, answer = int(rng.integers(12, 40)), int(rng.integers(1, 8))
        examples.append(Example(np.full(n, i, np.int32), np.full((n, 2, 4), i, np.float16), answer))
    found = []
    for batch in batches(examples, 100, seed=1):
        assert batch.anchors * len(batch.tokens) <= 100
        for row, answer, count in zip(batch.tokens, batch.answers, batch.counts, strict=True):
            example = examples[row[0]]
            found.append(int(row[0]))
            assert (answer, count) == (example.answer, len(example.tokens) - example.answer)
            assert (row[: len(example.tokens)] == row[0]).all()
            assert (row[len(example.tokens) :] == 0).all()
    assert sorted(found) == list(range(60))
    assert len(batch_of(examples).tokens) == 60
