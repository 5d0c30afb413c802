"""The oracle equals transformers' own classes in float32: random weights, every variant, through our loader.

transformers 5 is the source of truth for what a checkpoint means; 1e-4 is the project's bound on logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.backends.base import Pass, Rows
from outpace.backends.reference import ReferenceBackend
from outpace.config import ModelConfig
from outpace.models.loading import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3 window": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3 layer types": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 window off": ("qwen3", {"head_dim": 8, "use_sliding_window": False, "sliding_window": 6}),
    "qwen3 yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3 yarn factor": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen3 yarn mscale": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "qwen3 yarn betas": ("qwen3", {"head_dim": 32, "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 0.5}}),
    "qwen3 linear": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "qwen3 moe": ("qwen3_moe", MOE | {"head_dim": 16}),
    "qwen3 moe raw weights": ("qwen3_moe", MOE | {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3 moe sparse step": ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    "qwen3 moe dense layer": ("qwen3_moe", MOE | {"mlp_only_layers": [1]}),
    "qwen3 moe window": ("qwen3_moe", MOE | {"use_sliding_window": True, "sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2 moe": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "qwen2 moe window": (
        "qwen2_moe",
        MOE | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 3},
    ),
    "llama": ("llama", {}),
    "llama wide heads": ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
TOKENS = [3, 17, 60, 5, 5, 41, 0, 22, 9, 33, 58, 12, 7, 2, 29, 44, 51, 18, 36, 6]


def hf_model(kind: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A transformers model with random weights large enough that every part matters."""
    config = transformers.AutoConfig.for_model(kind, **BASE | changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(
                    noise * (0.5 if weight.ndim == 1 else 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
                )
    return model


def hf_outputs(model: Any, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [n, vocab] and hidden states: the embedding, then each layer's output; the last one is normed."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.logits[0].numpy(), [hidden[0].numpy() for hidden in out.hidden_states]


def outpace_pass(path: Path, tokens: list[int]) -> tuple[ModelConfig, Pass]:
    loaded = load_model(path)
    backend = ReferenceBackend(loaded.config, loaded.weights)
    assert len(loaded.weights) == 0
    taps = range(-1, loaded.config.num_hidden_layers + 1)
    return loaded.config, backend.forward([Rows(backend.new_slot(), tokens)], taps=taps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = hf_model(*VARIANTS[variant])
    model.save_pretrained(tmp_path)
    logits, hidden = hf_outputs(model, TOKENS)
    config, ours = outpace_pass(tmp_path, TOKENS)
    assert logits.std() > 0.3  # the comparison has something to compare
    np.testing.assert_allclose(ours.logits, logits, atol=1e-4, rtol=0)
    for tap in range(-1, config.num_hidden_layers - 1):
        np.testing.assert_allclose(ours.taps[tap], hidden[tap + 1], atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours.taps[config.num_hidden_layers], hidden[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["qwen3 yarn", "llama3", "qwen3 linear", "qwen3 window"])
def test_far_positions_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = hf_model(*VARIANTS[variant])
    model.save_pretrained(tmp_path)
    tokens = [(7 * i * i + 3 * i) % 61 for i in range(200)]
    np.testing.assert_allclose(
        outpace_pass(tmp_path, tokens)[1].logits, hf_outputs(model, tokens)[0], atol=1e-4, rtol=0
    )


def test_fused_experts_load_as_single_ones(tmp_path: Path) -> None:
    from outpace.weights.safetensors import write_safetensors

    model = hf_model(*VARIANTS["qwen3 moe"])
    model.save_pretrained(tmp_path)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state  # transformers 5 fuses them in memory
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / "model.safetensors", state)
    np.testing.assert_allclose(
        outpace_pass(tmp_path, TOKENS)[1].logits, hf_outputs(model, TOKENS)[0], atol=1e-4, rtol=0
    )


def test_old_and_new_rope_spelling_are_the_same(tmp_path: Path) -> None:
    hf_model(*VARIANTS["qwen3 yarn"]).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    rope = new.pop("rope_parameters")
    old = new | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(tmp_path)
