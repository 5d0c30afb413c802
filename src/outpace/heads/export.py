"""A learned head written in the layouts that others read: a folder of the speculators package or of SpecForge (and
SafeAILab), or a GGUF file of llama.cpp.

The way back of formats.py, which is asked about everything that is made here before a byte is written: a head that
would not come back the same, to the last field, is refused with the name of what the layout has no place for. What is
refused beside that are fields that the layout's own programs would ignore. The facts and where they were read:
docs/heads.md. Neighbours: loading.py reads heads, cli/export.py and train/ write them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..config import ModelConfig
from ..config_gguf import to_gguf
from ..config_hf import to_hf
from ..models.export import check_space, lost, rope_factors
from ..models.gguf_names import BLOCK, ROPE_FACTORS, TOP, interleaved_order
from ..models.names import EMBEDDING, HEAD, is_matrix
from ..models.rotary import rotary_frequencies
from ..types import F32, I64, ModelError, UsageError
from ..weights.files import replacing
from ..weights.formats import GROUP, pack_q4, pack_q8, quantise_q4, quantise_q8, round_bfloat16
from ..weights.gguf import Planned, gguf_size, write_gguf
from ..weights.safetensors import write_safetensors
from ..weights.tensor import Tensor
from .config import HeadConfig
from .formats import read_gguf, read_head
from .loading import assemble

Layout = Literal["speculators", "specforge", "gguf"]
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "q8_0": "Q8_0", "q4_0": "Q4_0"}
VERSION = "0.9.0"  # of the speculators package whose layout this is
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # general.file_type
_ENOUGH = 1 << 16  # bytes for a config.json


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as files that are not written yet. data: config.json, or a GGUF file's metadata. notices: what the user
    should know, one line each."""

    layout: Layout
    data: dict[str, Any]
    tensors: dict[str, Tensor]
    notices: tuple[str, ...] = ()


def export_head(
    out: Path,
    config: HeadConfig,
    weights: Mapping[str, F32 | Tensor],
    d2t: I64 | None,
    target: str | None,
    *,
    to: Layout = "speculators",
    dtype: str = "bfloat16",
    target_config: ModelConfig | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    force: bool = False,
) -> HeadFiles:
    """Writes a head to `out`, a folder or (gguf) a .gguf file: all of it, or nothing. Arguments as `head_files`.

    force: replace files that are there. Raises as `head_files` and `save`.
    """
    made = head_files(
        config, weights, d2t, target, to=to, dtype=dtype, target_config=target_config, tokenizer=tokenizer
    )
    save(made, out, force=force)
    return made


def head_files(
    config: HeadConfig,
    weights: Mapping[str, F32 | Tensor],
    d2t: I64 | None,
    target: str | None,
    *,
    to: Layout = "speculators",
    dtype: str = "bfloat16",
    target_config: ModelConfig | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> HeadFiles:
    """weights: by the names of config.head_tensors. d2t: int64 [draft vocabulary], ascending target ids, None where the
    vocabularies are the same. target: its name for other programs, a Hugging Face id or a folder's. dtype: one of
    DTYPES, that of the matrices; q8_0 and q4_0 in GGUF only. target_config: the target's, as far as the head tells it
    where it is not at hand. tokenizer: the target's as GGUF metadata, which llama.cpp
    wants.

    Raises UsageError, naming the field, for what the layout or the dtype cannot hold.
    """
    if to not in get_args(Layout):
        raise UsageError(f"the layout must be one of {', '.join(get_args(Layout))}, got {to!r:.40}")
    dtypes = [name for name in DTYPES if to == "gguf" or not name.startswith("q")]
    if dtype not in dtypes:
        raise UsageError(f"dtype must be one of {', '.join(dtypes)} in the {to} layout, got {dtype!r:.40}")
    tensors = {
        name: weight if isinstance(weight, Tensor) else Tensor.from_array(np.asarray(weight, np.float32))
        for name, weight in weights.items()
    }
    if d2t is not None and len(d2t) == config.layers.vocab_size:
        d2t = None
    _check_programs(config, to)
    if to == "gguf":
        made = _gguf(config, tensors, d2t, target, DTYPES[dtype], dict(tokenizer or {}))
    else:
        kept = {name: _converted(name, tensor, DTYPES[dtype]) for name, tensor in tensors.items()}
        make = _speculators if to == "speculators" else _specforge
        made = make(config, kept, target, None if target_config is None else target_config.architecture)
        if d2t is not None:
            made.tensors.update(_maps(d2t, config.layers.vocab_size))
    _check_comes_back(made, config, d2t, _as_target(config) if target_config is None else target_config)
    return made


def save(made: HeadFiles, out: Path, *, force: bool = False) -> None:
    """Writes the files to `out`: all of them, or nothing. A folder that is not there appears complete; in one that is,
    `force` replaces the files one by one. Raises UsageError for a place that cannot be, CapacityError when the disk is
    too full, ModelError when it refuses."""
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    if made.layout == "gguf":
        if out.suffix.lower() != ".gguf":
            raise UsageError(f"{out}: the file to write must be named .gguf")
        if os.path.lexists(out) and not (force and out.is_file()):
            raise UsageError(f"{out} is there already; --force replaces it" if out.is_file() else f"{out} is no file")
        plan = {name: Planned(t.shape, t.kind, lambda t=t: [t.data]) for name, t in made.tensors.items()}  # type: ignore[misc]
        check_space(out, gguf_size(made.data, plan))
        write_gguf(out, made.data, plan)
        return
    if out.suffix.lower() in (".gguf", ".safetensors", ".json"):
        raise UsageError(f"{out}: the {made.layout} layout is a folder: give it a folder's name")
    there = os.path.lexists(out)
    if there and not out.is_dir():
        raise UsageError(f"{out} is there and not a folder; write to another name")
    if there and not force and any(out.iterdir()):
        raise UsageError(f"{out} is there already; --force replaces the head in it")
    check_space(out, sum(tensor.nbytes for tensor in made.tensors.values()) + _ENOUGH)
    folder = out if there else out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / "model.safetensors", made.tensors)
        with replacing(folder / "config.json") as file:
            file.write(json.dumps(made.data, indent=1).encode())
        if not there:
            os.rename(folder, out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        if not there and folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- checks


def _check_programs(config: HeadConfig, to: Layout) -> None:
    """Raises UsageError for what formats.py would read, but not the programs whose layout it is."""
    layers, kind = config.layers, config.algorithm
    refuse: list[tuple[bool, str, str]] = []
    if to == "speculators":
        refuse = [
            (kind == "mtp" and config.own_embedding, "own_embedding", "yes"),
            (kind == "mtp" and config.own_lm_head, "own_lm_head", "yes"),
        ]
    elif to == "specforge":
        refuse = [
            (kind != "eagle3", "algorithm", kind),
            (layers.architecture != "llama", "layers' kind", layers.architecture),
            (layers.num_hidden_layers != 1, "layers", str(layers.num_hidden_layers)),
        ]
    elif kind == "eagle3":
        refuse = [
            (layers.architecture != "llama", "layers' kind", layers.architecture),
            (layers.num_hidden_layers != 1, "layers", str(layers.num_hidden_layers)),
            (len(config.taps) != 3, "taps", f"{len(config.taps)}, llama.cpp reads 3"),
            (config.feature_norm != "none", "feature_norm", config.feature_norm),
            (config.norm_output, "norm_output", "yes"),
            (layers.attention_bias or layers.attention_out_bias or layers.mlp_bias, "biases", "yes"),
        ]
    else:
        known = ("qwen2", "qwen3")
        refuse = [
            (kind != "mtp", "algorithm", kind),
            (layers.architecture not in known, "layers' kind", layers.architecture),
        ]
    for wrong, name, value in refuse:
        if wrong:
            raise UsageError(f"the {to} layout has no place for this head's {name} ({value})")


def _check_comes_back(made: HeadFiles, config: HeadConfig, d2t: I64 | None, like: ModelConfig) -> None:
    """Raises UsageError unless formats.py reads the same head, naming what is different."""
    layers = config.layers
    no_place = f"the {made.layout} layout has no place for this head's"
    try:
        read = read_gguf if made.layout == "gguf" else read_head
        found = assemble(read(made.data, made.tensors, like), like, {}, Path())
    except ModelError as error:
        raise UsageError(f"the {made.layout} layout cannot hold this head: {error}") from None
    for each in fields(HeadConfig):
        ours, theirs = getattr(config, each.name), getattr(found.config, each.name)
        if each.name != "layers" and ours != theirs:
            raise UsageError(f"{no_place} {each.name} ({ours}): it would be read as {theirs}")
    if wrong := [name for name in lost(layers, found.config.layers) if name != "tie_word_embeddings"]:
        raise UsageError(f"{no_place} layers' {', '.join(wrong)}")
    (ours, factor), (theirs, other) = rotary_frequencies(layers), rotary_frequencies(found.config.layers)
    if not np.allclose(ours, theirs, rtol=1e-5) or abs(factor - other) > 1e-5:
        raise UsageError(f"{no_place} layers' rope scaling")
    if d2t is None or found.d2t is None or not np.array_equal(d2t, found.d2t):
        if d2t is None and found.d2t is None:
            return
        raise UsageError(f"{no_place} d2t")


# ----------------------------------------------------------------------------------------------------------- tensors


def _converted(name: str, tensor: Tensor, kind: str) -> Tensor:
    """The tensor in another kind. Raises UsageError, naming it, for a value that float16 cannot hold."""
    if tensor.kind == kind and tensor.block_scale is None:
        return tensor
    values = tensor.f32()
    if kind == "F32":
        return Tensor.from_array(values)
    if kind == "BF16":
        return Tensor(tensor.shape, kind, round_bfloat16(values).reshape(-1).view(np.uint8))
    if kind == "F16":
        if not (np.abs(values) <= 65504).all():
            raise UsageError(f"tensor {name} holds values that float16 cannot: use bfloat16 or float32")
        return Tensor.from_array(values.astype(np.float16))
    try:
        data = pack_q8(quantise_q8(values)) if kind == "Q8_0" else pack_q4(quantise_q4(values))
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from None
    return Tensor(tensor.shape, kind, data)


def _maps(d2t: I64, vocabulary: int) -> dict[str, Tensor]:
    """d2t as offsets from the draft id, and t2d: whether a token of the target is in the draft vocabulary."""
    offsets = d2t - np.arange(len(d2t))
    return {"d2t": Tensor.from_array(offsets), "t2d": Tensor.from_array(np.isin(np.arange(vocabulary), d2t))}


def _renamed(tensors: Mapping[str, Tensor], *rules: tuple[str, str]) -> dict[str, Tensor]:
    """By the first rule (pattern, replacement) that fits."""
    out = {}
    for name, tensor in tensors.items():
        for pattern, to in rules:
            changed, count = re.subn(pattern, to, name)
            if count:
                name = changed
                break
        out[name] = tensor
    return out


# ------------------------------------------------------------------------------------------ speculators and SpecForge

_MTP_NAMES = (
    (r"^embedding_norm\.", "mtp_layers.0.token_layernorm."), (r"^hidden_norm\.", "mtp_layers.0.hidden_layernorm."),
    (r"^fc\.", "mtp_layers.0.input_proj."), (r"^model\.norm\.", "mtp_layers.0.final_layernorm."),
    (r"^model\.layers\.0\.", "mtp_layers.0."),
)  # fmt: skip
_BLOCK_NAMES = (
    (r"^markov_(gate|joint)\.", r"markov_head.\1_proj."), (r"^(markov_w[12])\.", r"markov_head.\1."),
    (r"^confidence\.", "confidence_head.proj."), (r"^model\.", ""),
)  # fmt: skip
_TARGETS = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
_RUN_BY = {"eagle3": ("llama", "qwen3"), "mtp": ("qwen3",)}  # layers that the package's own classes have
_CLASSES = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel",
            "mtp": "MTPDraftModel"}  # fmt: skip


def _speculators(
    config: HeadConfig, tensors: dict[str, Tensor], target: str | None, architecture: str | None
) -> HeadFiles:
    verifier = {"name_or_path": target, "architectures": [_TARGETS[architecture]] if architecture else []}
    spark = config.algorithm == "dflash" and (config.markov != "none" or config.confidence != "none")
    kind = "dspark" if spark else config.algorithm
    layers = config.layers
    if config.algorithm == "mtp":  # the target's, of which the head's layer is one
        layers = replace(layers, num_hidden_layers=config.target_layers)
    notices: tuple[str, ...] = ()
    guesses = 3 if kind == "mtp" else 7 if kind == "eagle3" else config.block_size - (not config.sample_from_anchor)
    data: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": max(1, guesses)}],
            "verifier": verifier,
        },
        "transformer_layer_config": to_hf(layers),
    }
    if (its := layers.architecture) not in _RUN_BY.get(kind, ("qwen3",)):
        notices = (f"the speculators package itself runs no {kind} heads with {its} layers",)
    if kind == "mtp":
        data |= {"num_nextn_predict_layers": 1}
        if config.draft_vocab_size != layers.vocab_size:
            data |= {"draft_vocab_size": config.draft_vocab_size}
            notices += ("only outpace runs mtp heads with a draft vocabulary",)
        return HeadFiles("speculators", data, _renamed(tensors, *_MTP_NAMES), notices)
    data |= {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
    inputs = [tap + 1 for tap in config.taps]
    if kind == "eagle3":
        data |= {"eagle_aux_hidden_state_layer_ids": inputs} | _norms(config)
        names = ((r"^hidden_norm\.", "layers.0.hidden_norm."), (r"^model\.", ""))
        return HeadFiles("speculators", data, _renamed(tensors, *names), notices)
    data |= {
        "aux_hidden_state_layer_ids": inputs,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.sliding_window_non_causal,
    }
    if spark:
        data |= {
            "markov_rank": config.markov_rank if config.markov != "none" else 0,
            "markov_head_type": config.markov if config.markov != "none" else "vanilla",
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "hidden_markov",
        }
    return HeadFiles("speculators", data, _renamed(tensors, *_BLOCK_NAMES), notices)


def _specforge(
    config: HeadConfig, tensors: dict[str, Tensor], target: str | None, architecture: str | None
) -> HeadFiles:
    """One flat config. The ids of tapped layers, where they are not those that every program assumes, are written as
    SGLang reads them."""
    data = to_hf(config.layers) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_norms(config),
    }
    rope = data.pop("rope_parameters")  # these programs know the older spelling
    data |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["rope_type"] == "default" else rope}
    notices: tuple[str, ...] = ()
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    usual = (1, config.target_layers // 2 - 1, config.target_layers - 4)
    if config.taps != usual or config.target_layers < 6:
        eagle["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
        notices = (
            "tapped layers are written as SGLang reads them, outputs of layers; vLLM reads them as inputs: give it the "
            "speculators layout",
        )
    names = ((r"^hidden_norm\.", "midlayer.hidden_norm."), (r"^model\.layers\.0\.", "midlayer."), (r"^model\.", ""))
    return HeadFiles("specforge", data | {"eagle_config": eagle}, _renamed(tensors, *names), notices)


def _norms(config: HeadConfig) -> dict[str, bool]:
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
    }


# --------------------------------------------------------------------------------------------------------------- GGUF

_NEXTN = {
    "fc": "nextn.eh_proj", "embedding_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm",
    "model.norm": "nextn.shared_head_norm", "model.embed_tokens": "nextn.embed_tokens",
    "lm_head": "nextn.shared_head_head",
}  # fmt: skip


def _gguf(
    config: HeadConfig, tensors: dict[str, Tensor], d2t: I64 | None, target: str | None, kind: str,
    tokenizer: dict[str, Any],
) -> HeadFiles:  # fmt: skip
    layers = config.layers
    nextn = config.algorithm == "mtp"
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, rest = name.rpartition(".")
        for part, heads in (("q", layers.num_attention_heads), ("k", layers.num_key_value_heads)):
            if not nextn and stem.endswith(f".{part}_proj"):
                tensor = tensor.select(interleaved_order(heads, layers.head_dim))
        rounded = kind not in ("Q8_0", "Q4_0") or tensor.shape[-1] % GROUP == 0
        its = kind if is_matrix(name, tensor.shape) and rounded else "F32"
        named[f"{_gguf_name(stem, config)}.{rest}"] = _converted(name, tensor, its)
    if nextn:
        data = to_gguf(replace(layers, num_hidden_layers=config.target_layers))
        prefix = data["general.architecture"] + "."
        data |= {prefix + "block_count": config.target_layers + 1, prefix + "nextn_predict_layers": 1}
    else:
        data = {re.sub(r"^llama\.", "eagle3.", key): value for key, value in to_gguf(layers).items()}
        data |= {
            "general.architecture": "eagle3",
            "eagle3.extract_layers": np.array([tap + 1 for tap in config.taps], np.int32),
            "eagle3.target_hidden_size": config.target_hidden_size,
            "eagle3.norm_before_residual": config.norm_before_residual,
        }
        if d2t is not None:
            named["d2t"] = Tensor.from_array(d2t)  # target ids themselves
        if layers.rope_scaling is not None and layers.rope_scaling.kind in ("llama3", "factors"):
            named[ROPE_FACTORS] = rope_factors(layers)
    data |= {"general.type": "model", "general.file_type": _FILE_TYPES[kind], "general.quantization_version": 2}
    if target:
        data["general.name"] = f"draft head for {target}"
    return HeadFiles("gguf", data | tokenizer, named)


def _gguf_name(stem: str, config: HeadConfig) -> str:
    """llama.cpp's name of a tensor, without .weight or .bias."""
    block = {ours: theirs for theirs, ours in BLOCK.items()}
    layer = config.target_layers if config.algorithm == "mtp" else 0
    if stem.startswith("model.layers.0."):
        return f"blk.{layer}.{block[stem.removeprefix('model.layers.0.')]}"
    if config.algorithm == "mtp":
        return f"blk.{layer}.{_NEXTN[stem]}"
    top = {ours: theirs.removesuffix(".weight") for theirs, ours in TOP.items()}
    return {"fc": "fc", "hidden_norm": "blk.0.attn_norm_2"}.get(stem) or top.get(f"{stem}.weight") or stem


def with_targets(
    config: HeadConfig, weights: Mapping[str, Tensor], d2t: I64 | None, shared: Mapping[str, Tensor]
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The head with some of the target's matrices as its own: those of `shared`, the whole embedding and the whole
    head, of which the draft vocabulary's rows are taken, under their names."""
    found = dict(weights)
    if EMBEDDING in shared:
        found[EMBEDDING] = shared[EMBEDDING]
    if HEAD in shared:
        found[HEAD] = shared[HEAD] if d2t is None else shared[HEAD].select(d2t)
    return replace(config, own_embedding=EMBEDDING in found, own_lm_head=HEAD in found), found


def _as_target(config: HeadConfig) -> ModelConfig:
    """A model of the target's sizes, as far as the head tells them."""
    layers = config.layers
    return replace(
        layers, num_hidden_layers=config.target_layers, hidden_size=config.target_hidden_size, layer_types=None,
        use_sliding_window=False,
    )  # fmt: skip
