"""`outpace bench head`: what is measured, and that the simulation is as right as it says, and no more."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from outpace import SampleOpts
from outpace.api import LanguageModel
from outpace.backends.native import NativeBackend
from outpace.bench import head as bench
from outpace.bench import shapes
from outpace.cli.app import build
from outpace.config import ModelConfig
from outpace.types import UsageError

TINY = ModelConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=700, tie_word_embeddings=True,
)  # fmt: skip


def target() -> NativeBackend:
    return NativeBackend(TINY, shapes.random_weights(TINY, 8), threads=1, slots=4)


def test_the_figures_are_what_is_documented() -> None:
    model = target()
    running = bench.random_head(model, 40)
    found = bench.measure_head(model, running, seconds=0.01)
    assert set(found["step_ms"]) == set(bench.STEP_ROWS)
    assert set(found["pass_ms"]) == set(bench.TARGET_ROWS)
    assert found["bytes"]["ratio"] == running.pass_bytes / model.pass_bytes
    assert found["most_share"] == found["bytes"]["ratio"] + 0.03
    assert found["step_share"] == found["step_ms"][1] / found["pass_ms"][1]
    assert found["needed"][3] == pytest.approx((found["pass_ms"][4] + 3 * found["step_ms"][1]) / found["pass_ms"][1])
    json.dumps(found)


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_scripted_drafts_are_right_as_often_as_asked_for(chance: float) -> None:
    model = target()
    running = bench.random_head(model, 40)
    prompt, opts = [1, 2, 3], SampleOpts.greedy(max_tokens=300, ignore_eos=True)
    truth = LanguageModel(model, None).generate(prompt, opts).token_ids
    drafter = bench.ScriptedDrafter(running, truth, len(prompt), chance)
    result = LanguageModel(model, None, drafters=[drafter], draft_tokens=3).generate(prompt, opts)
    assert result.token_ids == truth
    full = [r for r in result.rounds if r.drafted == 3]
    kept = np.mean([r.accepted for r in full])
    assert abs(kept - sum(chance**i for i in (1, 2, 3))) < 0.3
    assert len(full) > 0.9 * len(result.rounds)


@pytest.mark.parametrize(("tau", "chain"), [(1.0, 7), (2.39, 7), (3.9, 3), (1.5, 1)])
def test_the_chance_gives_the_tokens_of_a_round(tau: float, chain: int) -> None:
    chance = bench.chance_of(tau, chain)
    assert sum(chance**i for i in range(chain + 1)) == pytest.approx(tau)


@pytest.mark.parametrize(("tau", "chain"), [(0.9, 7), (8.0, 7), (float("nan"), 3)])
def test_impossible_rounds_are_refused(tau: float, chain: int) -> None:
    with pytest.raises(UsageError, match="tokens per round"):
        bench.chance_of(tau, chain)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    return CliRunner().invoke(build(), ["bench", "head", *args])


def test_the_command_prints_tables_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--shape", "tiny", "--seconds", "0.01", "--threads", "1", "--draft-vocab", "40")
    shown = run(monkeypatch, *args, "--tau", "1.5", "--chain", "3")
    assert shown.exit_code == 0, shown.output
    for part in ("a step takes", "tokens a round that a chain needs", "simulated", "1.5 of a"):
        assert part in shown.stdout
    found = json.loads(run(monkeypatch, *args, "--bits", "4", "--json").stdout.splitlines()[-1])
    assert found["model"] == "tiny, 4 bits, random weights, random EAGLE-3 head"
    assert found["simulated"] == []


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("some-model", "--shape", "tiny"), "not both"),
        (("--bits", "4"), "--bits goes with --shape"),
        (("--shape", "tiny", "--seconds", "0"), "--seconds"),
        (("--shape", "tiny", "--draft-vocab", "98"), "draft vocabulary"),
        (("--shape", "tiny", "--tau", "9", "--seconds", "0.01"), "tokens per round"),
        (("--head", "nowhere", "--draft-vocab", "3"), "random head"),
        (("--shape", "none"), "unknown shape"),
    ],
)
def test_wrong_usage_is_one_line(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], part: str) -> None:
    result = run(monkeypatch, *args)
    assert result.exit_code == 2
    assert part in result.output
