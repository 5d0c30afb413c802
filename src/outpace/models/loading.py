"""From a model's files to a configuration and weights under canonical names (names.py), checked to the last tensor.

Neighbours: config.py reads sizes, weights/ reads bytes, this module knows how checkpoints spell a decoder's tensors:
the Hugging Face names, transformers 5's fused experts, and llama.cpp's GGUF names. Values are never changed, only
named, sliced and, in llama GGUF files, put back in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..config import ModelConfig, RopeScaling
from ..config_fields import Reader
from ..types import I64, ModelError, UsageError
from ..weights.gguf import GGUFFile
from ..weights.safetensors import read_safetensors
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap
from .gguf_names import BLOCK, EXPERTS, ROPE_FACTORS, TOP, half_split_order
from .names import EMBEDDING, HEAD, expected_tensors

HEAD_PREFIXES = ("mtp.", "model.mtp_layers.")  # tensors of a head inside a safetensors model
_SHOWN = 8  # names in an error message


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for a backend, which takes the tensors out of `weights`.

    path: the GGUF file or the folder. metadata: the GGUF file's, None for safetensors. head: whether a draft head is
    inside, which heads/loading.py reads. notices: what the user should know, one line each.
    """

    config: ModelConfig
    weights: WeightMap
    path: Path
    format: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any] | None = None
    head: bool = False
    notices: tuple[str, ...] = ()


def load_model(path: str | Path) -> LoadedModel:
    """Opens a .gguf file, a Hugging Face folder (config.json and safetensors) or a folder with one .gguf file.

    Nothing is decoded yet. Raises UsageError when there is no such path, ModelError when the model is damaged,
    incomplete or of a kind that is not supported.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            found = "several .gguf files; name one of them" if files else "neither config.json nor a .gguf file"
            raise ModelError(f"{path}: holds {found}")
        path = files[0]
    if path.is_dir():
        return _load_folder(path)
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: is not a .gguf file; for safetensors name the folder that also holds config.json")
    return _load_gguf(path)


def check_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises one ModelError that names every missing, unknown and wrongly shaped tensor."""
    if found := mismatches(expected_tensors(config), tensors):
        raise ModelError(f"{where}: tensors do not fit the {config.architecture} configuration: {found}")


def mismatches(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> str:
    """What is missing, unknown or wrongly shaped among the tensors, as text with the first names of each; "" if none
    is."""
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = (
        _listing("missing", [name for name in expected if name not in tensors]),
        _listing("not known for this architecture", [name for name in tensors if name not in expected]),
        _listing("of the wrong shape", wrong),
    )
    return "; ".join(filter(None, problems))


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(name[:120] for name in names[:_SHOWN])}{more}"


# --------------------------------------------------------------------------------------------- Hugging Face folders


def _load_folder(folder: Path) -> LoadedModel:
    config = ModelConfig.from_hf(folder)
    tensors = read_safetensors(folder)
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD_PREFIXES)}
    head, tensors = len(body) < len(tensors), body
    # Old checkpoints store what rotary.py computes.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    split_fused_experts(config, tensors)
    notices: list[str] = []
    if config.tie_word_embeddings and HEAD in tensors and not _settle_head(tensors):
        config = replace(config, tie_word_embeddings=False)
        notices.append(f"{folder}: tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}: both are used")
    check_tensors(config, tensors, str(folder))
    return LoadedModel(config, WeightMap(tensors), folder, "safetensors", head=head, notices=tuple(notices))


def split_fused_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """mlp.experts.gate_up_proj [E, 2F, H] and mlp.experts.down_proj [E, H, F] become one matrix an expert."""
    inner = np.arange(config.expert_ffn_size)
    for layer in range(config.num_hidden_layers if config.num_experts else 0):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up, down = tensors.get(prefix + "gate_up_proj"), tensors.get(prefix + "down_proj")
        # Other shapes stay as they are: check_tensors reports them.
        if gate_up is not None and gate_up.shape == (config.num_experts, 2 * len(inner), config.hidden_size):
            del tensors[prefix + "gate_up_proj"]
            for expert, matrix in enumerate(gate_up.unstack()):
                tensors[f"{prefix}{expert}.gate_proj.weight"] = matrix.select(inner)
                tensors[f"{prefix}{expert}.up_proj.weight"] = matrix.select(inner + len(inner))
        if down is not None and down.shape == (config.num_experts, config.hidden_size, len(inner)):
            del tensors[prefix + "down_proj"]
            for expert, matrix in enumerate(down.unstack()):
                tensors[f"{prefix}{expert}.down_proj.weight"] = matrix


def _settle_head(tensors: dict[str, Tensor]) -> bool:
    """The head in a checkpoint whose config says it has none of its own, settled as transformers does: a missing
    embedding takes its values, equal values are dropped. Returns False where they differ: then both are used."""
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding is None:
        tensors[EMBEDDING] = head
    elif head.shape != embedding.shape or not _equal(head, embedding):
        return False
    del tensors[HEAD]
    return True


def _equal(a: Tensor, b: Tensor) -> bool:
    return (a.kind == b.kind and np.array_equal(a.data, b.data)) or np.array_equal(a.f32(), b.f32())


# ------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


def _load_gguf(path: Path) -> LoadedModel:
    file = GGUFFile.open(path)
    if str(file.metadata.get("split.count", 1)) != "1":
        raise ModelError(f"{path}: is one part of a split model; merge the parts into one file first")
    try:
        layers, metadata = nextn_layer(file.metadata)
        head = metadata is not file.metadata
        tensors = {name: t for name, t in file.tensors.items() if not (head and _block(name) >= layers)}
        config = ModelConfig.from_gguf(metadata, {name: tensor.shape for name, tensor in tensors.items()})
        if ROPE_FACTORS in tensors:
            config = with_rope_factors(config, tensors.pop(ROPE_FACTORS))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for canonical, part in _canonical(config, name, tensor):
            if canonical in named:
                raise ModelError(f"{path}: tensor {name[:120]!r} is there twice, under two names")
            named[canonical] = part
    check_tensors(config, named, str(path))
    return LoadedModel(config, WeightMap(named, _orders(config, named)), path, "gguf", file.metadata, head)


def nextn_layer(metadata: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """The number of the model's layers in GGUF metadata, which is the index of a nextn head's, and the metadata of the
    model without it; the very same metadata where there is none."""
    name = Reader(metadata).text("general.architecture", "")
    read = Reader(metadata, name + ".")
    count, blocks = read.integer("nextn_predict_layers", 0), read.integer("block_count", field="num_hidden_layers")
    if count == 0:
        return blocks, metadata
    if count >= blocks:
        raise ModelError(f"{name}.nextn_predict_layers {count} leaves none of the {blocks} layers to the model")
    changed = {f"{name}.block_count": blocks - count, f"{name}.nextn_predict_layers": 0}
    return blocks - count, {**metadata, **changed}


def _block(name: str) -> int:
    """The number of a GGUF tensor's layer, -1 outside of layers."""
    match = re.match(r"blk\.(\d{1,4})\.", name)
    return int(match[1]) if match else -1


def _orders(config: ModelConfig, names: Iterable[str]) -> dict[str, I64]:
    """llama GGUF files hold the rows of q and k in another order than the checkpoints do."""
    if config.architecture != "llama":
        return {}
    q, k = (half_split_order(n, config.head_dim) for n in (config.num_attention_heads, config.num_key_value_heads))
    part = {"self_attn.q_proj": q, "self_attn.k_proj": k}
    split = {name: name.rsplit(".", 1)[0].split(".", 3)[-1] for name in names}
    return {name: part[which] for name, which in split.items() if which in part}


def with_rope_factors(config: ModelConfig, tensor: Tensor) -> ModelConfig:
    """Llama 3's scaling, which GGUF stores as one divisor for each frequency."""
    if config.rope_scaling is not None:
        raise ModelError(f"{ROPE_FACTORS} together with {config.rope_scaling.kind} scaling is not supported")
    if tensor.shape != (config.head_dim // 2,):
        raise ModelError(f"{ROPE_FACTORS} must have shape {[config.head_dim // 2]}, got {list(tensor.shape)}")
    factors = tuple(float(factor) for factor in tensor.f32())
    return replace(config, rope_scaling=RopeScaling(kind="factors", factors=factors))


def _canonical(config: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor under its canonical name, or its parts. Names that are not known stay, for check_tensors to report."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        yield TOP.get(name, name), tensor
        return
    layer, part, kind = match.groups()
    prefix = f"model.layers.{int(layer)}."
    if part in EXPERTS and kind == "weight" and len(tensor.shape) == 3:
        for expert, matrix in enumerate(tensor.unstack()):
            yield f"{prefix}mlp.experts.{expert}.{EXPERTS[part]}.weight", matrix
        return
    if part not in BLOCK:
        yield name, tensor
        return
    if part == "ffn_gate_inp_shexp" and tensor.shape == (config.hidden_size,):
        tensor = replace(tensor, shape=(1, config.hidden_size))
    yield f"{prefix}{BLOCK[part]}.{kind}", tensor
