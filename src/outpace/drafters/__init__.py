"""Drafters guess the next tokens. base.py holds the contract; one file each holds one way to guess."""

from .base import Drafter, State, Want
from .datastore import DatastoreDrafter
from .draft_model import DraftModelDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter

__all__ = ["DatastoreDrafter", "DraftModelDrafter", "Drafter", "NgramDrafter", "State", "SuffixDrafter", "Want"]
