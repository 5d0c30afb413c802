"""Drafters guess the next tokens. base.py holds the contract; one file each holds one way to guess.

A drafter's file is imported when it is asked for: a start needs one or two of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Drafter, State, Want

if TYPE_CHECKING:
    from .block import BlockDrafter
    from .datastore import DatastoreDrafter
    from .draft_model import DraftModelDrafter
    from .head import HeadDrafter
    from .ngram import NgramDrafter
    from .suffix import SuffixDrafter

_HOME = {
    "BlockDrafter": "block",
    "DatastoreDrafter": "datastore",
    "DraftModelDrafter": "draft_model",
    "HeadDrafter": "head",
    "NgramDrafter": "ngram",
    "SuffixDrafter": "suffix",
}

__all__ = [
    "BlockDrafter", "DatastoreDrafter", "DraftModelDrafter", "Drafter", "HeadDrafter", "NgramDrafter", "State",
    "SuffixDrafter", "Want",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'outpace.drafters' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
