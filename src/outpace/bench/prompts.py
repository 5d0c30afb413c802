"""Forty prompts that measure drafters: chat, code, maths, summarise, translate, eight of each.

Of our own writing, made before the first head was trained and never changed since; no prompt that `outpace train`
composes shares a run of eight words with them (tests/test_train_prompts.py). The lines of prompts.jsonl are objects
with id, class and messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("chat", "code", "maths", "summarise", "translate")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One prompt. kind: of CLASSES. messages: as a chat template takes them."""

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]


def held_out() -> list[HeldOut]:
    """The forty, in the file's order."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [HeldOut(row["id"], row["class"], tuple(row["messages"])) for row in rows]
