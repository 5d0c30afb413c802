"""Training data on disk: what the target said and thought, resumed after a kill, refused for another target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_folder
from outpace import api
from outpace.api import LanguageModel
from outpace.train import data
from outpace.train.batches import batch_of, batches
from outpace.train.data import Example, Shards, fingerprint, loop_start, record
from outpace.types import ModelError, UsageError

TAPS = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    monkeypatch.setattr(data, "SHARD_PROMPTS", 8)
    monkeypatch.setattr(data, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(data, "TURN_TOKENS", 5)
    monkeypatch.setattr(data, "PROMPT_TOKENS", 200)
    with api.load(folder, draft="none", slots=4, cache=False, threads=1) as loaded:
        yield loaded


def make(model: LanguageModel, out: Path, tokens: int, **more: Any) -> int:
    return record(model, out, **{"made_by": "me", "taps": TAPS, "tokens": tokens, **more})


def test_states_are_those_of_a_pass_over_the_same_tokens(model: LanguageModel, tmp_path: Path) -> None:
    assert make(model, tmp_path, 60) >= 60
    shards = Shards(tmp_path, "me")
    assert shards.answers >= 60
    for example in shards.sequences[:3]:
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


def test_going_on_gives_what_one_run_gives(model: LanguageModel, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make(model, one, 200)
    first, second, *_ = json.loads((one / data.INDEX).read_text())["shards"]
    make(model, two, first["answers"])
    make(model, two, first["answers"] + second["answers"])
    count = first["sequences"] + second["sequences"]
    for ours, theirs in zip(Shards(two, "me").sequences, Shards(one, "me").sequences[:count], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.states, theirs.states)


def test_ctrl_c_keeps_the_answers_that_are_complete(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(tokens: int, prompts: int, seconds: float) -> None:
        if prompts >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(model, tmp_path, 1000, progress=interrupt)
    assert len(Shards(tmp_path, "me").sequences) == 3
    assert not model.engine.running


def test_data_of_another_target_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    make(model, tmp_path, 10)
    with pytest.raises(UsageError, match="another target"):
        Shards(tmp_path, "somebody else")
    with pytest.raises(UsageError, match="another target"):
        make(model, tmp_path, 100, made_by="somebody else")
    with pytest.raises(UsageError, match="another taps"):
        make(model, tmp_path, 100, taps=(1, 2))


def test_a_changed_model_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    same = tiny_folder.write(tmp_path)
    assert fingerprint(same, "int8") == fingerprint(folder, "int8")
    assert fingerprint(same, "bf16") != fingerprint(folder, "int8")
    weights = same / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    assert fingerprint(same, "int8") != fingerprint(folder, "int8")


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


def test_no_data_and_a_full_disk(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no training data"):
        Shards(tmp_path, "me")
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match="free on the disk"):
        make(model, tmp_path, 10)


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
