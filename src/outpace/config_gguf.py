"""GGUF metadata as a ModelConfig, and back (GGUF specification; keys `{architecture}.*`, `tokenizer.ggml.*`).

Neighbours: config.py is the result and calls this; config_fields.py checks each value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .config import LAYER_TYPES, ModelConfig, RopeScaling
from .config_fields import INT_RANGES, Reader, check_int, check_number, show
from .types import ModelError

_ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "llama": "llama",
}
_REFUSED = (  # switches of other models' forward passes; zero or absent in ours
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "nextn_predict_layers",
    "rope.scaling.yarn_log_multiplier",
)


def from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> ModelConfig:
    """See `ModelConfig.from_gguf`."""
    general = Reader(metadata)
    name = general.text("general.architecture", "")
    if name not in _ARCHITECTURES:
        raise ModelError(f"general.architecture {show(name)} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    arch = _ARCHITECTURES[name]
    read = Reader(metadata, name + ".")
    for key in _REFUSED:
        if read.number(key, 0.0):
            raise ModelError(f"{name}.{key} {read.get(key)} is not supported; supported: 0")
    layers = read.integer("block_count", field="num_hidden_layers")
    hidden = read.integer("embedding_length", field="hidden_size")
    heads = read.integer("attention.head_count", field="num_attention_heads")
    head_dim = read.integer("attention.key_length", max(hidden // heads, 1), field="head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise ModelError(f"{name}.{key} must equal the head's width {head_dim}, got {read.get(key)}")
    experts = read.integer("expert_count", 0, field="num_experts")
    if experts and arch not in ("qwen3_moe", "qwen2_moe"):
        raise ModelError(f"{name}.expert_count {experts} is not supported for architecture {name}; supported: 0")
    if not experts and arch in ("qwen3_moe", "qwen2_moe"):
        raise ModelError(f"{name}.expert_count is missing")
    if read.integer("expert_gating_func", 1) != 1:
        raise ModelError(
            f"{name}.expert_gating_func {read.get('expert_gating_func')} is not supported; supported: 1 (softmax)"
        )
    positions = read.integer("context_length", field="max_position_embeddings")
    window = read.integer("attention.sliding_window", 0)
    shared = read.integer("expert_shared_feed_forward_length", 0, field="shared_expert_ffn_size")
    if experts and not shared:
        shared = _size(shapes, "blk.0.ffn_up_shexp.weight", 0) or 0
    tokenizer = Reader(metadata, "tokenizer.ggml.")
    eos = [tokenizer.token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]

    def has(tensor: str, usual: bool) -> bool:
        return usual if shapes is None else f"blk.0.{tensor}" in shapes

    return ModelConfig(
        architecture=arch,
        vocab_size=_vocab_size(metadata, read, shapes),
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length", 1 if experts else None, field="intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read.integer("attention.head_count_kv", heads, field="num_key_value_heads"),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=read.number("rope.freq_base", 10_000.0),
        rope_scaling=_rope(read, positions),
        tie_word_embeddings=shapes is not None and "output.weight" not in shapes,
        attention_bias=has("attn_q.bias", arch.startswith("qwen2")),
        attention_out_bias=has("attn_output.bias", False),
        mlp_bias=has("ffn_up.bias", False),
        qk_norm=arch.startswith("qwen3"),
        sliding_window=window or None,
        use_sliding_window=window > 0,
        layer_types=_layer_types(read, layers) if window else None,
        num_experts=experts,
        num_experts_used=read.integer("expert_used_count", field="num_experts_used") if experts else 0,
        expert_ffn_size=read.integer(
            "expert_feed_forward_length", _size(shapes, "blk.0.ffn_up_exps.weight", 1), field="expert_ffn_size"
        )
        if experts
        else 0,
        shared_expert_ffn_size=shared,
        dense_layers=_dense_layers(shapes, layers) if experts else (),
        expert_weights_scale=read.number("expert_weights_scale", 1.0) or 1.0,
        norm_topk_prob=read.flag("expert_weights_norm", arch != "qwen2_moe"),
        bos_token_id=tokenizer.token("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        pad_token_id=tokenizer.token("padding_token_id"),
    )


def _vocab_size(metadata: Mapping[str, Any], read: Reader, shapes: Mapping[str, Sequence[int]] | None) -> int:
    """The embedding's rows, else the key, else the tokenizer's length: the rows may be padded beyond the others."""
    if shapes is not None and "token_embd.weight" in shapes:
        return check_int("rows of token_embd.weight", _size(shapes, "token_embd.weight", 0), *INT_RANGES["vocab_size"])
    tokens = metadata.get("tokenizer.ggml.tokens")
    counted = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else None
    return read.integer("vocab_size", counted)


def _size(shapes: Mapping[str, Sequence[int]] | None, tensor: str, axis: int) -> int | None:
    """One side of a tensor, None where there is no such tensor."""
    shape = (shapes or {}).get(tensor, ())
    return int(shape[axis]) if axis < len(shape) else None


def _dense_layers(shapes: Mapping[str, Sequence[int]] | None, layers: int) -> tuple[int, ...]:
    """The layers without a router."""
    if shapes is None:
        return ()
    return tuple(layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" not in shapes)


def _layer_types(read: Reader, layers: int) -> tuple[str, ...]:
    """Which layers slide: a flag for each layer, or all of them."""
    pattern = read.items("attention.sliding_window_pattern")
    if pattern is None:
        return ("sliding_attention",) * layers
    return tuple(LAYER_TYPES[bool(slides)] for slides in pattern)


def _rope(read: Reader, positions: int) -> RopeScaling | None:
    """llama.cpp keeps llama3's scaling as divisors in a tensor, so that only linear and yarn are metadata."""
    kind = read.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{read.prefix}rope.scaling.type {show(kind)} is not supported; supported: none, linear, yarn")
    if read.get("rope.scaling.factor") is None:
        raise ModelError(f"{read.prefix}rope.scaling.factor is missing")
    factor = check_number(f"{read.prefix}rope.scaling.factor", read.get("rope.scaling.factor"), above=0.0)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    # The file's factor multiplies YaRN's own one; transformers' attention_factor replaces it.
    scale = read.number("rope.scaling.attn_factor", 1.0) * read.number("rope.scaling.yarn_attn_factor", 1.0)
    own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=read.integer("rope.scaling.original_context_length", positions),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if scale == 1.0 else own * scale,
    )


# ------------------------------------------------------------------------------------------------------- writing


def to_gguf(config: ModelConfig) -> dict[str, Any]:
    """The metadata that `from_gguf` and llama.cpp read this configuration from; token ids come with the tokenizer.

    Biases, q/k norms, dense layers of a mixture, a tied head and llama3's frequency divisors follow from the tensors.
    Raises ModelError for what GGUF has no key for.
    """
    name = {ours: theirs for theirs, ours in _ARCHITECTURES.items()}[config.architecture]
    data: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
    }
    if config.num_experts:
        data |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_used,
            "expert_feed_forward_length": config.expert_ffn_size,
            "expert_weights_norm": config.norm_topk_prob,
        }
        if config.shared_expert_ffn_size:
            data["expert_shared_feed_forward_length"] = config.shared_expert_ffn_size
        if config.expert_weights_scale != 1.0:
            data["expert_weights_scale"] = float(config.expert_weights_scale)
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    if any(windows):
        data["attention.sliding_window"] = config.sliding_window
        data["attention.sliding_window_pattern"] = np.array([window is not None for window in windows])
    data |= _rope_metadata(config.rope_scaling)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in data.items()}


def _rope_metadata(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None or scaling.kind not in ("linear", "yarn"):
        return {}
    data: dict[str, Any] = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "linear":
        return data
    if not scaling.truncate or scaling.mscale or scaling.mscale_all_dim:
        raise ModelError("GGUF cannot hold a YaRN scaling with mscale, mscale_all_dim or truncate = false")
    data |= {
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }
    if scaling.attention_factor is not None:
        own = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        data["rope.scaling.yarn_attn_factor"] = scaling.attention_factor / own
    return data
