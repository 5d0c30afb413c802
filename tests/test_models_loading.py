"""From files to canonical weights: both formats, every refusal by name, nothing lost and nothing permuted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from outpace.backends.base import Rows
from outpace.backends.reference import ReferenceBackend
from outpace.config import ModelConfig
from outpace.models.loading import LoadedModel, load_model
from outpace.models.names import expected_tensors
from outpace.types import ModelError, UsageError
from outpace.weights.gguf import write_gguf
from outpace.weights.safetensors import write_safetensors
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap

TOKENS = [3, 17, 66, 5, 5, 41, 0, 22]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def logits(config: ModelConfig, weights: WeightMap) -> np.ndarray:
    backend = ReferenceBackend(config, weights)
    return backend.forward([Rows(backend.new_slot(), TOKENS)]).logits


def direct(model: tuple[ModelConfig, tiny.Arrays]) -> np.ndarray:
    return logits(model[0], WeightMap.from_tensors(model[1]))


def loaded_logits(loaded: LoadedModel) -> np.ndarray:
    return logits(loaded.config, loaded.weights)


# ------------------------------------------------------------------------------------------------ Hugging Face folders


def hf_json(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    """A config.json for the tiny qwen3 and MoE variants."""
    data: dict[str, Any] = {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.num_experts:
        data |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_used,
            "moe_intermediate_size": config.expert_ffn_size,
            "norm_topk_prob": config.norm_topk_prob,
            "mlp_only_layers": list(config.dense_layers),
            "shared_expert_intermediate_size": config.shared_expert_ffn_size,
        }
    return data | changes


def save_hf(folder: Path, config: ModelConfig, arrays: tiny.Arrays, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_json(config, **changes)))
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("variant", ["qwen3", "tied", "qwen2", "moe", "moe_shared"])
def test_folder_round_trip(tmp_path: Path, variant: str) -> None:
    model = tiny.random_model(variant)
    loaded = load_model(save_hf(tmp_path, *model))
    assert loaded.format == "safetensors"
    assert loaded.metadata is None
    assert loaded.notices == ()
    assert loaded.config == replace(model[0], max_window_layers=28)
    np.testing.assert_array_equal(loaded_logits(loaded), direct(model))


def test_every_bad_tensor_is_in_one_error(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("qwen3")
    del arrays["model.layers.2.self_attn.q_norm.weight"], arrays["model.norm.weight"]
    arrays["model.layers.0.mlp.up_proj.weight"] = arrays["model.layers.0.mlp.up_proj.weight"].T.copy()
    arrays["model.layers.1.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
    with pytest.raises(ModelError) as caught:
        load_model(save_hf(tmp_path, config, arrays))
    message = str(caught.value)
    for words in (
        str(tmp_path),
        "2 missing: model.layers.2.self_attn.q_norm.weight, model.norm.weight",
        "1 not known for this architecture: model.layers.1.self_attn.q_proj.bias",
        "1 of the wrong shape: model.layers.0.mlp.up_proj.weight [64, 96] instead of [96, 64]",
    ):
        assert words in message
    assert "\n" not in message


def test_a_model_of_another_kind_gives_a_short_error(tmp_path: Path) -> None:
    arrays = {f"transformer.h.{i}.attn.c_attn.weight": np.zeros((4, 4), np.float32) for i in range(500)}
    with pytest.raises(ModelError, match="492 more") as caught:
        load_model(save_hf(tmp_path, tiny.random_config("qwen3"), arrays))
    assert len(str(caught.value)) < 2000


def test_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    model = tiny.random_model("qwen3")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    np.testing.assert_array_equal(
        loaded_logits(load_model(save_hf(tmp_path, model[0], model[1] | extra))), direct(model)
    )


def test_tied_flag_without_head(tmp_path: Path) -> None:
    model = tiny.random_model("tied")
    assert HEAD not in model[1]
    np.testing.assert_array_equal(loaded_logits(load_model(save_hf(tmp_path, *model))), direct(model))


def test_tied_flag_with_the_same_head(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("tied")
    loaded = load_model(save_hf(tmp_path, config, arrays | {HEAD: arrays[EMBEDDING]}))
    assert loaded.config.tie_word_embeddings
    assert not loaded.weights.has(HEAD)
    np.testing.assert_array_equal(loaded_logits(loaded), direct((config, arrays)))


def test_tied_flag_with_only_a_head(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("tied")
    renamed = {HEAD if name == EMBEDDING else name: array for name, array in arrays.items()}
    np.testing.assert_array_equal(
        loaded_logits(load_model(save_hf(tmp_path, config, renamed))), direct((config, arrays))
    )


def test_tied_flag_with_another_head_uses_both_and_says_so(tmp_path: Path) -> None:
    """As transformers does: the weights are right and the flag is wrong."""
    config, arrays = tiny.random_model("qwen3")
    loaded = load_model(save_hf(tmp_path, config, arrays, tie_word_embeddings=True))
    assert not loaded.config.tie_word_embeddings
    assert len(loaded.notices) == 1
    assert "lm_head.weight differs" in loaded.notices[0]
    np.testing.assert_array_equal(loaded_logits(loaded), direct((config, arrays)))


def test_untied_flag_without_head_is_an_error(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("tied")
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        load_model(save_hf(tmp_path, config, arrays, tie_word_embeddings=False))


def test_fused_experts_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("moe")
    arrays = {name: array for name, array in arrays.items() if "layers.0.mlp.experts" not in name}
    arrays["model.layers.0.mlp.experts.gate_up_proj"] = np.zeros((6, 60, 64), np.float32)
    with pytest.raises(ModelError, match=r"not known .* model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load_model(save_hf(tmp_path, config, arrays))


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        load_model(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        load_model(tmp_path / "weights.bin")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="several"):
        load_model(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- GGUF

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama models: each head's two halves become interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).copy()


def gguf_arrays(config: ModelConfig, arrays: tiny.Arrays) -> tiny.Arrays:
    """The model under llama.cpp's names and in its layout."""
    out: tiny.Arrays = {}
    for name, array in arrays.items():
        if name in TOP:
            out[TOP[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        if module.startswith("mlp.experts."):
            _, _, expert, part = module.split(".")
            if expert == "0":
                stack = [arrays[name.replace("experts.0.", f"experts.{e}.")] for e in range(config.num_experts)]
                out[f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"] = np.stack(stack)
            continue
        if config.architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            array = llama_cpp_permute(array, heads)
        if module == "mlp.shared_expert_gate":
            array = array[0]
        out[f"blk.{layer}.{BLOCK[module]}.{kind}"] = array
    return out


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    arch = config.architecture.replace("_", "")
    data: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if config.num_experts:
        data |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_used,
            "expert_feed_forward_length": config.expert_ffn_size,
        }
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in data.items()}


def save_gguf(path: Path, config: ModelConfig, arrays: tiny.Arrays, **metadata: Any) -> Path:
    tensors = {name: Tensor.from_array(np.ascontiguousarray(array)) for name, array in arrays.items()}
    write_gguf(path, gguf_metadata(config) | metadata, tensors)
    return path


@pytest.mark.parametrize("variant", ["qwen3", "tied", "qwen2", "bias", "mlp_bias", "moe", "moe_shared"])
def test_gguf_round_trip(tmp_path: Path, variant: str) -> None:
    model = tiny.random_model(variant)
    loaded = load_model(save_gguf(tmp_path / "m.gguf", model[0], gguf_arrays(*model)))
    assert loaded.format == "gguf"
    assert loaded.metadata is not None
    assert loaded.metadata["general.architecture"] == model[0].architecture.replace("_", "")
    assert set(loaded.weights) == set(expected_tensors(model[0]))
    assert loaded.config == replace(model[0], rms_norm_eps=loaded.config.rms_norm_eps)
    np.testing.assert_array_equal(loaded_logits(loaded), direct((loaded.config, model[1])))


def test_gguf_llama_rows_are_put_back(tmp_path: Path) -> None:
    """Also the biases; and the check sees it: without the permutation the file means another model."""
    model = tiny.random_model("llama", rope_scaling=None, attention_bias=True)
    right = gguf_arrays(*model)
    loaded = load_model(save_gguf(tmp_path / "m.gguf", model[0], right))
    for name in loaded.weights:
        if "_proj" in name and "self_attn" in name:
            np.testing.assert_array_equal(loaded.weights.take_tensor(name).f32(), model[1][name])
    wrong = gguf_arrays(replace(model[0], architecture="qwen2"), model[1])
    other = load_model(save_gguf(tmp_path / "w.gguf", model[0], wrong))
    assert np.abs(loaded_logits(other) - direct(model)).max() > 0.1


def test_gguf_quantised_rows_are_put_back_without_decoding(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config, arrays = tiny.random_model("llama", rope_scaling=None)
    named = gguf_arrays(config, arrays)
    quantised = gguf.quants.quantize(named["blk.0.attn_q.weight"], gguf.GGMLQuantizationType.Q8_0)
    tensors = {name: Tensor.from_array(array) for name, array in named.items()}
    tensors["blk.0.attn_q.weight"] = Tensor((64, 64), "Q8_0", quantised.reshape(-1))
    write_gguf(tmp_path / "m.gguf", gguf_metadata(config), tensors)
    tensor = load_model(tmp_path / "m.gguf").weights.take_tensor("model.layers.0.self_attn.q_proj.weight")
    assert tensor.kind == "Q8_0"
    np.testing.assert_allclose(tensor.f32(), arrays["model.layers.0.self_attn.q_proj.weight"], atol=0.01)


def test_gguf_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    from outpace.models.rotary import rotary_frequencies

    config, arrays = tiny.random_model("llama")
    scaled, _ = rotary_frequencies(config)
    plain, _ = rotary_frequencies(replace(config, rope_scaling=None))
    assert (scaled != plain).any()
    named = gguf_arrays(config, arrays) | {"rope_freqs.weight": plain / scaled}
    loaded = load_model(save_gguf(tmp_path / "m.gguf", config, named))
    assert loaded.config.rope_scaling is not None
    assert loaded.config.rope_scaling.kind == "factors"
    np.testing.assert_allclose(loaded_logits(loaded), direct((config, arrays)), atol=1e-4)
    named["rope_freqs.weight"] = np.ones(5, np.float32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight must have shape"):
        load_model(save_gguf(tmp_path / "w.gguf", config, named))


def test_gguf_refusals(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("qwen3")
    named = gguf_arrays(config, arrays)
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="merge the parts"):
        load_model(save_gguf(path, config, named, **{"split.count": 3}))
    with pytest.raises(ModelError, match=r"not known .* blk\.0\.ssm_in\.weight"):
        load_model(save_gguf(path, config, named | {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}))
    with pytest.raises(ModelError, match=r"not known .* model\.layers\.7\.input_layernorm\.weight"):
        load_model(save_gguf(path, config, named | {"blk.7.attn_norm.weight": np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match="twice"):
        load_model(save_gguf(path, config, named | {"blk.00.attn_norm.weight": np.zeros(64, np.float32)}))
    del named["blk.2.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(save_gguf(path, config, named))


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    model = tiny.random_model("qwen3")
    save_gguf(tmp_path / "m.gguf", model[0], gguf_arrays(*model))
    assert load_model(tmp_path).path == tmp_path / "m.gguf"
