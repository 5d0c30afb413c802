"""Calibration finds how a head's file has to be read, keeps it for whoever opens the head, and forgets it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import outpace
import tiny_folder
from heads_files import HEADS, LAYOUTS, TARGET
from outpace import calibrate, opening
from outpace.cli.app import build
from outpace.heads.loading import ASKED_FOR, CONVENTIONS, LoadedHead
from outpace.types import NumericalError, UsageError
from outpace.weights.safetensors import read_safetensors, write_safetensors


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of one layer with a head inside that computes what the model does, if the hidden state comes first."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = tiny_folder.write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    found = {name: tensor.f32() for name, tensor in read_safetensors(folder).items()}
    arrays = {name: array for name, array in found.items() if ".layers." not in name or ".layers.0." in name}
    embedding = arrays["model.embed_tokens.weight"]
    arrays["model.embed_tokens.weight"] = embedding / np.sqrt(np.mean(embedding**2, axis=1, keepdims=True))
    head = {name.replace("model.layers.", "mtp.layers."): a for name, a in arrays.items() if ".layers." in name}
    size = config["hidden_size"]
    head["mtp.fc.weight"] = np.concatenate([np.zeros((size, size)), np.eye(size)], axis=1).astype(np.float32)
    head["mtp.pre_fc_norm_embedding.weight"] = head["mtp.pre_fc_norm_hidden.weight"] = np.ones(size, np.float32)
    head["mtp.norm.weight"] = arrays["model.norm.weight"]
    write_safetensors(folder / "model.safetensors", arrays | head)
    return folder


def test_the_reading_that_drafts_best_is_found_kept_and_forgotten(model: Path) -> None:
    with outpace.load(model, draft="none", precision="f32", slots=4) as plain:
        said: list[str] = []
        found = calibrate.calibrate(plain, model, model, progress=said.append)
    scores = {json.dumps(dict(trial.conventions)): trial.tokens_per_round for trial in found.trials}
    assert found.best["concat"] == "hidden_first"
    right, wrong = max(s for s in scores.values() if s), scores["{}"]
    assert wrong is not None
    assert wrong < 1.5
    assert right > 2.5
    assert len(said) == len(found.trials) + 1
    assert opening.kept_conventions(model, model) == dict(found.best)

    def tokens_per_round() -> float:
        with outpace.load(model, draft="mtp", draft_tokens=3, precision="f32") as drafting:
            return drafting.generate("a cat", temperature=0.0, max_tokens=60).stats.tokens_per_round

    assert tokens_per_round() > 2.0
    calibrate.forget(model)
    calibrate.forget(model)
    assert opening.kept_conventions(model, model) == {}
    assert tokens_per_round() < 1.7


@pytest.mark.parametrize("error", [NumericalError("no number"), UsageError("no such tap")])
def test_a_reading_that_fails_while_it_drafts_costs_nothing_but_itself(
    model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own reading, which is tried first, and one of the others."""
    open_head, closed = calibrate.open_head, []

    def failing(head: LoadedHead, *args: Any) -> Any:
        drafter: Any = open_head(head, *args)
        conventions = {name for name, origin in head.origins.items() if origin == ASKED_FOR}
        close = drafter.close
        monkeypatch.setattr(drafter, "close", lambda: (closed.append(conventions), close()))
        if not conventions or "norm_output" in conventions:

            def fails(wanted: Any) -> Any:
                raise error

            monkeypatch.setattr(drafter, "propose", fails)
        return drafter

    monkeypatch.setattr(calibrate, "open_head", failing)
    with outpace.load(model, draft="none", precision="f32", slots=4) as plain:
        found = calibrate.calibrate(plain, model, model)
    failed = [trial for trial in found.trials if trial.tokens_per_round is None]
    assert [trial.why for trial in failed] == [str(error)] * len(failed)
    assert failed[0].conventions == {}
    assert any("norm_output" in trial.conventions for trial in failed)
    assert [trial.conventions.keys() for trial in found.trials] == closed
    assert found.best["concat"] == "hidden_first"


def test_what_is_kept_is_not_used_for_other_files_and_damage_is_as_if_nothing_were_kept(model: Path) -> None:
    with outpace.load(model, draft="none", slots=4) as plain:
        calibrate.calibrate(plain, model, model)
    assert opening.kept_conventions(model, model)
    file = opening.conventions_file(model)
    kept = file.read_text()
    for text in ("", "[1]", "{", json.dumps({"key": 3}), json.dumps(json.loads(kept) | {"conventions": [1]})):
        file.write_text(text)
        assert opening.kept_conventions(model, model) == {}
    file.write_text(kept)
    assert opening.kept_conventions(model, model)
    os.utime(model / "model.safetensors", ns=(5, 5))
    assert opening.kept_conventions(model, model) == {}


KEPT: dict[str, Any] = {  # by another version, or by accident
    "unknown": {"old_name": 1},
    "too many taps": {"taps": [0, 1]},
    "no such tap": {"taps": [99]},
    "taps of another kind": {"taps": "0"},
    "nested": {"taps": [[0]]},
    "no flag": {"norm_output": "x"},
    "no choice": {"concat": ["hidden_first"]},
    "d2t": {"d2t": []},
    "empty": {"": None},
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_and_cannot_be_right_is_left_out_with_one_notice(model: Path, case: str) -> None:
    file = opening.conventions_file(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": opening.conventions_key(model, model), "conventions": KEPT[case]}))
    with pytest.warns(UserWarning, match="kept conventions are not used: .*--calibrate") as caught:
        outpace.load(model, draft="mtp").close()
    assert len(caught) == 1
    shown = run(model, "--model", model, "--json")
    assert shown.exit_code == 0, shown.output
    assert "calibrated" not in shown.stdout
    assert shown.stderr.count("\n") == 1


def test_a_kept_convention_that_the_file_has_no_use_for_is_no_error(model: Path) -> None:
    file = opening.conventions_file(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"d2t": "absolute", "sample_from_anchor": True}
    file.write_text(json.dumps({"key": opening.conventions_key(model, model), "conventions": kept}))
    outpace.load(model, draft="mtp").close()
    shown = run(model, "--model", model, "--json")
    assert shown.exit_code == 0, shown.output
    assert "d2t" not in json.loads(shown.stdout)["conventions"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_convention_has_another_value(layout: str) -> None:
    config = HEADS[LAYOUTS[layout][0]]
    found = calibrate.alternatives(config, "offset" if config.draft_vocab_size < TARGET.vocab_size else None)
    assert set(found) <= set(CONVENTIONS)
    for name, values in found.items():
        assert len(values) == len({str(value) for value in values}) > 1 or name == "taps"
        for value in values:
            if name != "d2t":
                replace(config, **{name: value})  # every one is a possible head


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(build(), ["inspect", *map(str, args)])


def test_the_command_shows_what_it_tried(model: Path) -> None:
    shown = run(model, "--model", model, "--calibrate")
    assert shown.exit_code == 0, shown.output
    assert "concat = hidden_first: calibrated" in shown.stdout
    assert "tokens a round of a chain of 3" in shown.stdout
    facts = json.loads(run(model, "--model", model, "--json").stdout)
    assert facts["conventions"]["concat"] == {"value": "hidden_first", "from": "calibrated"}
    assert "trials" not in facts
    again = json.loads(run(model, "--model", model, "--forget", "--json").stdout)
    assert again["conventions"]["concat"]["value"] == "embedding_first"
