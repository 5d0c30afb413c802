"""Drafters guess the next tokens. base.py holds the contract; one file each holds one way to guess."""

from .base import Drafter, State, Want
from .block import BlockDrafter
from .datastore import DatastoreDrafter
from .draft_model import DraftModelDrafter
from .head import HeadDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter

__all__ = [
    "BlockDrafter", "DatastoreDrafter", "DraftModelDrafter", "Drafter", "HeadDrafter", "NgramDrafter", "State",
    "SuffixDrafter", "Want",
]  # fmt: skip
