"""Training from end to end on a tiny target: the loss falls, the head loads, a run can be stopped at any time."""

from __future__ import annotations

import builtins
import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import outpace.bench.drafter
import outpace.bench.prompts
import tiny
import tiny_folder
from outpace.cli.app import build
from outpace.heads.loading import load_head
from outpace.models.loading import load_model
from outpace.train import data, filters, history, loop, run
from outpace.train.batches import batch_of, batches
from outpace.train.data import Example, Shards, fingerprint
from outpace.train.loop import CHECKPOINT, Recipe, Trainer, fastest
from outpace.train.parallel import Workers
from outpace.train.plot import PLOT, draw
from outpace.train.target import Target, default_taps
from outpace.types import ModelError, NumericalError, UsageError

CONFIG, ARRAYS = tiny.random_model(num_hidden_layers=8, seed=3)
TAPS = default_taps(CONFIG)
TARGET = Target(CONFIG, ARRAYS["model.embed_tokens.weight"], ARRAYS["lm_head.weight"], ARRAYS["model.norm.weight"])
RECIPE = Recipe(vocabulary=40, positions=200, stages=((0.0, 1), (0.5, 3)), rate=3e-3, checked=10)


def learnable(folder: Path, count: int = 60) -> Shards:
    """Sequences whose every token follows from the one before, with states that say what comes: something to learn."""
    rng = np.random.default_rng(0)
    following = (np.arange(CONFIG.vocab_size) * 7 + 3) % 31
    states = rng.standard_normal((CONFIG.vocab_size, len(TAPS), CONFIG.hidden_size)).astype(np.float16)
    states[:, -1] = TARGET.lm_head[following] / TARGET.norm  # through norm and head: the token that follows
    found = []
    for _ in range(count):
        n, answer = int(rng.integers(16, 30)), int(rng.integers(2, 6))
        tokens = np.empty(n, np.int32)
        tokens[0] = rng.integers(0, 30)
        for i in range(1, n):
            tokens[i] = following[tokens[i - 1]]
        found.append(Example(tokens, states[tokens], answer))
    line = data._write(folder, 0, found) | {"next": count, "milliseconds": 1}
    facts = {"format": data.FORMAT, "target": "me", "taps": list(TAPS), "hidden": CONFIG.hidden_size, "seed": 0}
    (folder / data.INDEX).write_text(json.dumps(facts | {"shards": [line]}))
    return Shards(folder, "me")


class Clock:
    """Time passes by a second at each look, so that a run has so many steps, whatever the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def perf_counter(self) -> float:
        return self.monotonic()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "time", Clock())
    monkeypatch.setattr(loop, "fastest", lambda: torch.float32)


def trainer(folder: Path, out: Path, **more: Any) -> Trainer:
    shards = Shards(folder, "me") if (folder / data.INDEX).exists() else learnable(folder)
    return Trainer(TARGET, shards, out, name="tiny", **{"recipe": RECIPE, **more})


def test_the_loss_falls_and_the_head_loads(tmp_path: Path) -> None:
    learner = trainer(tmp_path, tmp_path / "out")
    before, losses = learner.validate(3), []
    learner.run(120, lambda status: losses.append((status.loss, status.agree[0])))
    assert np.mean([loss for loss, _ in losses[-10:]]) < 0.7 * np.mean([loss for loss, _ in losses[:10]])
    assert np.mean([agree for _, agree in losses[-10:]]) > 2 * np.mean([agree for _, agree in losses[:5]])
    assert learner.validate(3) > 1.5 * before
    assert learner.coverage == 1.0
    head = load_head(tmp_path / "out", CONFIG)
    assert head.config == learner.config or head.config.taps == TAPS
    for name, array in learner.head.arrays().items():
        np.testing.assert_allclose(head.weights.take(name)[0], array, rtol=2**-8)


def test_the_steps_of_the_training_time_test_come_later() -> None:
    recipe = Recipe(stages=((0.0, 1), (0.35, 3), (0.8, 5)))
    assert [recipe.steps(part) for part in (0.0, 0.3, 0.35, 0.79, 0.8, 1.0)] == [1, 1, 3, 3, 5, 5]
    assert recipe.factor(0.02) == 1.0
    assert recipe.factor(0.01) == 0.5
    assert recipe.factor(1.0) == pytest.approx(recipe.last)


def test_ctrl_c_leaves_a_head_and_resume_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    learner = trainer(tmp_path, out)

    def interrupt(status: Any) -> None:
        if status.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.run(1000, interrupt)
    load_head(out, CONFIG)
    with pytest.raises(UsageError, match="--resume"):
        trainer(tmp_path, out)
    again = trainer(tmp_path, out, resume=True)
    assert again.status.step == 7
    for name, array in learner.head.arrays().items():
        np.testing.assert_array_equal(again.head.arrays()[name], array)
    assert int(again.optimiser.state_dict()["state"][0]["step"]) == 7
    seen: list[int] = []
    again.run(again.status.seconds + 30, lambda status: seen.append(status.step))
    assert seen[0] == 8


def test_a_kill_between_checkpoints_loses_only_what_came_after(tmp_path: Path) -> None:
    out = tmp_path / "out"
    learner = trainer(tmp_path, out, recipe=replace(RECIPE, save=20.0))
    steps: list[int] = []

    def killed(status: Any) -> None:
        steps.append(status.step)
        if status.step == 25:
            raise SystemExit  # nothing is saved on the way out

    with pytest.raises(SystemExit):
        learner.run(1000, killed)
    again = trainer(tmp_path, out, resume=True)
    assert 0 < again.status.step < 25
    load_head(out, CONFIG)


def test_a_loss_that_is_not_a_number_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    learner = trainer(tmp_path, out)

    def poison(status: Any) -> None:
        if status.step == 3:
            learner.save()
        if status.step == 5:
            with torch.no_grad():
                next(learner.head.parameters()).fill_(math.nan)

    with pytest.raises(NumericalError, match=r"not finite at step 5.*last good checkpoint"):
        learner.run(1000, poison)
    again = trainer(tmp_path, out, resume=True)
    assert again.status.step == 3
    assert all(np.isfinite(array).all() for array in again.head.arrays().values())


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    learner = trainer(tmp_path, tmp_path / "out")
    learner.save()
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with torch.no_grad():
        next(learner.head.parameters()).view(-1)[0] = math.inf
    with pytest.raises(NumericalError, match="weights are not finite"):
        learner.save()
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_data_that_are_not_finite_stop_the_run_and_are_named(tmp_path: Path) -> None:
    learner = trainer(tmp_path, tmp_path / "out")
    learner.sequences = [Example(s.tokens, np.full_like(s.states, np.nan), s.answer) for s in learner.sequences]
    with pytest.raises(NumericalError, match=r"training data are not finite at step 0.*no checkpoint yet"):
        learner.run(100)
    assert all(np.isfinite(array).all() for array in learner.head.arrays().values())


@pytest.mark.parametrize("loss", ["tv", "hybrid"])
def test_the_other_losses_learn_and_a_head_gets_rows_of_its_own(tmp_path: Path, loss: str) -> None:
    recipe = replace(RECIPE, loss=loss, own_head=True)
    learner = trainer(tmp_path, tmp_path / "out", recipe=recipe)
    assert learner.own_rows is not None
    first, before = learner.own_rows.detach().clone(), learner.validate(3)
    learner.run(120)
    assert learner.validate(3) > 1.3 * before
    assert not torch.allclose(first, learner.own_rows)
    assert learner.history[-1]["tokens_per_round"] == pytest.approx(learner.validate(), abs=1e-3)
    head = load_head(tmp_path / "out", CONFIG)
    assert head.config.own_lm_head
    np.testing.assert_allclose(head.weights.take("lm_head.weight")[0], learner.own_rows.detach(), rtol=2**-8)
    again = trainer(tmp_path, tmp_path / "out", recipe=RECIPE, resume=True)  # as the checkpoint has it
    assert again.own_rows is not None
    assert torch.equal(again.own_rows, learner.own_rows)
    with pytest.raises(UsageError, match="loss must be one of kl, tv, hybrid"):
        trainer(tmp_path, tmp_path / "new", recipe=replace(RECIPE, loss="ce"))


def test_rows_whose_token_the_head_cannot_guess_do_not_count(tmp_path: Path) -> None:
    learner = trainer(tmp_path, tmp_path / "out")
    batch = batch_of(learner.sequences[:5])
    all_places, _ = learner.labels(batch)
    missing = int(learner.sequences[0].tokens[-2])
    learner.known[missing] = False
    places, labels = learner.labels(batch)
    for b in range(5):
        answer = batch.tokens[b, batch.answers[b] :][: batch.counts[b]]
        for a in range(batch.counts[b]):
            out = a + 1 < batch.counts[b] and answer[a + 1] == missing
            assert (int(places[b, a]) < 0) == out
        assert bool((all_places[b, : batch.counts[b]] >= 0).all())
        assert bool((places[b, batch.counts[b] :] < 0).all())
    assert sorted(places[places >= 0].tolist()) == list(range(len(labels.best)))


def test_going_on_takes_the_batches_that_are_left_and_data_that_were_added(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def seen_by(learner: Trainer, steps: int) -> list[bytes]:
        found: list[bytes] = []
        real = learner._step

        def step(batch: Any, part: float) -> None:
            found.append(batch.tokens.tobytes())
            real(batch, part)

        def stop(status: Any) -> None:
            if len(found) == steps:
                raise KeyboardInterrupt

        learner._step = step  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            learner.run(1000, stop)
        return found

    whole = seen_by(trainer(tmp_path, tmp_path / "whole"), 14)
    parts = seen_by(trainer(tmp_path, out), 5)
    parts += seen_by(trainer(tmp_path, out, resume=True), 9)
    assert parts == whole

    index = json.loads((tmp_path / data.INDEX).read_text())
    rng = np.random.default_rng(1)
    states = rng.standard_normal((20, len(TAPS), CONFIG.hidden_size)).astype(np.float16)
    more = [Example(np.full(20, 50, np.int32), states, 3)]
    index["shards"].append(data._write(tmp_path, 1, more * 9) | {"next": 99, "milliseconds": 1})
    (tmp_path / data.INDEX).write_text(json.dumps(index))
    before = torch.load(out / CHECKPOINT, weights_only=True)
    again = trainer(tmp_path, out, resume=True)
    assert again.d2t.tolist() == before["d2t"].tolist() != trainer(tmp_path, tmp_path / "new").d2t.tolist()
    assert len(again.sequences) > before["status"]["sequences"]
    assert (again.status.epoch, again.status.batch) == (before["status"]["epoch"] + 1, 0)
    seen_by(again, 3)
    assert [line["step"] for line in again.history] == [5, 14, 17]


def test_an_epoch_has_every_sequence_once_and_can_begin_in_the_middle() -> None:
    rng = np.random.default_rng(0)
    states = np.zeros((1, 1, 1), np.float16)
    sequences = [
        Example(np.full(n, i, np.int32), states.repeat(n, 0), 1) for i, n in enumerate(rng.integers(2, 9, 1200))
    ]
    whole = [batch.tokens[:, 0].tolist() for batch in batches(sequences, 40, seed=3)]
    assert sorted(i for batch in whole for i in batch) == list(range(1200))
    rest = [batch.tokens[:, 0].tolist() for batch in batches(sequences, 40, seed=3, start=17)]
    assert rest == whole[17:]
    assert whole != [batch.tokens[:, 0].tolist() for batch in batches(sequences, 40, seed=4)]


def test_the_rate_rises_gently_when_a_run_goes_on_for_longer() -> None:
    recipe = Recipe()
    assert recipe.factor(0.5, since=0.5, before=0.05) == pytest.approx(0.05)
    assert 0.05 < recipe.factor(0.51, since=0.5, before=0.05) < recipe.factor(0.51, before=1.0)
    assert recipe.factor(0.52, since=0.5, before=0.05) == pytest.approx(recipe.factor(0.52))
    assert recipe.factor(0.5, since=0.5, before=1.0) == pytest.approx(recipe.factor(0.5))  # it is never above


def test_a_damaged_checkpoint_and_foreign_data_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="no checkpoint"):
        trainer(tmp_path, out, resume=True)
    learner = trainer(tmp_path, out)
    learner.save()
    (out / CHECKPOINT).write_bytes((out / CHECKPOINT).read_bytes()[:500])
    with pytest.raises(ModelError, match="cannot be read"):
        trainer(tmp_path, out, resume=True)
    shards = Shards(tmp_path, "me")
    shards.made_by = "somebody else"
    learner.save()
    with pytest.raises(UsageError, match="another target"):
        Trainer(TARGET, shards, out, name="tiny", recipe=RECIPE, resume=True)
    for other in ({}, {"status": {"seconds": math.nan}}, {"status": {}, "d2t": 3}, [1]):
        torch.save(other, out / CHECKPOINT)
        with pytest.raises(ModelError, match="cannot be read"):
            trainer(tmp_path, out, resume=True)
    shards = Shards(tmp_path, "me")
    shards.taps = (0, 1, 2, 3)
    with pytest.raises(UsageError, match="last tap"):
        Trainer(TARGET, shards, tmp_path / "other", name="tiny", recipe=RECIPE)


def test_more_processes_than_batches_are_an_error_and_no_endless_search(tmp_path: Path) -> None:
    learner = trainer(tmp_path, tmp_path / "out")
    learner.workers = Workers(0, 1000)
    with pytest.raises(UsageError, match="too little training data for 1000 processes"):
        next(learner._batches())


def test_a_run_is_drawn_and_a_damaged_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    draw(tmp_path, [])
    assert not (tmp_path / PLOT).exists()
    lines: list[dict[str, Any]] = [
        {"seconds": 60.0 * i, "step": i, "loss": 3.0 - 0.1 * i, "agree": [0.1 * i] * (1 + (i > 2))} for i in range(1, 6)
    ]
    lines[-1]["tokens_per_round"] = 1.5
    history.write(tmp_path, lines)
    assert history.read(tmp_path) == lines
    draw(tmp_path, lines)
    picture = ElementTree.parse(tmp_path / PLOT)
    assert [len(line.attrib["points"].split()) for line in picture.findall(".//{*}polyline")] == [5, 5, 3]
    assert len(picture.findall(".//{*}circle")) == 1
    with open(tmp_path / history.HISTORY, "a") as file:
        file.write('{"seconds": 300, "st')
    assert history.read(tmp_path) == lines


def test_the_dtype_is_one_of_two() -> None:
    assert fastest() in (torch.float32, torch.bfloat16)


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and layers enough."""
    changed = tiny_folder.CONFIG.__class__(
        **{name: getattr(tiny_folder.CONFIG, name) for name in tiny_folder.CONFIG.__slots__} | {"num_hidden_layers": 8}
    )
    path = tmp_path_factory.mktemp("tiny")
    tiny_folder.write(path)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 8}
    (path / "config.json").write_text(json.dumps(config))
    from outpace.models.names import expected_tensors
    from outpace.weights.safetensors import write_safetensors

    rng = np.random.default_rng(0)
    arrays = {name: tiny._random(name, shape, rng) for name, shape in expected_tensors(changed).items()}
    write_safetensors(path / "model.safetensors", arrays)
    return path


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short answers, few prompts, three of them held out."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(data, "SHARD_ANSWERS", 8)
    monkeypatch.setattr(data, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(data, "PROMPT_TOKENS", 240)
    monkeypatch.setattr(run, "SLOTS", 4)
    monkeypatch.setattr(run, "TOKENS", 16)
    monkeypatch.setattr(filters, "not_text", lambda text: False)  # all that a random model says is noise
    few = [prompt for prompt in outpace.bench.prompts.held_out() if prompt.id.endswith("-2")]
    monkeypatch.setattr(outpace.bench.drafter, "held_out", lambda: few)
    monkeypatch.setattr(loop.Recipe, "__init__", _quick(loop.Recipe.__init__))


def _quick(init: Any) -> Any:
    def quick(self: Recipe, **more: Any) -> None:
        init(self, **{"positions": 50, "checked": 4, "stages": ((0.0, 1), (0.5, 2)), **more})

    return quick


def command(*args: str | Path) -> Result:
    return CliRunner().invoke(build(), ["train", *map(str, args)])


@pytest.mark.usefixtures("_small")
def test_the_command_makes_data_trains_and_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    result = command(folder, "--out", out, "--minutes", "0.5", "--data-minutes", "0.02", "--json", "--threads", "1")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["answer_tokens"] > 0
    assert made["positions"] > 0
    runs = made["held_out"]["acceptance"]
    assert [(run["shape"], run["temperature"]) for run in runs] == [
        ("chain", 0.0), ("tree", 0.0), ("chain", 0.7), ("tree", 0.7),
    ]  # fmt: skip
    for each in runs:
        assert set(each["tokens_per_round"]) == {*outpace.bench.prompts.CLASSES, "all"}
        assert len(each["kept_by_position"]) == 7
    assert set(made["held_out"]["speed"]) == {"head", "auto"}
    head = load_head(out, load_model(folder).config)
    assert head.format == "speculators EAGLE-3"
    assert head.config.taps == (1, 3, 4, 7)

    again = command(folder, "--out", out, "--minutes", "0.5")
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    more = command(
        folder, "--out", out, "--minutes", "0.6", "--data-minutes", "0.02", "--resume", "--json", "--no-evaluate"
    )
    assert more.exit_code == 0, more.output
    assert json.loads(more.stdout)["steps"] > made["steps"]
    assert "held_out" not in json.loads(more.stdout)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--kind", "eagle2"), "kind must be one of eagle3, mtp, dflash"),
        (("--minutes", "0"), "minutes must be more than 0"),
        (("--minutes", "nan"), "minutes must be more than 0"),
        (("--minutes", "1e9"), "at most 43200"),
        (("--minutes", "1", "--data-minutes", "1"), "minutes must be more than 0, and more than those for the data"),
        (("--resume",), "nothing to go on with"),
    ],
)
def test_wrong_usage_is_one_line(folder: Path, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    result = command(folder, "--out", tmp_path / "head", *args)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert not (tmp_path / "head").exists()


@pytest.mark.usefixtures("_small")
def test_what_would_fail_at_the_end_is_told_before_any_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: Any, **more: Any) -> None:
        raise AssertionError("data are made")

    monkeypatch.setattr(run, "record", work)
    file, out = tmp_path / "file", tmp_path / "head"
    file.write_text("")
    result = command(folder, "--out", file)
    assert (result.exit_code, "cannot be the folder of a head" in result.stderr) == (2, True)
    learner = trainer(tmp_path, out)
    learner.made_by = fingerprint(folder, run.PRECISION)
    learner.save()
    result = command(folder, "--out", out, "--resume", "--kind", "mtp")
    assert (result.exit_code, "of kind eagle3, not mtp" in " ".join(result.stderr.split())) == (2, True)
    (out / CHECKPOINT).write_bytes(b"?")
    result = command(folder, "--out", out, "--resume")
    assert (result.exit_code, "cannot be read" in " ".join(result.stderr.split())) == (1, True)


def test_without_torch_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **more)

    for module in [name for name in sys.modules if name.startswith("outpace.train")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"pip install 'outpace\[train\]'"):
        importlib.import_module("outpace.train.torch_or_say")
