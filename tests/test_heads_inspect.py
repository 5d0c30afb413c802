"""`outpace inspect`: what it shows of a head, and that what does not fit is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from heads_files import D2T, HEADS, LAYOUTS, TARGET, TARGET_ARRAYS, hf, random_head
from outpace.backends.native import NativeBackend
from outpace.backends.native_head import NativeHead
from outpace.cli.app import build
from outpace.weights.safetensors import write_safetensors
from outpace.weights.weight_map import WeightMap


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(build(), ["inspect", *map(str, args)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(hf(TARGET)))
    write_safetensors(folder / "model.safetensors", TARGET_ARRAYS)
    return folder


def beside() -> NativeBackend:
    """The target in the core, at 8 bits."""
    return NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), slots=1)


def head(layout: str, folder: Path) -> Path:
    name, write = LAYOUTS[layout]
    return write(folder, HEADS[name], random_head(HEADS[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_shown(layout: str, tmp_path: Path, target: Path) -> None:
    path = head(layout, tmp_path)
    result = run(path, "--model", target, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    config = HEADS[LAYOUTS[layout][0]]
    assert facts["format"] == layout.split(",")[0]
    assert facts["algorithm"] == config.algorithm
    assert len(facts["taps"]) == len(config.taps)
    assert facts["target"] == {"layers": 8, "hidden": 64, "vocabulary": 67}
    assert facts["bytes"] >= 4 * sum(array.size for array in random_head(config).values())
    assert facts["target_bytes"] == beside().pass_bytes
    assert facts["share"] == round(facts["step_bytes"] / facts["target_bytes"], 4)
    assert all(entry["from"] for entry in facts["conventions"].values())
    text = run(path, "--model", target).stdout
    assert facts["memory"]["total"] > facts["memory"]["weights"] + facts["memory"]["cache"] > 0
    assert "memory            needs " in text
    assert f"format            {facts['format']}\n" in text
    assert "  taps = [" in text


def test_a_step_reads_the_layer_and_a_head(tmp_path: Path, target: Path) -> None:
    """As the core holds them, at 8 bits: EAGLE-3's fc is for committed tokens alone; an mtp head reads all it has and
    the target's lm_head."""
    facts = json.loads(run(head("SpecForge EAGLE-3", tmp_path), "-m", target, "--json").stdout)
    weights = WeightMap.from_tensors(random_head(HEADS["eagle3"]))
    assert facts["step_bytes"] == NativeHead(beside(), HEADS["eagle3"], weights, D2T).pass_bytes
    assert facts["conventions"]["d2t"] == {"value": "offset", "from": "default of SpecForge EAGLE-3"}
    facts = json.loads(run(head("native MTP", tmp_path), "--json").stdout)  # its own target
    weights = WeightMap.from_tensors(random_head(HEADS["mtp"]))
    assert facts["step_bytes"] == NativeHead(beside(), HEADS["mtp"], weights).pass_bytes
    assert facts["taps"] == ["the final norm"]


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, target: Path) -> None:
    path = head("z-lab DFlash", tmp_path)
    for args, code, text in (
        ((path,), 2, "say which model this head drafts for: --model NAME"),
        ((target,), 1, "not a head of a known format"),
        ((tmp_path / "none", "--offline"), 1, "none"),
    ):
        result = run(*args)
        assert result.exit_code in (code, 2)
        assert text in result.stderr
        assert result.stderr.count("\n") == 1
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    result = run(path, "-m", target)
    assert result.exit_code == 1
    assert "truncated" in result.stderr
