"""Tiny models for tests: the exact model of the seed contract, and independent random ones in many variants.

Arrays carry Hugging Face names and PyTorch shapes. `BACKENDS` lists every backend that the contract's suite runs on:
add one line and it is tested. A backend's name ends in its precision, "-f32" or "-int8".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outpace.backends.base import Backend
from outpace.backends.native import NativeBackend
from outpace.backends.reference import ReferenceBackend
from outpace.config import ModelConfig, RopeScaling
from outpace.models.names import expected_tensors
from outpace.weights.weight_map import WeightMap

Arrays = dict[str, np.ndarray]

# -------------------------------------------------------------------------------------------------- the seed's model

SEED_CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)

_SALTS = {
    "input_layernorm": 100,
    "post_attention_layernorm": 200,
    "q_proj": 300,
    "k_proj": 400,
    "v_proj": 500,
    "o_proj": 600,
    "q_norm": 700,
    "k_norm": 800,
    "gate_proj": 900,
    "up_proj": 1000,
    "down_proj": 1100,
}


def seed_model() -> tuple[ModelConfig, Arrays]:
    """Element i of a tensor with salt s is (((i * 2654435761 + s) mod 2**32) >> 8) / 2**24 - 0.5."""
    return SEED_CONFIG, {name: _hashed(_salt(name), shape) for name, shape in expected_tensors(SEED_CONFIG).items()}


def _salt(name: str) -> int:
    parts = name.split(".")
    if "layers" in parts:
        return _SALTS[parts[-2]] + int(parts[2])
    return {"model.embed_tokens.weight": 1, "model.norm.weight": 2000, "lm_head.weight": 3000}[name]


def _hashed(salt: int, shape: tuple[int, ...]) -> np.ndarray:
    i = np.arange(np.prod(shape), dtype=np.uint32)
    mixed = i * np.uint32(2654435761) + np.uint32(salt)  # uint32 arithmetic wraps: that is the modulus
    return ((mixed >> np.uint32(8)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)).reshape(shape)


# ------------------------------------------------------------------------------------------------ random tiny models

_BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
}
_MOE: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "num_experts": 6,
    "num_experts_used": 2,
    "expert_ffn_size": 32,
    "dense_layers": (1,),
}
_LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
)
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "qk_norm": False, "head_dim": 16},
    "llama": {"architecture": "llama", "qk_norm": False, "head_dim": 16, "rope_scaling": _LLAMA3},
    "bias": {"attention_bias": True, "attention_out_bias": True},
    "mlp_bias": {"architecture": "llama", "qk_norm": False, "mlp_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "moe": _MOE,
    "moe_scaled": _MOE | {"norm_topk_prob": False, "expert_weights_scale": 1.7},
    "moe_shared": _MOE
    | {
        "architecture": "qwen2_moe",
        "qk_norm": False,
        "attention_bias": True,
        "shared_expert_ffn_size": 64,
        "norm_topk_prob": False,
    },
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32)},
    "linear": {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
}


def random_config(variant: str = "qwen3", **changes: Any) -> ModelConfig:
    return ModelConfig(**_BASE | VARIANTS[variant] | changes)


def random_model(variant: str = "qwen3", seed: int = 0, **changes: Any) -> tuple[ModelConfig, Arrays]:
    """Independent random weights, so large that greedy output varies and every tensor matters."""
    config = random_config(variant, **changes)
    random = np.random.default_rng(seed)
    return config, {name: _random(name, shape, random) for name, shape in expected_tensors(config).items()}


def _random(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Gains that let attention speak as loud as the MLP, and q/k norms so uneven that swapping them shows."""
    noise = random.standard_normal(shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return (1 + noise).astype(np.float32)
    if name.endswith("norm.weight"):
        return (1 + 0.3 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return (0.5 * noise).astype(np.float32)
    if name.endswith("embed_tokens.weight"):
        return noise.astype(np.float32)
    gain = 3.5 if name.endswith("o_proj.weight") else 2.0
    return (gain / np.sqrt(shape[-1]) * noise).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- backends

Make = Callable[..., Backend]  # (config, arrays, *, slots, positions) -> Backend


def _reference(precision: str) -> Make:
    def make(config: ModelConfig, arrays: Arrays, *, slots: int = 8, positions: int | None = None) -> Backend:
        weights = WeightMap.from_tensors(arrays)
        return ReferenceBackend(config, weights, precision=precision, slots=slots, positions=positions)  # type: ignore[arg-type]

    return make


def _native(precision: str) -> Make:
    def make(config: ModelConfig, arrays: Arrays, *, slots: int = 8, positions: int | None = None) -> Backend:
        weights = WeightMap.from_tensors(arrays)
        return NativeBackend(config, weights, precision=precision, slots=slots, positions=positions)  # type: ignore[arg-type]

    return make


BACKENDS: dict[str, Make] = {
    "native-f32": _native("f32"),
    "native-int8": _native("int8"),
    "reference-f32": _reference("f32"),
    "reference-int8": _reference("int8"),
}
