"""Drafters guess the next tokens. base.py holds the contract; one file each holds one way to guess."""

from .base import Drafter, State
from .datastore import DatastoreDrafter
from .draft_model import DraftModelDrafter
from .longest import LongestMatchDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter

__all__ = [
    "DatastoreDrafter",
    "DraftModelDrafter",
    "Drafter",
    "LongestMatchDrafter",
    "NgramDrafter",
    "State",
    "SuffixDrafter",
]
