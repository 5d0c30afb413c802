"""ModelConfig from both kinds of files: what they mean, and what they may not say."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from outpace.config import ModelConfig, Qwen3Config, RopeScaling
from outpace.json_file import read_json
from outpace.models.rotary import rotary_frequencies
from outpace.types import ModelError

HF: dict[str, Any] = {  # the fields of Qwen3-0.6B's config.json
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MOE = HF | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA = {k: v for k, v in HF.items() if k not in ("head_dim", "num_key_value_heads")} | {"model_type": "llama"}
GGUF: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 28,
    "qwen3.context_length": 40960,
    "qwen3.embedding_length": 1024,
    "qwen3.feed_forward_length": 3072,
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.rope.freq_base": 1000000.0,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-06,
    "tokenizer.ggml.tokens": ["a"] * 100,
    "tokenizer.ggml.eos_token_id": 97,
    "tokenizer.ggml.bos_token_id": 96,
    "tokenizer.ggml.eot_token_id": 98,
}


def test_the_seed_names() -> None:
    config = tiny.SEED_CONFIG
    assert Qwen3Config is ModelConfig
    assert (config.q_proj_dim(), config.kv_proj_dim()) == (32, 16)
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_theta hidden_act tie_word_embeddings attention_bias qk_norm "
        "sliding_window max_window_layers use_sliding_window num_experts num_experts_used expert_ffn_size "
        "shared_expert_ffn_size expert_weights_scale"
    )
    for name in names.split(" "):
        assert hasattr(config, name)


# ------------------------------------------------------------------------------------------------------- config.json


def test_a_real_config() -> None:
    config = ModelConfig.from_hf(HF, {"eos_token_id": [151645, 151643]})
    assert config == ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_window_layers=28,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )
    assert config.q_proj_dim() == 2048
    assert not config.is_moe(0)
    assert config.window(27) is None


def test_from_a_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 151645]}))
    for source in (tmp_path, str(tmp_path / "config.json")):
        assert ModelConfig.from_hf(source).eos_token_ids == (151645, 7)
    assert ModelConfig.from_hf(tmp_path, {}).eos_token_ids == (151645,)


def test_defaults_depend_on_the_architecture() -> None:
    without = {k: v for k, v in HF.items() if k not in ("head_dim", "num_key_value_heads", "rope_theta")}
    assert ModelConfig.from_hf(without).head_dim == 128
    assert ModelConfig.from_hf(without).rope_theta == 10_000.0
    assert ModelConfig.from_hf(without).num_key_value_heads == 16
    llama = ModelConfig.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (llama.head_dim, llama.qk_norm, llama.mlp_bias) == (64, False, True)
    assert (llama.attention_bias, llama.attention_out_bias) == (True, True)
    qwen2 = ModelConfig.from_hf(LLAMA | {"model_type": "qwen2"})
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, False)


def test_experts() -> None:
    config = ModelConfig.from_hf(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert (config.num_experts, config.num_experts_used, config.expert_ffn_size) == (128, 8, 768)
    assert [layer for layer in range(6) if config.is_moe(layer)] == [3, 5]
    assert ModelConfig.from_hf({k: v for k, v in MOE.items() if k != "norm_topk_prob"}).norm_topk_prob is False
    assert ModelConfig.from_hf(MOE).norm_topk_prob is True
    spelt = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 64}
    assert ModelConfig.from_hf(spelt).num_experts == 64


def test_sliding_windows() -> None:
    on = HF | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 26}
    assert [ModelConfig.from_hf(on).window(layer) for layer in (0, 25, 26, 27)] == [None, None, 100, 100]
    types = ["full_attention"] * 27 + ["sliding_attention"]
    assert [ModelConfig.from_hf(on | {"layer_types": types}).window(layer) for layer in (26, 27)] == [None, 100]
    assert ModelConfig.from_hf(on | {"sliding_window": None}).window(27) is None
    missing = {k: v for k, v in on.items() if k != "sliding_window"}
    assert ModelConfig.from_hf(missing).window(27) == 4096
    assert ModelConfig.from_hf(MOE | {"use_sliding_window": True, "sliding_window": 9}).window(0) == 9
    assert ModelConfig.from_hf(HF | {"sliding_window": 9}).window(27) is None


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_rope_spellings(spelling: str) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768}
    old = ModelConfig.from_hf(HF | {"rope_scaling": scaling | {spelling: "yarn"}})
    plain = {k: v for k, v in HF.items() if k not in ("rope_theta", "rope_scaling")}
    new = ModelConfig.from_hf(plain | {"rope_parameters": scaling | {spelling: "yarn", "rope_theta": 1e6}})
    assert old == new
    assert new.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert ModelConfig.from_hf(plain | {"rope_parameters": {spelling: "default", "rope_theta": 5.0}}).rope_theta == 5.0


BAD_HF: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": ({"model_type": "mamba"}, ["model_type", "'mamba'", "qwen3_moe"]),
    "no architecture": ({"model_type": None}, ["model_type", "qwen3"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
    "layer type": (
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        ["layer_types[0]", "linear_attention", "full_attention"],
    ),
    "layer types missing": ({"layer_types": ["full_attention"]}, ["layer_types", "28", "1"]),
    "window without switch": (
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        ["layer_types", "use_sliding_window"],
    ),
    "text for a number": ({"hidden_size": "1024"}, ["hidden_size", "'1024'"]),
    "a fraction": ({"hidden_size": 1024.5}, ["hidden_size", "1024.5"]),
    "true for a number": ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    "negative": ({"vocab_size": -1}, ["vocab_size", "-1"]),
    "zero": ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
    "huge": ({"intermediate_size": 10**40}, ["intermediate_size", "digits"]),
    "too many layers": ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "1024"]),
    "missing": ({"vocab_size": None}, ["vocab_size", "missing"]),
    "heads do not divide": ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "16"]),
    "odd head": ({"head_dim": 7}, ["head_dim", "7", "even"]),
    "eps": ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps"]),
    "negative eps": ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
    "nan eps": ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "nan"]),
    "theta": ({"rope_theta": 0}, ["rope_theta"]),
    "infinite theta": ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
    "flag": ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
    "eos": ({"eos_token_id": ["</s>"]}, ["eos_token_id", "</s>"]),
    "negative eos": ({"eos_token_id": -7}, ["eos_token_id", "-7"]),
    "longrope": (
        {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        ["'longrope'", "yarn"],
    ),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "linear"]),
    "unknown rope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, ["'mrope'"]),
    "unknown rope key": ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, ["mrope_section"]),
    "rope per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
    "rope is a list": ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
    "two ropes": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 9.0}},
        ["both"],
    ),
    "no factor": ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
    "factor of zero": ({"rope_scaling": {"type": "linear", "factor": 0.0}}, ["factor", "0.0"]),
    "text factor": ({"rope_scaling": {"type": "yarn", "factor": "4"}}, ["factor", "'4'"]),
    "llama3 needs bands": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
    "llama3 bands": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["high_freq_factor"],
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "no experts used": (MOE | {"num_experts_per_tok": 0}, ["num_experts_used", "0"]),
    "more experts used": (MOE | {"num_experts_per_tok": 200}, ["num_experts_used", "128", "200"]),
    "too many experts": (MOE | {"num_hidden_layers": 1000, "num_experts": 4096}, ["num_experts", "4096"]),
    "experts missing": (MOE | {"num_experts": None}, ["num_experts", "missing"]),
    "expert size": (MOE | {"moe_intermediate_size": 0}, ["expert_ffn_size"]),
    "sparse step": (MOE | {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
    "mlp only": (MOE | {"mlp_only_layers": "all"}, ["mlp_only_layers"]),
    "moe window": (
        MOE | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 28},
        ["layer_types", "sliding_attention"],
    ),
    "llama window": (LLAMA | {"layer_types": ["sliding_attention"] * 28}, ["llama", "full_attention"]),
}


@pytest.mark.parametrize("case", BAD_HF)
def test_bad_config_json_is_named(case: str) -> None:
    changes, words = BAD_HF[case]
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(HF | changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("raw", "word"),
    [(b"", "JSON"), (b"[1]", "object"), (b"{", "JSON"), (b"\xff\xfe", "JSON"), (b"[" * 200_000, "JSON"),
     (b'{"a": ' + b"1" * 10_000 + b"}", "JSON")],
)  # fmt: skip
def test_damaged_json_is_named(tmp_path: Path, raw: bytes, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=word) as caught:
        ModelConfig.from_hf(path)
    assert str(path) in str(caught.value)


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        ModelConfig.from_hf(tmp_path)
    assert read_json(tmp_path / "config.json", missing={"a": 1}) == {"a": 1}
    with pytest.raises(ModelError, match="cannot be read"):
        read_json(tmp_path, missing={})  # there, but no file


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**40), 10**40), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-2, 3), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({*MOE, "rope_parameters", "layer_types"})), JUNK, max_size=3))
def test_any_config_json_loads_or_raises_model_error(changes: dict[str, Any]) -> None:
    with suppress(ModelError):  # anything else is a failure
        ModelConfig.from_hf(MOE | changes, changes)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GGUF)), st.one_of(JUNK, st.just(np.arange(3))), max_size=3))
def test_any_metadata_loads_or_raises_model_error(changes: dict[str, Any]) -> None:
    with suppress(ModelError):
        ModelConfig.from_gguf(GGUF | changes)


# --------------------------------------------------------------------------------------------------------------- GGUF


def test_metadata() -> None:
    config = ModelConfig.from_gguf(GGUF)
    assert config == ModelConfig(
        architecture="qwen3",
        vocab_size=100,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        bos_token_id=96,
        eos_token_ids=(97, 98),
    )
    shapes = {"token_embd.weight": (104, 1024), "blk.0.attn_q.bias": (2048,), "blk.0.attn_output.bias": (1024,)}
    config = ModelConfig.from_gguf(GGUF, shapes)
    assert (config.vocab_size, config.tie_word_embeddings) == (104, True)
    assert (config.attention_bias, config.attention_out_bias) == (True, True)
    assert not ModelConfig.from_gguf(GGUF, shapes | {"output.weight": (104, 1024)}).tie_word_embeddings


def test_metadata_of_experts() -> None:
    moe = {key.replace("qwen3.", "qwen3moe."): value for key, value in GGUF.items()} | {
        "general.architecture": "qwen3moe",
        "qwen3moe.expert_count": 16,
        "qwen3moe.expert_used_count": 4,
        "qwen3moe.expert_feed_forward_length": 768,
        "qwen3moe.expert_weights_scale": 2.5,
    }
    config = ModelConfig.from_gguf(moe)
    assert (config.architecture, config.num_experts, config.num_experts_used) == ("qwen3_moe", 16, 4)
    assert (config.expert_ffn_size, config.expert_weights_scale, config.norm_topk_prob) == (768, 2.5, True)
    routers = {f"blk.{layer}.ffn_gate_inp.weight": (16, 1024) for layer in range(28) if layer != 3}
    assert ModelConfig.from_gguf(moe, routers).dense_layers == (3,)


def test_metadata_of_windows_and_rope() -> None:
    window = GGUF | {"qwen3.attention.sliding_window": 64}
    assert ModelConfig.from_gguf(window).window(0) == 64
    pattern = np.array([True, False] * 14)
    config = ModelConfig.from_gguf(window | {"qwen3.attention.sliding_window_pattern": pattern})
    assert [config.window(layer) for layer in (0, 1, 2)] == [64, None, 64]
    yarn = GGUF | {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32768,
    }
    expected = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert ModelConfig.from_gguf(yarn).rope_scaling == expected
    scaled = ModelConfig.from_gguf(yarn | {"qwen3.rope.scaling.attn_factor": 2.0}).rope_scaling
    assert scaled is not None
    assert scaled.attention_factor == pytest.approx(2 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "rwkv"}, ["general.architecture", "'rwkv'", "qwen3moe"]),
        ({"qwen3.block_count": None}, ["qwen3.block_count", "missing"]),
        ({"qwen3.block_count": "28"}, ["qwen3.block_count", "'28'"]),
        ({"qwen3.attention.head_count": np.array([16] * 28)}, ["qwen3.attention.head_count"]),
        ({"qwen3.rope.dimension_count": 64}, ["qwen3.rope.dimension_count", "128", "64"]),
        ({"qwen3.expert_count": 8}, ["qwen3.expert_count", "8"]),
        ({"qwen3.rope.scaling.type": "longrope"}, ["qwen3.rope.scaling.type", "'longrope'"]),
        ({"qwen3.rope.scaling.type": "linear"}, ["qwen3.rope.scaling.factor", "missing"]),
        ({"qwen3.logit_scale": 8.0}, ["qwen3.logit_scale", "8.0"]),
        ({"qwen3.context_length": 2**40}, ["qwen3.context_length", str(2**40)]),
    ],
)
def test_bad_metadata_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_gguf(GGUF | changes)
    for word in ["GGUF metadata", *words]:
        assert word in str(caught.value)


# --------------------------------------------------------------------------------------------------- direct use, rotary


def test_a_config_cannot_be_made_wrong() -> None:
    for changes in ({"head_dim": 5}, {"hidden_act": "relu"}, {"eos_token_ids": (-1,)}, {"dense_layers": (9,)}):
        with pytest.raises(ModelError):
            replace(tiny.SEED_CONFIG, **changes)
    with pytest.raises(ModelError, match="dynamic"):
        RopeScaling(kind="dynamic", factor=2.0)
    with pytest.raises(ModelError, match="head_dim / 2 = 4"):
        replace(tiny.SEED_CONFIG, rope_scaling=RopeScaling(kind="factors", factors=(1.0,)))


def test_factors_divide_frequencies() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain, _ = rotary_frequencies(tiny.SEED_CONFIG)
    scaled, factor = rotary_frequencies(
        replace(tiny.SEED_CONFIG, rope_scaling=RopeScaling(kind="factors", factors=factors))
    )
    np.testing.assert_allclose(scaled * np.array(factors), plain, rtol=1e-6)
    assert factor == 1.0
    assert plain.dtype == np.float32
