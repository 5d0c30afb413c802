"""What a head's training needs of its target: embedding, head, final norm, and which layers are tapped.

Neighbours: kinds.py describes heads and gives them first weights, loop.py uses both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import ModelConfig
from ..models.loading import load_model
from ..models.names import EMBEDDING, FINAL_NORM, HEAD
from ..types import F32, I64, UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """embedding and lm_head: float32 [V, H]. norm: float32 [H], the final norm's gain."""

    config: ModelConfig
    embedding: F32
    lm_head: F32
    norm: F32

    @classmethod
    def load(cls, path: Path) -> Target:
        """Reads these tensors of a model. Raises as models/loading.py."""
        loaded = load_model(path)
        config, weights = loaded.config, loaded.weights
        embedding, _ = weights.take(EMBEDDING)
        lm_head = embedding if config.tie_word_embeddings else weights.take(HEAD)[0]
        return cls(config, embedding, lm_head, weights.take(FINAL_NORM)[0])


def default_taps(config: ModelConfig) -> tuple[int, ...]:
    """What is recorded, for heads of every kind: the output of the usual low, middle and high layer (EAGLE-3, as vLLM
    counts them), and the last one's, which also gives the labels. Raises UsageError for a target of too few layers."""
    layers = config.num_hidden_layers
    taps = (1, layers // 2 - 1, layers - 4, layers - 1)
    if len(set(taps)) < 4 or min(taps) < 0:
        raise UsageError(f"a target of {layers} layers is too small for the taps of a head")
    return taps


def draft_vocabulary(counts: I64, size: int, always: tuple[int, ...]) -> I64:
    """The ids of the most frequent tokens, ascending, int64 [at most size]; `always` are among them."""
    order = np.argsort(-counts, kind="stable")
    chosen = dict.fromkeys([*always, *order[: max(size, 1)].tolist()])
    ids: I64 = np.sort(np.array(list(chosen)[: max(size, len(always))], np.int64))
    return ids
