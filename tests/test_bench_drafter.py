"""`outpace bench drafter`: acceptance as decoding by hand counts it, trees of as many tokens, speeds in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace import SampleOpts, load
from outpace.bench import drafter as bench
from outpace.bench.prompts import CLASSES, held_out
from outpace.cli.app import build
from outpace.heads.export import export_head
from outpace.train.kinds import KINDS
from outpace.train.target import Target, default_taps
from outpace.types import OutpaceError, UsageError
from test_train_loop import folder  # noqa: F401 (a fixture: a tiny model with eight layers)


@pytest.fixture
def head(folder: Path, tmp_path: Path) -> Path:  # noqa: F811
    """As training begins: now and then right."""
    target = Target.load(folder)
    taps = default_taps(target.config)
    config = KINDS["eagle3"].config(target.config, taps, target.config.vocab_size)
    weights = KINDS["eagle3"].first(config, target, 0)
    export_head(tmp_path / "head", config, weights, None, "tiny")
    return tmp_path / "head"


def test_acceptance_is_what_decoding_by_hand_counts(folder: Path, head: Path) -> None:  # noqa: F811
    found = bench.measure_drafter(folder, head, prompts=1, tokens=24, temperatures=(0.7,), timed=0, threads=1)
    assert "speed" not in found
    assert [run["shape"] for run in found["acceptance"]] == ["chain", "tree"]
    tokens = rounds = 0
    with load(folder, head=head, draft="eagle3", draft_tokens=bench.DRAFTS, threads=1, progress=False) as model:
        for name in CLASSES:
            prompt = next(p for p in held_out() if p.kind == name)
            ids = model.chat_ids(list(prompt.messages))
            if len(ids) + 24 > model.target.capacity.positions:  # this tiny model's context is short
                continue
            stats = model.generate(ids, SampleOpts(temperature=0.7, seed=0, max_tokens=24)).stats
            assert found["acceptance"][0]["tokens_per_round"][name] == stats.tokens_per_round
            tokens, rounds = tokens + stats.tokens, rounds + stats.rounds
    assert tokens > 2 * 20
    assert found["acceptance"][0]["tokens_per_round"]["all"] == tokens / rounds
    json.dumps(found)


def test_a_tree_has_as_many_tokens_as_the_chain_and_is_one(folder: Path, head: Path) -> None:  # noqa: F811
    with load(folder, head=head, draft="eagle3", threads=1, progress=False) as model:
        (chain,) = model.drafters
        drafted = {}
        for name, drafter in (("chain", chain), ("tree", bench._as_trees(chain))):  # type: ignore[arg-type]
            fixed = bench.LanguageModel(model.target, model.tokenizer, drafters=[drafter], draft_tokens=bench.DRAFTS)
            with fixed:
                rounds = fixed.generate([5, 6, 7], SampleOpts.greedy(max_tokens=30, ignore_eos=True)).rounds
            drafted[name] = [(each.drafted, each.depth) for each in rounds[1:-8]]
    assert set(drafted["chain"]) == {(7, 7)}
    assert {count for count, _ in drafted["tree"]} == {7}
    assert min(depth for _, depth in drafted["tree"]) < 7


def test_an_answer_that_differs_is_an_error(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    real, calls = bench.LanguageModel.generate, []

    def wrong(self: Any, *args: Any) -> Any:
        result = real(self, *args)
        calls.append(result)
        if len(calls) == 2:
            result.token_ids[-1] += 1
        return result

    monkeypatch.setattr(bench.LanguageModel, "generate", wrong)
    with pytest.raises(OutpaceError, match="differs from the one without"):
        bench.measure_drafter(folder, head, prompts=0, timed=1, timed_tokens=8, threads=1)


def test_the_command_prints_tables_and_json(folder: Path, head: Path) -> None:  # noqa: F811
    args = ["bench", "drafter", str(folder), "--head", str(head), "--prompts", "1", "--tokens", "8", "--timed", "1"]
    shown = CliRunner().invoke(build(), [*args, "--temperature", "0", "--threads", "1"])
    assert shown.exit_code == 0, shown.output
    assert "chain, T 0" in shown.stdout
    assert "head and look-ups" in shown.stdout
    found = CliRunner().invoke(build(), [*args, "--temperature", "0", "--json", "--threads", "1"])
    made = json.loads(found.stdout)
    assert made["head"] == str(head)
    low, high = made["speed"]["auto"]["interval"]
    assert 0 < low <= made["speed"]["auto"]["factor"] <= high


def test_a_model_without_a_chat_template_goes_on_with_the_text(folder: Path) -> None:  # noqa: F811
    with load(folder, draft="none", threads=1, progress=False) as model:
        model.template = None
        asked = bench._asked(model, 1)
        assert asked
        assert model.tokenizer is not None
        for prompt, ids in asked:
            assert model.tokenizer.decode(ids) == "".join(f"{each['content']}\n\n" for each in prompt.messages)


def test_wrong_usage_is_refused(folder: Path, head: Path) -> None:  # noqa: F811
    with pytest.raises(UsageError, match="tokens must be in 2"):
        bench.measure_drafter(folder, head, tokens=1)
    with pytest.raises(UsageError, match="temperatures"):
        bench.measure_drafter(folder, head, temperatures=(-1.0,))
    with pytest.raises(UsageError, match="has no draft head of its own"):
        bench.measure_drafter(folder, None, prompts=1)


def test_the_interval_holds_the_median() -> None:
    assert bench.interval([1.0] * 9) == (1.0, 1.0)
    low, high = bench.interval([1.0, 1.1, 1.2, 1.3, 1.4])
    assert 1.0 <= low < 1.2 < high <= 1.4
    assert bench.interval([]) == (0.0, 0.0)
