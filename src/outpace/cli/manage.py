"""`outpace pull`, `models`, `rm` and `info`: the models on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import note

if TYPE_CHECKING:
    from ..config import ModelConfig

Name = Annotated[str, typer.Argument(help="A built-in name or a Hugging Face id.", show_default=False)]
