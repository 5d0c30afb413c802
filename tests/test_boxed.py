"""Heads that come with outpace: used without being asked, for the one model they were made for, and for no other."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import outpace
import tiny_folder
from heads_files import HEADS, random_head
from outpace.backends import memory
from outpace.cli.app import build
from outpace.heads import boxed
from outpace.heads.config import HeadConfig
from outpace.heads.export import export_head
from outpace.json_file import read_json
from outpace.types import ModelError, UsageError
from outpace.weights.safetensors import read_safetensors, write_safetensors

ROOT = Path(__file__).parent.parent
REAL = sorted(boxed.FOLDER.glob("*/box.json"))  # before any test has another folder
_LAYERS = replace(HEADS["eagle3"].layers, vocab_size=tiny_folder.CONFIG.vocab_size)
EAGLE3: HeadConfig = replace(
    HEADS["eagle3"], layers=_LAYERS, taps=(0, 1), target_layers=tiny_folder.CONFIG.num_hidden_layers,
    draft_vocab_size=_LAYERS.vocab_size, own_lm_head=False,
)  # fmt: skip
ABOUT = {
    "made": {"command": "outpace train tiny --minutes 1", "seed": 3, "data": "1,000 tokens"},
    "figures": {"tokens per round": {"chat": 1.5, "all": 1.4}},
}
PROMPT = [3, 4, 5, 6, 3, 4, 5]


@pytest.fixture(autouse=True)
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(boxed, "FOLDER", tmp_path / "boxed")
    return tmp_path / "boxed"


@pytest.fixture
def model(tmp_path: Path, box: Path) -> Path:
    """A model, and in the box a head for it, put there as a trained one is."""
    (tmp_path / "tiny").mkdir()
    folder = tiny_folder.write(tmp_path / "tiny")
    export_head(tmp_path / "head", EAGLE3, random_head(EAGLE3), None, None)
    (tmp_path / "about.json").write_text(json.dumps(ABOUT))
    spec = importlib.util.spec_from_file_location("box_head", ROOT / "scripts" / "box_head.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(str(tmp_path / "head"), str(folder), str(tmp_path / "about.json"))
    return folder


def drafters(model: Path, **more: Any) -> tuple[str, ...]:
    with outpace.load(model, **more) as loaded:
        return tuple(drafter.name for drafter in loaded.drafters)


def test_it_drafts_without_being_asked(model: Path) -> None:
    assert drafters(model) == ("eagle3", "suffix")
    assert drafters(model, draft="eagle3") == ("eagle3",)
    assert drafters(model, head="none") == ("suffix",)
    assert drafters(model, draft="none") == ()
    assert drafters(model, draft="suffix") == ("suffix",)
    assert drafters(model, draft="suffix", head="none") == ("suffix",)
    assert drafters(model, draft_model=model) == ("draft_model", "suffix")
    assert drafters(model, backend="reference") == ("suffix",)
    assert drafters(model, precision="f32") == ("eagle3", "suffix")
    for draft in ("dflash", "mtp"):
        with pytest.raises(UsageError, match=f"draft='{draft}' needs head=PATH"):
            drafters(model, draft=draft)
    with pytest.raises(UsageError, match="head='none' and draft='eagle3' exclude each other"):
        drafters(model, draft="eagle3", head="none")
    with outpace.load(model, head="none") as plain, outpace.load(model, draft_tokens=3) as drafted:
        want = plain.generate(PROMPT, max_tokens=30, temperature=2.0, seed=1)
        found = drafted.generate(PROMPT, max_tokens=30, temperature=2.0, seed=1)
        assert found.token_ids == want.token_ids
        assert found.stats.by_source["eagle3"][0] > 20


def test_it_is_for_its_own_model_alone(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert drafters(copy) == ("eagle3", "suffix")
    arrays = {name: tensor.f32().copy() for name, tensor in read_safetensors(model).items()}
    arrays["model.layers.2.mlp.down_proj.weight"] += np.float32(1e-3)  # the same shape, trained further
    write_safetensors(copy / "model.safetensors", arrays)
    assert drafters(copy) == ("suffix",)
    other = shutil.copytree(model, tmp_path / "renamed")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|im_fin|>"))
    assert boxed.find(other) is None
    assert boxed.find(model) is not None


def test_nothing_in_the_box_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert drafters(tiny_folder.write(tmp_path / "m")) == ("suffix",)
    with pytest.raises(UsageError, match="needs head=PATH"):
        drafters(tmp_path / "m", draft="eagle3")


def test_what_is_wrong_with_it_is_a_warning(model: Path, box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        need = {}
        patch.setattr("outpace.opening.available_memory", lambda: need["bytes"])
        whole = memory.estimate(*_loaded(model), "int8", tiny_folder.CONFIG.max_position_embeddings).total
        for count, names in ((whole, ("suffix",)), (whole + 10**8, ("eagle3", "suffix"))):
            need["bytes"] = count
            if names == ("suffix",):
                with pytest.warns(UserWarning, match="head in the box is not used: .* of memory are missing"):
                    assert drafters(model) == names
            else:
                assert drafters(model) == names
    weights = box / "tiny" / "model.safetensors"
    whole_file = weights.read_bytes()
    weights.write_bytes(whole_file[:-4])
    with pytest.warns(UserWarning, match="head in the box is not used: .*truncated"):
        assert drafters(model) == ("suffix",)
    with pytest.raises(ModelError, match="truncated"):  # asked for
        drafters(model, draft="eagle3")
    weights.write_bytes(whole_file)
    (box / "tiny" / "box.json").write_text('{"target": 3}')
    with pytest.warns(UserWarning, match=r"box.json: target must be an object"):
        assert drafters(model) == ("suffix",)


def _loaded(model: Path) -> Any:
    from outpace.models.loading import load_model

    loaded = load_model(model)
    return loaded.config, loaded.weights


def test_the_command_line_tells(model: Path, box: Path) -> None:
    run = lambda *args: CliRunner().invoke(build(), [*map(str, args)])  # noqa: E731
    facts = json.loads(run("inspect", model, "--json").stdout)
    assert facts["path"] == str(box / "tiny")
    assert facts["used"] == f"by --draft auto (the default) with {model}"
    assert facts["from"] == "comes with outpace, made by: outpace train tiny --minutes 1"
    assert "comes with outpace" in run("inspect", model).stdout
    assert json.loads(run("info", model, "--json").stdout)["memory"]["head"] > 0
    texts = []
    for more in ((), ("--head", "none")):
        done = run("generate", "hi", "-m", model, "--max-tokens", "20", "--seed", "1", "--json", *more)
        assert done.exit_code == 0, done.output
        texts.append(json.loads(done.stdout)["token_ids"])
    assert texts[0] == texts[1]


def test_the_card_says_what_box_json_says(model: Path, box: Path) -> None:
    about = read_json(box / "tiny" / "box.json")
    card = (box / "tiny" / "README.md").read_text()
    assert card == boxed.card(about)
    for text in (
        "outpace train tiny --minutes 1",
        "- seed: 3",
        "- data: 1,000 tokens",
        "chat 1.5, all 1.4",
        "Apache-2.0",
    ):
        assert text in card
    with pytest.raises(ModelError, match="figures"):
        boxed.card({name: value for name, value in about.items() if name != "figures"})


@pytest.mark.parametrize("file", REAL, ids=[file.parent.name for file in REAL])
def test_what_is_in_the_real_box(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page is made of its box.json, it is small enough, and it is for the model that it names."""
    from outpace import hub
    from outpace.heads.loading import load_head
    from outpace.models.loading import load_model

    about = read_json(file)
    assert (file.parent / "README.md").read_text(encoding="utf-8") == boxed.card(about)
    assert sum(each.stat().st_size for each in file.parent.iterdir()) < 16 << 20
    monkeypatch.undo()  # the user's own folder of models
    path = hub.pull(about["target"]["name"])
    assert about["target"] == boxed.about_target(path, about["target"]["name"])
    head = load_head(file.parent, load_model(path).config)
    assert head.config.draft_vocab_size == about["head"]["draft_vocabulary"]


def test_the_closing_line_says_what_the_head_gave(model: Path) -> None:
    """So that one sees it in use."""
    done = CliRunner().invoke(build(), ["generate", "hi", "-m", str(model), "--max-tokens", "8", "--draft-tokens", "2"])
    assert done.exit_code == 0
    assert "(eagle3 " in done.stderr
