"""Draft heads that come with outpace, each for the one model that it was made for.

boxed/NAME/ holds config.json and model.safetensors (the layout of the speculators package), box.json (the model's
fingerprint, how the head was made and what it gave) and README.md, which `card` makes of box.json. scripts/box_head.py
puts a trained head there. opening.py uses it without being asked, but for no model of other contents: a head made for a
model of the same shape loads all the same, and guesses nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..json_file import read_json
from ..types import ModelError, size

FOLDER = Path(__file__).parents[1] / "boxed"
_BEGINNING = 2 << 20  # bytes: sizes, tokenizer and the list of tensors, in GGUF and safetensors
_SAMPLES, _SAMPLE = 64, 4096  # places in each file, and bytes there: any training changes them


@dataclass(frozen=True, slots=True)
class Box:
    """A head in the box. path: its folder. about: box.json."""

    path: Path
    about: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """Where it is from, in a line."""
        made = self.about.get("made", {})
        return f"comes with outpace, made by: {made.get('command', 'unknown')}"


def find(model: Path) -> Box | None:
    """The head that was made for exactly the model in this .gguf file or folder. Raises ModelError where what is in
    the box is damaged."""
    try:
        boxes = sorted(FOLDER.glob("*/box.json"))
    except OSError:
        return None
    for file in boxes:
        about = read_json(file)
        target = about.get("target")
        if not isinstance(target, dict):
            raise ModelError(f"{file}: target must be an object")
        if target.get("bytes") == _bytes(model) and target.get("fingerprint") == fingerprint(model):
            return Box(file.parent, about)
    return None


def fingerprint(model: Path) -> str:
    """What a model's weights and vocabulary are known by, wherever its files lie. Raises ModelError."""
    digest = hashlib.sha256()
    try:
        for file in _files(model):
            with open(file, "rb", buffering=0) as stream:
                length = os.fstat(stream.fileno()).st_size
                digest.update(f"{length} ".encode() + stream.read(_BEGINNING))
                for sample in range(1, _SAMPLES + 1):
                    stream.seek(max(0, length * sample // _SAMPLES - _SAMPLE))
                    digest.update(stream.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{model}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    if not model.is_dir():
        return [model]
    names = ("config.json", "tokenizer.json")
    found = [*model.glob("*.safetensors"), *(model / name for name in names if (model / name).is_file())]
    return sorted(found) or sorted(model.glob("*.gguf"))[:1]


def _bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in _files(model) if file.is_file())


def about_target(model: Path, name: str) -> dict[str, Any]:
    """The entry "target" of a box.json for this model."""
    return {"name": name, "bytes": _bytes(model), "fingerprint": fingerprint(model)}


def card(about: Mapping[str, Any]) -> str:
    """README.md of a head in the box: what box.json says, for people. Raises ModelError for what is missing."""
    try:
        target, head, made, figures = about["target"], about["head"], about["made"], about["figures"]
        rows = [f"| {name} | {', '.join(f'{each} {value}' for each, value in values.items())} |"
                for name, values in figures.items()]  # fmt: skip
        return "\n".join([
            f"# A draft head for {target['name']}",
            "",
            f"outpace drafts with it whenever it runs {target['name']} ({size(target['bytes'])}, fingerprint",
            f"{target['fingerprint'][:16]}), unless told otherwise (`--head none`); no answer changes by it.",
            "",
            f"{head['kind']}, {head['parameters']:,} parameters, {size(head['bytes'])}, draft vocabulary of "
            f"{head['draft_vocabulary']:,} tokens.",
            "",
            "## How it was made",
            "",
            f"    {made['command']}",
            "",
            *(f"- {name.replace('_', ' ')}: {value}" for name, value in made.items() if name != "command"),
            "",
            "## What it gave",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            f"Licence: {about['licence']}. This page is made of box.json by scripts/box_head.py.",
            "",
        ])  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"box.json: {error!r} is missing or of another kind") from None
