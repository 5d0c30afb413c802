"""A model written as a quantised GGUF file, which outpace and llama.cpp's reader read.

The file holds what loading the model with 8-bit arithmetic would hold: matrices in Q8_0 blocks by quantise_q8, so that
model and file give the same bits; or, at half the size and less exact, in Q4_0 blocks by quantise_q4. Vectors and
routers stay float32, and so do matrices whose rows are no multiple of 32.

Neighbours: loading.py finds the tensors, gguf_names.py spells them, config_gguf.py and text/export.py write the
metadata, weights/gguf.py the bytes. Rows are quantised a few at a time while they are written: memory does not grow
with the model.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..config_gguf import to_gguf
from ..text.export import tokenizer_metadata
from ..types import I64, CapacityError, ModelError, UsageError
from ..weights.formats import CHUNK, GROUP, pack_q4, pack_q8, quantise_q4, quantise_q8
from ..weights.gguf import GGUFFile, Planned, gguf_size, write_gguf
from ..weights.tensor import Tensor
from .gguf_names import BLOCK, EXPERTS, ROPE_FACTORS, TOP, interleaved_order
from .loading import LoadedModel
from .names import expected_tensors
from .rotary import rotary_frequencies

Target = Literal["q8", "q4"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all

_FILE_TYPES: dict[Target, int] = {"q8": 7, "q4": 2}  # general.file_type: mostly Q8_0, mostly Q4_0
_SENSITIVE = ("token_embd.weight", "output.weight")  # 8 bits also in a q4 file: rounding them costs most
_ELSEWHERE = {  # fields that are compared by their effect, or settled by _end_tokens
    "bos_token_id", "eos_token_ids", "pad_token_id", "rope_scaling", "use_sliding_window", "sliding_window",
    "layer_types", "max_window_layers", "dense_layers", "norm_topk_prob",
}  # fmt: skip
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written. kinds: how many tensors of each. notices: what the user should know, one line each."""

    path: Path
    bytes: int
    kinds: Mapping[str, int]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """One tensor of the new file: matrices one below the other (experts), each with its rows in a new order or None."""

    shape: tuple[int, ...]
    parts: list[tuple[Tensor, I64 | None]]


def export_gguf(
    loaded: LoadedModel, to: Target, out: str | Path, *, force: bool = False, progress: Progress | None = None
) -> Exported:
    """Writes the model to `out`, a .gguf file: all of it, or nothing. Takes the tensors out of `loaded.weights`.

    force: replace a file that is there. Raises UsageError for a target that cannot be, CapacityError when the disk is
    too full, ModelError for a model that GGUF cannot hold or that cannot be quantised (naming the tensor).
    """
    out = Path(out)
    if to not in get_args(Target):
        raise UsageError(f"the target must be one of {', '.join(get_args(Target))}, got {to!r}")
    _check_target(loaded.path, out, force)
    metadata: dict[str, Any]
    if loaded.format == "gguf":
        file = GGUFFile.open(loaded.path)
        sources = {name: _from_gguf(tensor) for name, tensor in file.tensors.items()}
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
        notices = []
    else:
        sources = _from_folder(loaded)
        metadata = _folder_metadata(loaded, {name: source.shape for name, source in sources.items()})
        notices = _end_tokens(loaded.config, metadata)
    kinds = {name: _kind(name, source.shape, to) for name, source in sources.items()}
    twice = Counter(
        part.kind for name, s in sources.items() for part, _ in s.parts[:1] if _rounded_twice(part.kind, kinds[name])
    )
    if twice:
        found = ", ".join(f"{kind} x{count}" for kind, count in twice.most_common())
        metadata["outpace.requantised_from"] = found
        notices.append(f"re-quantised: {found} were rounded before, so the new file is further from the original model")
    metadata |= {"general.file_type": _FILE_TYPES[to], "general.quantization_version": 2}
    total = sum(Planned(source.shape, kinds[name], list).nbytes for name, source in sources.items())
    done = _Counter(total, progress)
    plan = {
        name: Planned(source.shape, kinds[name], _pieces(name, source, kinds[name], done))
        for name, source in sources.items()
    }
    size = gguf_size(metadata, plan)
    check_space(out, size)
    write_gguf(out, metadata, plan)
    return Exported(out, size, Counter(kinds.values()), tuple(notices))


# ---------------------------------------------------------------------------------------------------------- checks


def _check_target(source: Path, out: Path, force: bool) -> None:
    if out.suffix.lower() != ".gguf":
        raise UsageError(f"{out}: the file to write must be named .gguf")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    if not os.path.lexists(out):
        return
    if out.exists() and (os.path.samefile(out, source)):
        raise UsageError(f"{out} is the model itself; write to another file")
    if not out.is_file():
        raise UsageError(f"{out} is there and not a file; write to another name")
    if not force:
        raise UsageError(f"{out} is there already; --force replaces it")


def check_space(out: Path, size: int) -> None:
    """Raises CapacityError unless the disk that `out` will lie on has room for so many bytes."""
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise CapacityError(
            f"not enough disk space in {out.parent}: {size / 1e6:.0f} MB needed, {(size - free) / 1e6:.0f} MB missing"
        )


# ---------------------------------------------------------------------------------------------------------- tensors


def _from_gguf(tensor: Tensor) -> _Source:
    parts = tensor.unstack() if len(tensor.shape) == 3 else [tensor]
    return _Source(tensor.shape, [(part, None) for part in parts])


def _from_folder(loaded: LoadedModel) -> dict[str, _Source]:
    """The model's tensors under llama.cpp's names and in its order: those outside the layers first."""
    config = loaded.config
    tops = {ours: theirs for theirs, ours in TOP.items()}
    blocks = {ours: theirs for theirs, ours in BLOCK.items()}
    experts = {ours: theirs for theirs, ours in EXPERTS.items()}
    outer: dict[str, _Source] = {}
    layers: dict[str, _Source] = {}
    for name in expected_tensors(config):
        tensor = loaded.weights.take_tensor(name)
        if name in tops:
            outer[tops[name]] = _Source(tensor.shape, [(tensor, None)])
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        module, kind = rest.rsplit(".", 1)
        if module.startswith("mlp.experts."):
            part = f"blk.{layer}.{experts[module.split('.')[-1]]}.weight"
            stack = layers.setdefault(part, _Source((config.num_experts, *tensor.shape), []))
            stack.parts.append((tensor, None))
            continue
        order, shape = None, tensor.shape
        if config.architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            order = interleaved_order(heads, config.head_dim)
        if module == "mlp.shared_expert_gate":
            shape = shape[1:]
        layers[f"blk.{layer}.{blocks[module]}.{kind}"] = _Source(shape, [(tensor, order)])
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors = rope_factors(config)
        outer[ROPE_FACTORS] = _Source(factors.shape, [(factors, None)])
    return outer | layers


def rope_factors(config: ModelConfig) -> Tensor:
    """llama3's scaling as GGUF has it: a divisor for each frequency, float32 [head_dim / 2]."""
    scaled, _ = rotary_frequencies(config)
    fields = {name: getattr(config, name) for name in config.__slots__}
    plain, _ = rotary_frequencies(ModelConfig(**fields | {"rope_scaling": None}))
    return Tensor.from_array(plain / scaled)


def _kind(name: str, shape: tuple[int, ...], to: Target) -> str:
    if len(shape) < 2 or name.endswith(_ROUTERS) or shape[-1] % GROUP:
        return "F32"
    return "Q8_0" if to == "q8" or name in _SENSITIVE else "Q4_0"


def _rounded_twice(source: str, target: str) -> bool:
    """Whether the source was quantised and its values change once more."""
    return source.startswith(("Q", "IQ", "F8")) and target not in ("F32", source)


class _Counter:
    """Bytes written so far, told to whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


def _pieces(name: str, source: _Source, kind: str, done: _Counter) -> Callable[[], Iterator[NDArray[np.uint8]]]:
    """The tensor's bytes in its new kind, some rows at a time."""

    def pieces() -> Iterator[NDArray[np.uint8]]:
        for tensor, order in source.parts:
            count = tensor.shape[0]
            step = max(1, CHUNK // max(1, tensor.shape[-1])) if len(tensor.shape) > 1 else count
            for at in range(0, count, step):
                end = min(at + step, count)
                rows = np.arange(at, end) if order is None else order[at:end]
                try:
                    piece = _converted(tensor.select(rows), kind)
                except ModelError as error:
                    raise ModelError(f"tensor {name}: {error}") from None
                yield piece
                done.add(piece.nbytes)

    return pieces


def _converted(rows: Tensor, kind: str) -> NDArray[np.uint8]:
    if rows.kind == kind and rows.block_scale is None:
        return rows.data
    values = rows.f32()
    if kind == "Q8_0":
        return pack_q8(quantise_q8(values))
    if kind == "Q4_0":
        return pack_q4(quantise_q4(values))
    return Tensor.from_array(values).data


# --------------------------------------------------------------------------------------------------------- metadata


def _folder_metadata(loaded: LoadedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    config, folder = loaded.config, loaded.path
    try:
        metadata = to_gguf(config)
        metadata |= {"general.type": "model", "general.name": folder.resolve().name}
        metadata |= tokenizer_metadata(folder, config.vocab_size)
        missing = lost(config, ModelConfig.from_gguf(metadata, shapes))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    if missing:
        raise ModelError(f"{folder}: GGUF has no place for this model's {', '.join(missing)}")
    return metadata


def lost(config: ModelConfig, read: ModelConfig) -> list[str]:
    """The fields that differ in the configuration that a new file would be read with, by their effect. Ids of tokens
    and llama3's rope scaling, which GGUF keeps elsewhere, are not compared."""

    def plain(value: object) -> object:
        return np.float32(value) if isinstance(value, float) else value

    names = [name for name in config.__slots__ if name not in _ELSEWHERE]
    missing = [name for name in names if plain(getattr(config, name)) != plain(getattr(read, name))]
    layers = range(config.num_hidden_layers)
    if any(config.window(layer) != read.window(layer) for layer in layers):
        missing.append("sliding window")
    if any(config.is_moe(layer) != read.is_moe(layer) for layer in layers):
        missing.append("dense layers")
    if config.num_experts and config.norm_topk_prob != read.norm_topk_prob:
        missing.append("norm_topk_prob")
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        (ours, factor), (theirs, other) = rotary_frequencies(config), rotary_frequencies(read)
        if not np.allclose(ours, theirs, rtol=1e-5) or abs(factor - other) > 1e-5:
            missing.append("rope scaling")
    return missing


def _end_tokens(config: ModelConfig, metadata: dict[str, Any]) -> list[str]:
    """Completes the ids of special tokens by those of config.json and generation_config.json."""
    prefix = "tokenizer.ggml."
    first = metadata.get(prefix + "eos_token_id")
    ends = [*dict.fromkeys(([] if first is None else [first]) + list(config.eos_token_ids))]
    metadata.update({f"{prefix}{name}_token_id": end for name, end in zip(("eos", "eot", "eom"), ends, strict=False)})
    if config.pad_token_id is not None:
        metadata.setdefault(prefix + "padding_token_id", config.pad_token_id)
    # A template that writes the first token's text must not find one that the folder's tokenizer does not have.
    template = metadata.get("tokenizer.chat_template", "")
    if config.bos_token_id is not None and "bos_token" not in template:
        metadata.setdefault(prefix + "bos_token_id", config.bos_token_id)
    return [f"GGUF names three end tokens at most: {ends[3:]} are left out"] if ends[3:] else []
