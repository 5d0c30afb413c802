"""Every kind of head on a tiny target: the loss falls, and the command goes from a model's name to figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import outpace.bench.drafter
import outpace.bench.prompts
import tiny
import tiny_folder
from outpace.cli.app import build
from outpace.config import ModelConfig
from outpace.heads.loading import load_head
from outpace.models.loading import load_model
from outpace.models.names import expected_tensors
from outpace.train import data, filters, heap, loop, run
from outpace.train.data import Example
from outpace.train.kinds import KINDS, kind_of
from outpace.train.loop import Recipe, Trainer
from outpace.train.target import Target, default_taps
from outpace.types import UsageError
from outpace.weights.safetensors import write_safetensors

LAYERS, STEPS = 8, 45
CONFIG, ARRAYS = tiny.random_model(num_hidden_layers=LAYERS, seed=3)
TARGET = Target(CONFIG, ARRAYS["model.embed_tokens.weight"], ARRAYS["lm_head.weight"], ARRAYS["model.norm.weight"])
TAPS = default_taps(CONFIG)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "fastest", lambda: torch.float32)


def shards(folder: Path) -> data.Shards:
    """Sequences whose every token follows from the one before, with states that say what comes."""
    rng = np.random.default_rng(0)
    following = (np.arange(CONFIG.vocab_size) * 7 + 3) % 31
    states = rng.standard_normal((CONFIG.vocab_size, len(TAPS), CONFIG.hidden_size)).astype(np.float16)
    states[:, -1] = TARGET.lm_head[following] / TARGET.norm  # through norm and head: the token that follows
    found = []
    for _ in range(60):
        tokens = np.empty(int(rng.integers(16, 30)), np.int32)
        tokens[0] = rng.integers(0, 30)
        for i in range(1, len(tokens)):
            tokens[i] = following[tokens[i - 1]]
        found.append(Example(tokens, states[tokens], int(rng.integers(2, 6))))
    line = data._write(folder, 0, found) | {"next": 60, "milliseconds": 1}
    facts = {"format": data.FORMAT, "target": "me", "taps": list(TAPS), "hidden": CONFIG.hidden_size, "seed": 0}
    (folder / data.INDEX).write_text(json.dumps(facts | {"shards": [line]}))
    return data.Shards(folder, "me")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_from_the_same_data(kind: str, tmp_path: Path) -> None:
    stages = kind_of(kind).recipe.get("stages", ((0.0, 1), (0.5, 3)))
    recipe = Recipe(vocabulary=40, positions=120, stages=stages, rate=3e-3, checked=10)
    learner = Trainer(TARGET, shards(tmp_path), tmp_path / "out", name="tiny", kind=kind, recipe=recipe)
    before, losses, agreed = learner.validate(3), [], []
    for step, batch in zip(range(STEPS), learner._batches(), strict=False):
        learner._step(batch, step / STEPS)
        losses.append(learner.status.loss)
        agreed.append(learner.status.agree)
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert np.mean([agree[1] for agree in agreed[-10:]]) > 0.3  # of the second guess
    assert learner.validate(3) > 1.5 * before
    learner.save()
    shared, other = data.Shards(tmp_path, "me"), next(name for name in KINDS if name != kind)
    head = load_head(tmp_path / "out", CONFIG)
    assert (head.config.algorithm, set(head.config.taps) <= set(TAPS)) == (kind, True)
    with pytest.raises(UsageError, match=f"of kind {kind}, not"):
        Trainer(TARGET, shared, tmp_path / "out", name="tiny", kind=other, recipe=recipe, resume=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and layers enough."""
    config = ModelConfig(
        **{name: getattr(tiny_folder.CONFIG, name) for name in tiny_folder.CONFIG.__slots__}
        | {"num_hidden_layers": LAYERS}
    )
    path = tmp_path_factory.mktemp("tiny")
    tiny_folder.write(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": LAYERS}))
    rng = np.random.default_rng(0)
    arrays = {name: tiny._random(name, shape, rng) for name, shape in expected_tensors(config).items()}
    write_safetensors(path / "model.safetensors", arrays)
    return path


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_the_command_goes_through_to_figures(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(data, "SHARD_ANSWERS", 6)
    monkeypatch.setattr(data, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(data, "PROMPT_TOKENS", 240)
    monkeypatch.setattr(run, "SLOTS", 4)
    monkeypatch.setattr(run, "TOKENS", 16)
    monkeypatch.setattr(filters, "not_text", lambda text: False)  # all that a random model says is noise
    few = [prompt for prompt in outpace.bench.prompts.held_out() if prompt.id.endswith("-2")]
    monkeypatch.setattr(outpace.bench.drafter, "held_out", lambda: few)
    init = Recipe.__init__

    def quick(self: Recipe, **more: Any) -> None:
        init(self, **{"positions": 50, "checked": 4, "stages": ((0.0, 2),), **more})

    monkeypatch.setattr(loop.Recipe, "__init__", quick)
    out = tmp_path / "head"
    args = ["--kind", kind, "--minutes", "0.09", "--data-minutes", "0.05", "--json", "--threads", "1"]
    result = CliRunner().invoke(build(), ["train", str(folder), "--out", str(out), *args])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["positions"] > 0
    found, *_ = made["held_out"]["acceptance"]
    assert found["tokens_per_round"]["all"] >= 1.0
    assert len(found["kept_by_position"]) == 7
    head = load_head(out, load_model(folder).config)
    assert head.format == {"mtp": "speculators MTP", "dflash": "speculators DFlash"}[kind]
    assert head.config.draft_vocab_size < head.config.layers.vocab_size or head.d2t is None


def held(kind: str) -> int:
    """kB of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_pages_of_the_data_are_given_back(tmp_path: Path) -> None:
    np.save(tmp_path / "states.npy", np.arange(8 << 20, dtype=np.float32))
    states = np.load(tmp_path / "states.npy", mmap_mode="r")
    total = states.sum(dtype=np.float64)
    before = held("RssFile")
    heap.give_back([states])
    assert before - held("RssFile") > 30_000  # of 32,768 kB
    assert states.sum(dtype=np.float64) == total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_gaps_in_the_heap_are_given_back() -> None:
    if heap._malloc_trim is None:
        pytest.skip("this C library gives back by itself")
    pieces = [np.ones(64 << 10, np.uint8) for _ in range(2000)]  # too small for mappings of their own
    last = pieces.pop()  # what lies behind the gap keeps the heap from shrinking
    pieces.clear()
    before = held("RssAnon")
    heap.give_back()
    assert before - held("RssAnon") > 60_000  # kB, of 128,000
    assert last.all()
