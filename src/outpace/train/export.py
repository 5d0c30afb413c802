"""A trained head as files that others read: the layout of the speculators package, config.json and model.safetensors.

Neighbours: loop.py calls it, heads/loading.py reads it back. The target's embedding and head are not written: whoever
runs the head has them. d2t holds offsets, draft id + d2t = target id; ids of tapped layers count inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..heads.config import HeadConfig
from ..types import F32, I64, UsageError
from ..weights.files import replacing
from ..weights.safetensors import write_safetensors
from ..weights.tensor import Tensor

VERSION = "0.9.0"  # of the speculators package, whose layout this is


def export_head(folder: Path, config: HeadConfig, weights: Mapping[str, F32], d2t: I64, target: str) -> Path:
    """Writes the head in bfloat16 and returns its folder. target: the verifier's name. Weights by the names of
    head_tensors. Raises UsageError for a head that the layout cannot hold, ModelError when the disk refuses."""
    if config.algorithm != "eagle3" or config.layers.rope_scaling is not None:
        raise UsageError("only eagle3 heads without rope scaling can be exported")
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {_name(name): bfloat16(array) for name, array in weights.items()}
    used: Any = np.zeros(config.layers.vocab_size, np.bool_)
    used[d2t] = True
    if len(d2t) != config.layers.vocab_size:
        tensors |= {"d2t": d2t - np.arange(len(d2t)), "t2d": used}
    write_safetensors(folder / "model.safetensors", tensors)
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(_config(config, target), indent=1).encode())
    return folder


def bfloat16(array: F32) -> Tensor:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return Tensor(tuple(array.shape), "BF16", rounded.reshape(-1).view(np.uint8))


def _name(name: str) -> str:
    name = "layers.0.hidden_norm.weight" if name == "hidden_norm.weight" else name
    return re.sub(r"^model\.", "", name)


def _config(config: HeadConfig, target: str) -> dict[str, Any]:
    layers = config.layers
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": _layers(layers),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
    }


def _layers(layers: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": layers.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_hidden_layers,
        "num_attention_heads": layers.num_attention_heads,
        "num_key_value_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "max_position_embeddings": layers.max_position_embeddings,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": layers.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
