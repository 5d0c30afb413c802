"""A Hugging Face config.json as a ModelConfig, and back: the meaning and defaults of its fields, as in transformers 5.

Neighbours: config.py is the result and calls this; config_fields.py checks each value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ARCHITECTURES, LAYER_TYPES, ModelConfig, RopeScaling
from .config_fields import BIG, Reader, check_int, show
from .types import ModelError

_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {  # what a rope dictionary may say; a key outside changes the rotary embedding in a way we do not know
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """config.json and generation_config.json, parsed. See `ModelConfig.from_hf`."""
    read = Reader(data)
    arch = read.text("model_type", "")
    if arch not in ARCHITECTURES:
        raise ModelError(f"model_type {show(arch)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    act = read.text("hidden_act", "silu")
    if act not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {show(act)} is not supported; supported: {', '.join(_ACTIVATIONS)}")

    layers = read.integer("num_hidden_layers")
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    positions = read.integer("max_position_embeddings")
    head_dim = 128 if arch == "qwen3" else max(hidden // heads, 1)
    theta, scaling = _rope(read, positions)
    bias = read.flag("attention_bias", False)
    moe = arch in ("qwen3_moe", "qwen2_moe")
    use_window = arch != "llama" and read.flag("use_sliding_window", False)
    use_window = use_window and data.get("sliding_window", 4096) is not None  # null is no window, missing is 4096
    window = read.integer("sliding_window", 4096) if use_window else None
    experts = shared = 0
    if moe:
        spelling = "num_local_experts" if "num_local_experts" in data else "num_experts"
        experts = read.integer(spelling, field="num_experts")
    if arch == "qwen2_moe":
        shared = read.integer("shared_expert_intermediate_size", field="shared_expert_ffn_size")
    eos = dict.fromkeys((*read.tokens("eos_token_id"), *Reader(generation).tokens("eos_token_id")))
    return ModelConfig(
        architecture=arch,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", head_dim),
        max_position_embeddings=positions,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        hidden_act=_ACTIVATIONS[act],
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias={"qwen2": True, "qwen2_moe": read.flag("qkv_bias", True)}.get(arch, bias),
        attention_out_bias=bias and not arch.startswith("qwen2"),
        mlp_bias=arch == "llama" and read.flag("mlp_bias", False),
        qk_norm=arch.startswith("qwen3"),
        sliding_window=window,
        max_window_layers=read.integer("max_window_layers", 28),
        use_sliding_window=use_window,
        layer_types=_layer_types(read, arch, layers, use_window),
        num_experts=experts,
        num_experts_used=read.integer("num_experts_per_tok", 8 if arch == "qwen3_moe" else 4) if experts else 0,
        expert_ffn_size=read.integer("moe_intermediate_size", field="expert_ffn_size") if experts else 0,
        shared_expert_ffn_size=shared,
        norm_topk_prob=read.flag("norm_topk_prob", False) if moe else True,
        dense_layers=_dense_layers(read, layers) if experts else (),
        bos_token_id=read.token("bos_token_id"),
        eos_token_ids=tuple(eos),
        pad_token_id=read.token("pad_token_id"),
    )


def _layer_types(read: Reader, arch: str, layers: int, use_window: bool) -> tuple[str, ...] | None:
    """layer_types as given, or by the architecture's rule; None where that is `ModelConfig.window`'s own rule."""
    given = read.items("layer_types")
    rule: tuple[str, ...] | None = None
    if use_window and arch == "qwen3_moe":  # every layer, whatever max_window_layers says
        rule = ("sliding_attention",) * layers
        if given is not None and tuple(given) != rule:
            raise ModelError("layer_types of a qwen3_moe model with use_sliding_window must all be sliding_attention")
    elif use_window and arch == "qwen2_moe":  # every other layer below max_window_layers
        first_full = read.integer("max_window_layers", 28)
        rule = tuple(LAYER_TYPES[layer % 2 == 0 and layer < first_full] for layer in range(layers))
    elif arch == "llama" and given is not None and any(kind != "full_attention" for kind in given):
        raise ModelError(f"layer_types {show(given)} is not supported in a llama model; supported: full_attention")
    return rule if given is None else tuple(given)


def _dense_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """The layers of a MoE model that keep the dense MLP: mlp_only_layers and those between the sparse steps."""
    step = check_int("decoder_sparse_step", read.integer("decoder_sparse_step", 1), 1, BIG)
    only = [check_int("mlp_only_layers", layer, 0, BIG) for layer in read.items("mlp_only_layers") or ()]
    return tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)


def _rope(read: Reader, positions: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, spelt rope_theta + rope_scaling or, since transformers 5, rope_parameters."""
    sources = [(name, read.get(name)) for name in ("rope_scaling", "rope_parameters") if read.get(name)]
    for name, value in sources:
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} must be an object, got {show(value)}")
    if len(sources) == 2 and dict(sources[0][1]) != dict(sources[1][1]):
        raise ModelError("rope_scaling and rope_parameters are both given and differ; keep one of them")
    name, data = sources[0] if sources else ("rope_parameters", {})
    rope = Reader(data)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ModelError(f"{name}: rope type {show(kind)} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    unknown = sorted(str(key) for key in data if key not in _ROPE_KEYS)
    if unknown:
        raise ModelError(
            f"{name}: {show(', '.join(unknown))} is not supported; supported: {', '.join(sorted(_ROPE_KEYS))}"
        )
    partial = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    theta = rope.number("rope_theta", read.number("rope_theta", 10_000.0))
    if kind == "default":
        return theta, None
    original = read.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", positions)
    )
    if rope.get("factor") is None and kind != "yarn":
        raise ModelError(f"{name}: factor is missing")
    if kind == "llama3" and (rope.get("low_freq_factor") is None or rope.get("high_freq_factor") is None):
        raise ModelError(f"{name}: low_freq_factor or high_freq_factor is missing")
    scaling = RopeScaling(
        kind=kind,
        factor=rope.number("factor", positions / max(original, 1)),
        original_max_position_embeddings=None if kind == "linear" else original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
    return theta, scaling


# ------------------------------------------------------------------------------------------------------- writing


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that `from_hf` and transformers read this configuration from, but for ids of tokens.

    What it has no field for is left out: reading the result tells.
    """
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias",
        "tie_word_embeddings",
    )  # fmt: skip
    data: dict[str, Any] = {"model_type": config.architecture} | {name: getattr(config, name) for name in names}
    if config.architecture == "llama":
        data["mlp_bias"] = config.mlp_bias
    if config.use_sliding_window:
        data |= {name: getattr(config, name) for name in ("use_sliding_window", "sliding_window", "max_window_layers")}
        if config.architecture != "qwen3_moe":
            windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
            data["layer_types"] = [LAYER_TYPES[window is not None] for window in windows]
    if config.num_experts:
        data |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_used,
            "moe_intermediate_size": config.expert_ffn_size,
            "norm_topk_prob": config.norm_topk_prob,
            "mlp_only_layers": list(config.dense_layers),
        }
    if config.architecture == "qwen2_moe":
        data |= {"shared_expert_intermediate_size": config.shared_expert_ffn_size, "qkv_bias": config.attention_bias}
    return data | {"rope_parameters": {"rope_theta": config.rope_theta} | _rope_fields(config.rope_scaling)}


def _rope_fields(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    names = {
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
                 "mscale_all_dim", "truncate"),
    }.get(scaling.kind, ())  # fmt: skip
    values = {name: getattr(scaling, name) for name in ("factor", *names)}
    return {"rope_type": scaling.kind} | {name: value for name, value in values.items() if value is not None}
