"""Tiny random heads, and every public layout of a head's files made from one set of canonical weights.

`HEADS` are the heads, `LAYOUTS` the layouts: name -> (which head, writer). A writer puts the files into a folder and
returns what a user would name to load them. The layouts are written down here independently of the loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tiny
from outpace.config import ModelConfig, RopeScaling
from outpace.config_gguf import to_gguf
from outpace.heads.config import HeadConfig, head_tensors
from outpace.heads.loading import LoadedHead, borrowed
from outpace.models.gguf_names import interleaved_order
from outpace.types import F32
from outpace.weights.gguf import write_gguf
from outpace.weights.safetensors import write_safetensors
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap

Arrays = dict[str, np.ndarray]
TARGET, TARGET_ARRAYS = tiny.random_model(num_hidden_layers=8, seed=3)
_SIZES: dict[str, Any] = {"hidden_size": TARGET.hidden_size, "vocab_size": TARGET.vocab_size}
_QWEN3 = tiny.random_config(num_hidden_layers=1, **_SIZES)
_LLAMA = tiny.random_config("llama", num_hidden_layers=1, rope_scaling=None, **_SIZES)
_COMMON: dict[str, Any] = {"target_layers": 8, "target_hidden_size": TARGET.hidden_size}
_BLOCK: dict[str, Any] = {"algorithm": "dflash", "taps": (-1, 3, 6), "block_size": 4, "mask_token": 66}
_BLOCK |= {"layers": replace(_QWEN3, num_hidden_layers=2), "draft_vocab_size": 67} | _COMMON
_DSPARK: dict[str, Any] = _BLOCK | {"markov": "vanilla", "markov_rank": 5, "confidence": "hidden_markov"}
_DSPARK |= {"sample_from_anchor": True}
D2T = np.array([0, 2, 3, 5, 11, 12, 20, 33, 34, 40, 41, 50, 55, 60, 66], dtype=np.int64)

HEADS: dict[str, HeadConfig] = {
    "eagle3": HeadConfig(
        algorithm="eagle3", layers=_LLAMA, taps=(1, 3, 4), draft_vocab_size=len(D2T), own_lm_head=True, **_COMMON
    ),
    "eagle3_bias": HeadConfig(
        algorithm="eagle3", layers=replace(_LLAMA, attention_bias=True, attention_out_bias=True), taps=(0, 2),
        draft_vocab_size=67, norm_before_residual=True, norm_output=True, feature_norm="whole", own_lm_head=True,
        own_embedding=True, **_COMMON,
    ),
    "eagle3_qwen3": HeadConfig(
        algorithm="eagle3", layers=_QWEN3, taps=(0, 2, 4, 5, 7), draft_vocab_size=67, own_embedding=True,
        own_lm_head=True, **_COMMON,
    ),
    "dflash": HeadConfig(**_BLOCK),
    "dflash_small": HeadConfig(**_BLOCK | {"draft_vocab_size": len(D2T), "own_lm_head": True}),
    "dspark": HeadConfig(**_DSPARK),
    "dspark_own": HeadConfig(**_DSPARK | {"own_embedding": True, "own_lm_head": True}),
    "mtp": HeadConfig(
        algorithm="mtp", layers=_QWEN3, taps=(8,), draft_vocab_size=67, norm_output=True, **_COMMON
    ),
    "mtp_mimo": HeadConfig(
        algorithm="mtp", layers=_QWEN3, taps=(8,), draft_vocab_size=67, norm_output=True, concat="hidden_first",
        **_COMMON,
    ),
    "mtp_before": HeadConfig(
        algorithm="mtp", layers=_QWEN3, taps=(7,), draft_vocab_size=67, norm_output=True, **_COMMON
    ),
}  # fmt: skip


# Heads that the classes of the speculators package can be. GOLDEN: the first three of their logits, by name.
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
)
EAGLE3 = {
    "llama": HEADS["eagle3"],
    "biases": HEADS["eagle3_bias"],
    "qwen3": replace(HEADS["eagle3_qwen3"], taps=(0, 2, 4)),
    "each tap normed": replace(HEADS["eagle3_qwen3"], taps=(0, 2, 4), feature_norm="each", norm_output=True),
    "two layers": replace(HEADS["eagle3"], layers=replace(HEADS["eagle3"].layers, num_hidden_layers=2)),
    "llama3 rope": replace(HEADS["eagle3"], layers=replace(HEADS["eagle3"].layers, rope_scaling=LLAMA3)),
}
_SLIDING = replace(
    HEADS["dflash"].layers, use_sliding_window=True, sliding_window=3, max_window_layers=1
)  # the second of two layers
BLOCKS: dict[str, HeadConfig] = {
    "DFlash": HEADS["dflash"],
    "small vocabulary": HEADS["dflash_small"],
    "from the anchor": replace(HEADS["dflash"], sample_from_anchor=True),
    "causal window": replace(HEADS["dflash"], layers=_SLIDING),
    "window both ways": replace(HEADS["dflash"], layers=_SLIDING, sliding_window_non_causal=True),
    "DSpark": HEADS["dspark"],
    "DSpark, from the second": replace(HEADS["dspark"], sample_from_anchor=False, confidence="hidden"),
    "DSpark gated": replace(HEADS["dspark"], markov="gated"),
    "DSpark recurrent": replace(HEADS["dspark"], markov="rnn"),
    "DSpark recurrent, from the second": replace(HEADS["dspark"], markov="rnn", sample_from_anchor=False),
    "DSpark small": replace(HEADS["dspark"], draft_vocab_size=15, own_lm_head=True, confidence="none"),
}
GOLDEN = json.loads((Path(__file__).parent / "heads_golden.json").read_text(encoding="utf-8"))
TOKENS = 12


def text(width: int, seed: int = 4) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    features = random.standard_normal((TOKENS, width)).astype(np.float32)
    return features, [int(t) for t in random.integers(0, 66, TOKENS)]


def random_head(config: HeadConfig, seed: int = 0) -> Arrays:
    """Canonical random weights in which every tensor matters."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in head_tensors(config).items():
        noise = random.standard_normal(shape)
        if name.endswith("norm.weight") or name.startswith("fc_norm"):
            noise = 1 + 0.3 * noise
        elif len(shape) == 2 and "embed" not in name:
            noise *= 2 / np.sqrt(shape[1])
        arrays[name] = noise.astype(np.float32)
    return arrays


def d2t(config: HeadConfig) -> np.ndarray | None:
    return None if config.draft_vocab_size == config.layers.vocab_size else D2T


def hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of decoder layers."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps hidden_act attention_bias"
    )
    values = {name: getattr(config, name) for name in names.split()} | {"model_type": config.architecture}
    if config.use_sliding_window:
        names = "use_sliding_window sliding_window max_window_layers"
        values |= {name: getattr(config, name) for name in names.split()}
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        values["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        keys = "factor original_max_position_embeddings low_freq_factor high_freq_factor"
        scaling = {key: getattr(config.rope_scaling, key) for key in keys.split()}
    kind = config.rope_scaling.kind if config.rope_scaling else "default"
    return values | {"rope_parameters": {"rope_type": kind, "rope_theta": config.rope_theta} | scaling}


# ----------------------------------------------------------------------------------------------------------- helpers


def _save(folder: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def _renamed(arrays: Arrays, *rules: tuple[str, str]) -> Arrays:
    out = {}
    for name, array in arrays.items():
        for pattern, to in rules:
            name, count = re.subn(pattern, to, name)
            if count:
                break
        out[name] = array
    return out


def _maps(config: HeadConfig) -> Arrays:
    """d2t as offsets, and t2d."""
    ids = d2t(config)
    if ids is None:
        return {}
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(config.layers.vocab_size), ids)}


_BARE = (r"^model\.", "")
_DSPARK_NAMES = (
    (r"^markov_(gate|joint)\.", r"markov_head.\1_proj."), (r"^markov_w", "markov_head.markov_w"),
    (r"^confidence\.", "confidence_head.proj."),
)  # fmt: skip


def _speculators(config: HeadConfig, kind: str, **fields: Any) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
    return {
        "speculators_model_type": kind, "speculators_version": "0.9.0",
        "transformer_layer_config": hf(config.layers), "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": verifier,
        },
    } | fields  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- layouts


def specforge_eagle3(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    names = _renamed(arrays, (r"^hidden_norm", "midlayer.hidden_norm"), (r"^model\.layers\.0", "midlayer"), _BARE)
    data = hf(config.layers) | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps), "use_aux_hidden_state": True},
        "norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output,
        "norm_before_fc": config.feature_norm == "whole",
    }  # fmt: skip
    theta = data.pop("rope_parameters")["rope_theta"]
    return _save(folder, data | {"rope_theta": theta, "rope_scaling": None}, names | _maps(config))


def speculators_eagle3(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    names = _renamed(arrays, (r"^hidden_norm", "layers.0.hidden_norm"), _BARE)
    names.setdefault("embed_tokens.weight", TARGET_ARRAYS["model.embed_tokens.weight"])
    data = _speculators(
        config, "eagle3", architectures=["Eagle3DraftModel"], norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output, norm_before_fc=config.feature_norm == "whole",
        fc_norm=config.feature_norm == "each", eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in config.taps],
    )  # fmt: skip
    return _save(folder, data, names | _maps(config))


def deepspec_eagle3(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    names = _renamed(arrays, (r"^hidden_norm", "layers.0.hidden_norm"), _BARE)
    data = hf(config.layers) | {
        "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(config.taps), "ttt_length": 7,
        "num_target_layers": 8, "step_loss_decay": 0.8, "layer_types": ["full_attention"],
    }  # fmt: skip
    return _save(folder, data, names)


def gguf_eagle3(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    layers = config.layers
    data = {re.sub(r"^llama\.", "eagle3.", key): value for key, value in to_gguf(layers).items()}
    data |= {
        "general.architecture": "eagle3", "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.extract_layers": np.array([tap + 1 for tap in config.taps], dtype=np.int32),
        "eagle3.norm_before_residual": config.norm_before_residual,
    }  # fmt: skip
    parts = {
        "model.norm": "output_norm", "lm_head": "output", "hidden_norm": "blk.0.attn_norm_2", "fc": "fc",
        "model.layers.0.input_layernorm": "blk.0.attn_norm", "model.embed_tokens": "token_embd",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    }  # fmt: skip
    parts |= {f"model.layers.0.self_attn.{p}_proj": f"blk.0.attn_{p}" for p in "qkv"}
    parts |= {f"model.layers.0.mlp.{p}_proj": f"blk.0.ffn_{p}" for p in ("gate", "up", "down")}
    parts["model.layers.0.self_attn.o_proj"] = "blk.0.attn_output"
    tensors = {}
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        for part, heads in (("q", layers.num_attention_heads), ("k", layers.num_key_value_heads)):
            if stem.endswith(f".{part}_proj"):
                array = array[interleaved_order(heads, layers.head_dim)]
        tensors[f"{parts[stem]}.{kind}"] = Tensor.from_array(array)
    if (ids := d2t(config)) is not None:
        tensors["d2t"] = Tensor.from_array(ids)
    write_gguf(folder / "head.gguf", data, tensors)
    return folder / "head.gguf"


def _dflash(architecture: str, nested: bool) -> Callable[[Path, HeadConfig, Arrays], Path]:
    def write(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
        inner = {"mask_token_id": config.mask_token, "target_layer_ids": list(config.taps)}
        data = hf(config.layers) | {
            "architectures": [architecture], "block_size": config.block_size, "num_target_layers": 8,
        } | ({"dflash_config": inner} if nested else inner)  # fmt: skip
        data |= {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence != "none"}
        if config.markov != "none":
            data |= {"markov_head_type": config.markov, "confidence_head_with_markov": True}
        return _save(folder, data, _renamed(arrays, *_DSPARK_NAMES, _BARE))

    return write


def speculators_dflash(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    fields = {
        "block_size": config.block_size, "mask_token_id": config.mask_token,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "sliding_window_non_causal": config.sliding_window_non_causal,
        "sample_from_anchor": config.sample_from_anchor,
    }  # fmt: skip
    kind = "dflash"
    if config.markov_rank:
        kind = "dspark"
        fields |= {
            "markov_rank": config.markov_rank, "markov_head_type": config.markov,
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "hidden_markov",
        }  # fmt: skip
    return _save(folder, _speculators(config, kind, **fields), _renamed(arrays, *_DSPARK_NAMES, _BARE) | _maps(config))


def native_mtp(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    """Inside its model."""
    return _save(folder, hf(TARGET), TARGET_ARRAYS | _native(arrays))


def native_mtp_beside(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    """In a file of its own."""
    write_safetensors(folder / "mtp.safetensors", _native(arrays))
    return folder / "mtp.safetensors"


def _native(arrays: Arrays) -> Arrays:
    return _renamed(
        arrays, (r"^embedding_norm", "mtp.pre_fc_norm_embedding"), (r"^hidden_norm", "mtp.pre_fc_norm_hidden"),
        (r"^(model\.)?(?=layers|norm|fc)", "mtp."),
    )  # fmt: skip


def _mtp_layers(arrays: Arrays, prefix: str) -> Arrays:
    return _renamed(
        arrays, (r"^embedding_norm", prefix + "token_layernorm"), (r"^hidden_norm", prefix + "hidden_layernorm"),
        (r"^fc", prefix + "input_proj"), (r"^model\.norm", prefix + "final_layernorm"),
        (r"^model\.layers\.0\.", prefix),
    )  # fmt: skip


def mimo_mtp(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    data = hf(TARGET) | {"num_nextn_predict_layers": 1}
    return _save(folder, data, TARGET_ARRAYS | _mtp_layers(arrays, "model.mtp_layers.0."))


def speculators_mtp(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    data = _speculators(config, "mtp", num_nextn_predict_layers=1)
    data["transformer_layer_config"] = hf(replace(config.layers, num_hidden_layers=8))
    del data["draft_vocab_size"]
    return _save(folder, data, _mtp_layers(arrays, "mtp_layers.0."))


def gguf_nextn(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    data = to_gguf(TARGET) | {"qwen3.block_count": 9, "qwen3.nextn_predict_layers": 1}
    stems = {"fc": "nextn.eh_proj", "embedding_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}
    stems |= {"model.norm": "nextn.shared_head_norm", "model.layers.0.input_layernorm": "attn_norm"}
    stems |= {"model.layers.0.post_attention_layernorm": "ffn_norm", "model.layers.0.self_attn.o_proj": "attn_output"}
    stems |= {f"model.layers.0.self_attn.{p}_proj": f"attn_{p}" for p in "qkv"}
    stems |= {f"model.layers.0.self_attn.{p}_norm": f"attn_{p}_norm" for p in "qk"}
    stems |= {f"model.layers.0.mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")}
    tensors = {f"blk.8.{stems[name[:-7]]}.weight": Tensor.from_array(array) for name, array in arrays.items()}
    tensors["token_embd.weight"] = Tensor.from_array(TARGET_ARRAYS["model.embed_tokens.weight"])
    write_gguf(folder / "model.gguf", data, tensors)
    return folder / "model.gguf"


LAYOUTS: dict[str, tuple[str, Callable[[Path, HeadConfig, Arrays], Path]]] = {
    "SpecForge EAGLE-3": ("eagle3", specforge_eagle3),
    "SpecForge EAGLE-3, biases": ("eagle3_bias", specforge_eagle3),
    "speculators EAGLE-3": ("eagle3", speculators_eagle3),
    "speculators EAGLE-3, biases": ("eagle3_bias", speculators_eagle3),
    "DeepSpec EAGLE-3": ("eagle3_qwen3", deepspec_eagle3),
    "GGUF EAGLE-3": ("eagle3", gguf_eagle3),
    "z-lab DFlash": ("dflash", _dflash("DFlashDraftModel", nested=True)),
    "speculators DFlash": ("dflash", speculators_dflash),
    "speculators DFlash, small": ("dflash_small", speculators_dflash),
    "speculators DSpark": ("dspark", speculators_dflash),
    "SpecForge DSpark": ("dspark", _dflash("DSparkDraftModel", nested=True)),
    "DeepSpec DSpark": ("dspark_own", _dflash("Qwen3DSparkModel", nested=False)),
    "native MTP": ("mtp", native_mtp),
    "native MTP, beside": ("mtp", native_mtp_beside),
    "MiMo MTP": ("mtp_mimo", mimo_mtp),
    "speculators MTP": ("mtp_before", speculators_mtp),
    "GGUF nextn": ("mtp", gguf_nextn),
}


def shared_tensors(head: LoadedHead, target: WeightMap, config: ModelConfig) -> dict[str, F32]:
    """Every tensor that the head computes with in float32, its own taken and the target's borrowed: for
    reference.make_head."""
    own = {name: head.weights.take(name)[0] for name in head.weights.keys()}  # noqa: SIM118
    return own | {name: tensor.f32() for name, tensor in borrowed(head.config, target, config).items()}
