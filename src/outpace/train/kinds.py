"""The kinds of heads that can be trained: for each what it is for a target, what it begins with, and its module.

Neighbours: target.py has the target's parts; eagle3.py, mtp.py and dflash.py compute; run.py and loop.py choose here.
All kinds learn from the same data (target.default_taps). A head begins as a guess that is not silly: features lead
straight to the target's final norm and head, so that the first gradients say what has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..heads.config import HeadConfig, head_tensors
from ..heads.formats import one_full_layer
from ..models.names import FINAL_NORM
from ..types import F32, UsageError
from .dflash import BlockHead
from .eagle3 import EagleHead
from .module import HeadModule
from .mtp import MtpHead
from .target import Target

BLOCK = 7  # rows of a dflash block, each a guess: with the newest token 8 rows to verify
BLOCK_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """config: (target, the data's taps, draft vocabulary) -> the head. first: (head, target, seed) -> its first
    weights, by the names of head_tensors. recipe: fields of loop.Recipe that differ for this kind."""

    config: Callable[[ModelConfig, tuple[int, ...], int], HeadConfig]
    first: Callable[[HeadConfig, Target, int], dict[str, F32]]
    module: type[HeadModule]
    recipe: Mapping[str, Any] = field(default_factory=dict)


def check_target(target: ModelConfig) -> None:
    """Raises UsageError for a target whose heads no layout holds."""
    if target.rope_scaling is not None and target.rope_scaling.kind == "factors":
        raise UsageError(
            "a head cannot be trained for a GGUF file with factors for its rotary embeddings: train it for the same "
            "model's safetensors folder"
        )


def kind_of(name: str) -> Kind:
    """Raises UsageError for a kind that is not there."""
    if name not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {name!r:.40}")
    return KINDS[name]


def eagle_config(target: ModelConfig, taps: tuple[int, ...], draft_vocabulary: int) -> HeadConfig:
    """One llama layer as wide as the target's, each head with keys and values of its own: the token comes in through
    them alone, so they must not be narrow. Raises as check_target."""
    check_target(target)
    return HeadConfig(
        algorithm="eagle3",
        layers=_layers(target, "llama", 1),
        target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        taps=taps,
        draft_vocab_size=draft_vocabulary,
        norm_before_residual=True,
        feature_norm="each",
    )


def mtp_config(target: ModelConfig, taps: tuple[int, ...], draft_vocabulary: int) -> HeadConfig:
    """One layer of the target's own kind, which reads the last layer's output before the final norm and goes on with
    its own state after its norm, as the speculators package trains it. Raises UsageError for a target of experts, and
    as check_target."""
    check_target(target)
    if target.num_experts:
        raise UsageError("mtp heads for models of experts cannot be trained: choose another kind")
    return HeadConfig(
        algorithm="mtp",
        layers=one_full_layer(target),
        target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        taps=taps[-1:],
        draft_vocab_size=draft_vocabulary,
        norm_output=True,
    )


def dflash_config(target: ModelConfig, taps: tuple[int, ...], draft_vocabulary: int) -> HeadConfig:
    """Two qwen3 layers. The mask token is the vocabulary's last: seldom a real one, and it need not be told apart from
    the anchor, which has its place for that. Raises as check_target."""
    check_target(target)
    return HeadConfig(
        algorithm="dflash",
        layers=_layers(target, "qwen3", BLOCK_LAYERS),
        target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        taps=taps,
        draft_vocab_size=draft_vocabulary,
        block_size=BLOCK,
        mask_token=target.vocab_size - 1,
        sample_from_anchor=True,
    )


def _layers(target: ModelConfig, architecture: str, count: int) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=count,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        qk_norm=architecture == "qwen3",
    )


def eagle_first(config: HeadConfig, target: Target, seed: int) -> dict[str, F32]:
    """The last tap goes straight through to the target's norm, everything else is small."""
    weights = _small(config, target, seed)
    hidden = config.layers.hidden_size
    weights["fc.weight"][:, -hidden:] = np.eye(hidden, dtype=np.float32)
    weights["fc.weight"][:, :-hidden] *= 0.3
    return weights


def mtp_first(config: HeadConfig, target: Target, seed: int) -> dict[str, F32]:
    """The feature goes straight through, the token comes in at random: straight through, too, it would be guessed
    again. The target's last layer in place of a small one does worse (docs/LOG.md)."""
    weights = _small(config, target, seed)
    hidden = config.layers.hidden_size
    weights["fc.weight"][:, hidden:] = np.eye(hidden, dtype=np.float32)
    return weights


def dflash_first(config: HeadConfig, target: Target, seed: int) -> dict[str, F32]:
    """The context is the last tap, and goes straight through attention: a block begins as the mean of what was there
    before. Otherwise it would begin as the mask token, and learn first that it is not."""
    weights = eagle_first(config, target, seed)
    for layer in range(config.layers.num_hidden_layers):
        for part in "vo":
            matrix = weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            straight = min(matrix.shape)
            matrix[:straight, :straight] = np.eye(straight, dtype=np.float32)
    return weights


def _small(config: HeadConfig, target: Target, seed: int) -> dict[str, F32]:
    random = np.random.default_rng(seed)
    weights: dict[str, F32] = {}
    for name, shape in head_tensors(config).items():
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            weights[name] = np.full(shape, fill, np.float32)
            continue
        gain = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights[name] = (gain / np.sqrt(shape[1]) * random.standard_normal(shape)).astype(np.float32)
    weights[FINAL_NORM] = target.norm.copy()
    return weights


KINDS: dict[str, Kind] = {
    "eagle3": Kind(eagle_config, eagle_first, EagleHead),
    "mtp": Kind(mtp_config, mtp_first, MtpHead),
    "dflash": Kind(dflash_config, dflash_first, BlockHead, {"stages": ((0.0, BLOCK),), "positions": 256}),
}
