"""The composer's prompts do not repeat, fill every slot and share nothing with the held-out prompts."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from pathlib import Path

import outpace.bench.prompts
from outpace.bench.prompts import CLASSES, held_out
from outpace.train.passages import PASSAGES
from outpace.train.prompts import Prompt, compose
from outpace.train.tasks import TASKS
from outpace.train.words import WORDS

COMPOSED = list(islice(compose(0), 100_000))
RUN = 8


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def text(prompt: Prompt) -> str:
    return "\n".join((prompt.system, *prompt.turns))


def test_the_held_out_prompts_are_those_of_the_first_day() -> None:
    raw = Path(outpace.bench.prompts.__file__).with_name("prompts.jsonl").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "7d70711d5cd34910effa804dc77573cce3dfab08af5cf3fbd4468bdd1c00d9c1"
    assert [sum(prompt.kind == kind for prompt in held_out()) for kind in CLASSES] == [8] * 5
    assert len({prompt.id for prompt in held_out()}) == 40


def test_a_hundred_thousand_prompts_do_not_repeat() -> None:
    assert len({text(prompt) for prompt in COMPOSED}) == 100_000
    assert {prompt.kind for prompt in COMPOSED} == set(TASKS)


def test_a_seed_gives_the_same_prompts_and_another_one_others() -> None:
    assert list(islice(compose(0), 100)) == COMPOSED[:100]
    assert set(islice(compose(1), 100)) != set(COMPOSED[:100])


def test_no_prompt_shares_a_run_of_eight_words_with_the_held_out_ones() -> None:
    forbidden = set().union(*(runs(m["content"]) for prompt in held_out() for m in prompt.messages))
    assert len(forbidden) > 500
    for prompt in COMPOSED:
        assert not runs(text(prompt)) & forbidden, prompt
    # Nor does anything that prompts are made of, also what a hundred thousand of them did not show.
    material = [task for _, tasks in TASKS.values() for task in tasks]
    material += [entry for entries in WORDS.values() for entry in entries]
    material += [sentence for groups in PASSAGES.values() for group in groups for sentence in group]
    for piece in material:
        assert not runs(piece) & forbidden, piece


def test_every_slot_is_known_and_filled() -> None:
    material = [task for _, tasks in TASKS.values() for task in tasks]
    material += [entry for entries in WORDS.values() for entry in entries]
    material += [sentence for groups in PASSAGES.values() for group in groups for sentence in group]
    slots = {name for piece in material for name in re.findall(r"(?<!\{)\{(\w+)\}", piece)}
    assert slots <= set(WORDS) | {"passage"}
    unfilled = re.compile(r"(?<!\{)\{(" + "|".join(slots) + r")\}")
    assert not [prompt for prompt in COMPOSED if unfilled.search(text(prompt))]


def test_a_conversation_grows_by_answers() -> None:
    prompt = Prompt("explain", ("What?", "Why?"), "Be kind.")
    roles = [m["role"] for m in prompt.messages(("That.",))]
    assert roles == ["system", "user", "assistant", "user"]
    assert prompt.messages()[-1] == {"role": "user", "content": "What?"}
