"""The composer: prompts that look like what people ask, from tasks x topics x texts of our own writing.

Neighbours: tasks.py, words.py and passages.py hold the material; data.py has the target answer. Prompt i of a seed is
always the same, so that a run that was stopped goes on where it was. There are far more than 100,000 different ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from .passages import PASSAGES
from .tasks import TASKS
from .words import WORDS

_SLOT = re.compile(r"\{(\w+)\}")
_KINDS = tuple(TASKS)
_WEIGHTS = tuple(weight for weight, _ in TASKS.values())
SYSTEM_SHARE, FOLLOW_SHARE = 0.12, 0.15
OWN_TURN = ""  # in the place of a user's turn: the target writes it itself


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says. turns: the messages of the user, one after each answer. system: "" for none. kind: of TASKS, or
    "own" for a user's file. plain: the one turn is the beginning of a text, to be continued as it is."""

    kind: str
    turns: tuple[str, ...]
    system: str = ""
    plain: bool = False

    def messages(self, answers: tuple[str, ...] = ()) -> list[dict[str, str]]:
        """The conversation up to the user's next turn, as a chat template takes it; answers: those so far."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for i, turn in enumerate(self.turns[: len(answers) + 1]):
            found.append({"role": "user", "content": turn})
            if i < len(answers):
                found.append({"role": "assistant", "content": answers[i]})
        return found


def compose(seed: int) -> Iterator[Prompt]:
    """Prompts without end and without repeats, the same ones for the same seed."""
    seen: set[bytes] = set()  # digests: the prompts themselves would take a kilobyte each
    rng = random.Random(f"prompts {seed}")
    while True:
        prompt = _one(rng)
        digest = blake2b(repr(prompt).encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield prompt


def _one(rng: random.Random) -> Prompt:
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    text = _fill(rng.choice(TASKS[kind][1]), rng)
    system = rng.choice(WORDS["system"]) if rng.random() < SYSTEM_SHARE else ""
    follow = (rng.choice(WORDS["follow"]),) if rng.random() < FOLLOW_SHARE else ()
    return Prompt(kind, (text, *follow), system)


def _fill(text: str, rng: random.Random) -> str:
    """The text with every slot filled, and the slots of what fills it."""

    def choose(match: re.Match[str]) -> str:
        name = match[1]
        return _passage(rng) if name == "passage" else _fill(rng.choice(WORDS[name]), rng)

    return _SLOT.sub(choose, text).replace("{{", "{").replace("}}", "}")


def _passage(rng: random.Random) -> str:
    groups = PASSAGES[rng.choice(tuple(PASSAGES))]
    sentences = [_fill(rng.choice(group), rng) for group in groups]
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences if sentence)
