"""How a run went, a line of JSON at each checkpoint: history.jsonl. A resumed run goes on with it, plot.py draws it.

Neighbours: loop.py writes it. A line has `seconds`, `step`, `positions`, `rate`, `loss` and `agree` (means since the
line before) and, now and then, `tokens_per_round` on held-back sequences of the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..weights.files import replacing

HISTORY = "history.jsonl"

Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """The lines there are, none where there is no file; a line that a kill cut short is left out."""
    try:
        text = (folder / HISTORY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found: list[Line] = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict) and "step" in line and "seconds" in line]


def write(folder: Path, lines: list[Line]) -> None:
    """All of them, in place of the file: it is short, and a kill leaves the old or the new one."""
    with replacing(folder / HISTORY) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
