"""What a head's training needs of its target: embedding, head, norms, and a layer to begin with.

Neighbours: loop.py uses it. A head begins as a guess that is not silly: features lead straight to the target's final
norm and head, so that the first gradients say what has to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import ModelConfig
from ..heads.config import HeadConfig, head_tensors
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
        tied = loaded.config.tie_word_embeddings
        embedding, _ = loaded.weights.take(EMBEDDING)
        lm_head = embedding if tied else loaded.weights.take(HEAD)[0]
        return cls(loaded.config, embedding, lm_head, loaded.weights.take(FINAL_NORM)[0])


def default_taps(config: ModelConfig) -> tuple[int, ...]:
    """The usual low, middle and high layer (EAGLE-3, as vLLM counts them), and the last one's output, which also gives
    the labels. Raises UsageError for a target of too few layers."""
    layers = config.num_hidden_layers
    taps = (1, layers // 2 - 1, layers - 4, layers - 1)
    if len(set(taps)) < 4 or min(taps) < 0:
        raise UsageError(f"a target of {layers} layers is too small for the taps of an EAGLE-3 head")
    return taps


def eagle_config(target: ModelConfig, taps: tuple[int, ...], draft_vocabulary: int) -> HeadConfig:
    """A head of one llama layer as wide as the target's, each head with keys and values of its own: the token comes in
    through them alone, so they must not be narrow."""
    layers = ModelConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        qk_norm=False,
    )
    return HeadConfig(
        algorithm="eagle3",
        layers=layers,
        target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        taps=taps,
        draft_vocab_size=draft_vocabulary,
        norm_before_residual=True,
        feature_norm="each",
    )


def draft_vocabulary(counts: I64, size: int, always: tuple[int, ...]) -> I64:
    """The ids of the most frequent tokens, ascending, int64 [at most size]; `always` are among them."""
    order = np.argsort(-counts, kind="stable")
    chosen = dict.fromkeys([*always, *order[: max(size, 1)].tolist()])
    ids: I64 = np.sort(np.array(list(chosen)[: max(size, len(always))], np.int64))
    return ids


def first_weights(config: HeadConfig, target: Target, seed: int) -> dict[str, F32]:
    """The head before training: the last tap goes straight through to the target's norm, everything else is small."""
    random = np.random.default_rng(seed)
    hidden = config.layers.hidden_size
    weights: dict[str, F32] = {}
    for name, shape in head_tensors(config).items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        gain = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights[name] = (gain / np.sqrt(shape[1]) * random.standard_normal(shape)).astype(np.float32)
    weights[FINAL_NORM] = target.norm.copy()
    weights["fc.weight"][:, -hidden:] = np.eye(hidden, dtype=np.float32)
    weights["fc.weight"][:, :-hidden] *= 0.3
    return weights
