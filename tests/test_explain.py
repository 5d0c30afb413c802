"""`outpace generate --explain`: the marks add up to the answer, the figures to what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outpace
import tiny_folder
from outpace.api import Result
from outpace.cli.explain import GREEN, PLAIN, marked, summary
from outpace.drafters import SuffixDrafter
from outpace.types import Round, Stats, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


def test_marks_and_figures_are_those_of_the_answer(folder: Path) -> None:
    with outpace.load(folder, draft="draft_model", draft_model=folder, draft_tokens=3) as model:
        answer = model.generate("over and over", temperature=0.0, max_tokens=23, ignore_eos=True)
        tokenizer = model.tokenizer
    assert tokenizer is not None
    assert answer.stats.by_source == {"draft_model": [answer.stats.drafted, answer.stats.accepted]}
    assert sum(each.tokens for each in answer.rounds) >= 23
    whole = tokenizer.decode(answer.token_ids)
    coloured, plain = (marked(answer, tokenizer, colour=colour) for colour in (True, False))
    assert coloured.count(GREEN) == plain.count("<") - whole.count("<") > 0
    assert coloured.count(PLAIN) >= coloured.count(GREEN)
    assert re.sub("\x1b.*?m", "", coloured).replace("|", "") == whole.replace("|", "")
    lines = summary(answer).splitlines()
    assert lines[0].startswith(f"23 tokens in {answer.stats.rounds} rounds")
    assert any(line.startswith("draft_model ") and f"{answer.stats.drafted} drafted" in line for line in lines)
    sizes = dict(re.findall(r"(\d+): (\d+)", lines[1]))
    assert sum(map(int, sizes.values())) == answer.stats.rounds


def test_trees_have_a_line_of_their_own() -> None:
    rounds = [Round(8, 2, "head", 3), Round(6, 1, "head", 2), Round(3, 3, "head", 3), Round(0, 0)]
    stats = Stats(tokens=10)
    for each in rounds:
        stats.count(each)
    text = summary(Result("", [], [], "length", 0, stats, rounds))
    assert re.search(r"^trees +2 rounds, 7.0 tokens and 2.5 deep a round$", text, re.MULTILINE)
    assert "accepted by place 3/3  2/3  1/2" in text
    assert stats.rounds_by_accepted == [1, 1, 1, 1]


def test_self_drafts_with_the_same_weights_at_4_bits_and_changes_nothing(folder: Path) -> None:
    with outpace.load(folder, draft="none") as plain, outpace.load(folder, draft="self", draft_tokens=4) as model:
        assert [drafter.name for drafter in model.drafters] == ["self", "suffix"]
        assert isinstance(model.drafters[1], SuffixDrafter)
        for temperature in (0.0, 0.9):
            opts = {"temperature": temperature, "seed": 3, "max_tokens": 40, "ignore_eos": True}
            found = model.generate("once upon", **opts)
            assert found.token_ids == plain.generate("once upon", **opts).token_ids
            assert found.stats.by_source["self"][1] > 0
    with pytest.raises(UsageError, match="4 bits"):
        outpace.load(folder, draft="self", precision="int4")
