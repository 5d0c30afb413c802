"""Drafters guess the next tokens. base.py holds the contract; one file each holds one way to guess."""

from .base import Drafter, State, Want
from .draft_model import DraftModelDrafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter

__all__ = ["DraftModelDrafter", "Drafter", "NgramDrafter", "State", "SuffixDrafter", "Want"]
