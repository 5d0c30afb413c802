"""From a head's files to its description and its weights, checked to the last tensor and against its target.

Neighbours: formats.py knows how each public format spells a head, config.py what a head is; reference.py and the native
core take the result. A head that does not fit its target, or a tensor that nobody asked for, is an error: a head that
loads drafts the way its makers meant, or says which of the differing public conventions it assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..config_fields import show
from ..json_file import read_json
from ..models.loading import HEAD_PREFIXES, mismatches, nextn_layer
from ..models.names import EMBEDDING, HEAD
from ..types import I64, ModelError, UsageError
from ..weights.gguf import GGUFFile
from ..weights.safetensors import read_safetensors
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap
from .config import HeadConfig, head_tensors
from .formats import Found, read_gguf, read_head

CONVENTIONS = (  # what public files leave open, so that a caller may say it
    "taps", "d2t", "norm_output", "norm_before_residual", "concat", "sample_from_anchor", "sliding_window_non_causal",
)  # fmt: skip
ASKED_FOR = "asked for"  # where such a value is from
_LEFT_BY_TRAINERS = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head ready for a drafter, which takes the tensors out of `weights`.

    weights: by the names of config.head_tensors, undecoded. d2t: int64 [draft vocabulary], ascending target ids, None
    where the vocabularies are the same; d2t_in_file: whether the file counts it as "offset" (from the draft id) or
    "absolute". origins: convention -> where its value is from. bytes: what the head's own tensors take.
    """

    config: HeadConfig
    weights: WeightMap
    d2t: I64 | None
    d2t_in_file: str
    path: Path
    format: str
    origins: Mapping[str, str]
    bytes: int
    notices: tuple[str, ...] = ()


def load_head(path: str | Path, target: ModelConfig, *, conventions: Mapping[str, Any] | None = None) -> LoadedHead:
    """Opens a head: a folder or a .safetensors file with its config.json beside it, a .gguf file, or the model itself
    where the head is inside it.

    conventions: values for some of CONVENTIONS that replace the file's or the format's. Raises UsageError for a path
    that is not there or an unknown convention, ModelError, naming file, field and tensors, for a head that is
    damaged, incomplete, of a kind that is not supported or of another target.
    """
    path, wanted = Path(path), dict(conventions or {})
    if unknown := [name for name in wanted if name not in CONVENTIONS]:
        raise UsageError(f"convention {show(unknown[0])} is not known; known: {', '.join(CONVENTIONS)}")
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    try:
        return assemble(_read(path, target), target, wanted, path)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def open_target(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and tensors, by the file's names, of a model that may have a head inside; without the head's.

    For a head's sake alone: nothing is checked, see models/loading.py. Raises UsageError for a path that is not there,
    ModelError for a configuration that is not supported.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_dir() and not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.suffix.lower() != ".gguf":
        config = ModelConfig.from_hf(path)
        tensors = read_safetensors(path)
        return config, {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD_PREFIXES)}
    file = GGUFFile.open(path)
    layers, metadata = nextn_layer(file.metadata)
    inside = f"blk.{layers}." if metadata is not file.metadata else "\0"
    tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith(inside)}
    return ModelConfig.from_gguf(metadata, {name: tensor.shape for name, tensor in tensors.items()}), tensors


def borrowed(head: HeadConfig, target: WeightMap, config: ModelConfig) -> dict[str, Tensor]:
    """The target's embedding and head under their names, where the head has none of its own. They stay in the target's
    map. Raises ModelError when they are not there or not as expected."""
    tensors = {}
    sources = {} if head.own_embedding else {EMBEDDING: EMBEDDING}
    if not head.own_lm_head:
        sources[HEAD] = EMBEDDING if config.tie_word_embeddings else HEAD
    for name, source in sources.items():
        tensors[name] = target.take_tensor(source)
        target.put(source, tensors[name])
        if tensors[name].shape != (config.vocab_size, head.layers.hidden_size):
            raise ModelError(f"the target's {source} {list(tensors[name].shape)} does not fit the head")
    return tensors


def assemble(found: Found, target: ModelConfig, wanted: Mapping[str, Any], path: Path) -> LoadedHead:
    """What a file says, checked. wanted: conventions asked for. Raises as `load_head`, without the file's name."""
    for name, value in wanted.items():
        if name == "d2t":
            if value not in ("offset", "absolute"):
                raise UsageError(f"d2t must be offset or absolute, got {show(value)}")
            found.d2t = value
            continue
        if name == "taps" and not isinstance(value, (list, tuple)):
            raise UsageError(f"taps must be a list of layers, got {show(value)}")
        found.settle(name, tuple(value) if name == "taps" else value, ASKED_FOR)
    tensors = found.tensors
    notices = [f"{name}: left out, the target's own is used" for name in _LEFT_BY_TRAINERS if name in tensors]
    for name in [*_LEFT_BY_TRAINERS, *(name for name in tensors if name.endswith(".rotary_emb.inv_freq"))]:
        tensors.pop(name, None)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    fields: dict[str, Any] = {"target_hidden_size": found.layers.hidden_size} | found.fields
    config = HeadConfig(
        layers=found.layers,
        target_layers=target.num_hidden_layers,
        own_embedding=EMBEDDING in tensors,
        own_lm_head=HEAD in tensors,
        **fields,
    )
    _check_target(config, found, target)
    if wrong := mismatches(head_tensors(config), tensors):
        raise ModelError(f"tensors do not fit the {found.format} head: {wrong}")
    ids = _draft_ids(config, found.d2t, d2t, t2d)
    if ids is not None:
        found.origins["d2t"] = ASKED_FOR if "d2t" in wanted else f"default of {found.format}"
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1 and not np.isfinite(tensor.f32()).all():
            raise ModelError(f"tensor {name} holds values that are not finite")
    size = sum(tensor.nbytes for tensor in tensors.values())
    return LoadedHead(
        config, WeightMap(tensors), ids, found.d2t, path, found.format, found.origins, size, tuple(notices)
    )


def _read(path: Path, target: ModelConfig) -> Found:
    if path.is_dir() and not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.suffix.lower() == ".gguf":
        file = GGUFFile.open(path)
        return read_gguf(file.metadata, file.tensors, target)
    folder = path if path.is_dir() else path.parent
    tensors = read_safetensors(path)
    config = folder / "config.json"
    return read_head(read_json(config, missing={}), tensors, target)


def _check_target(config: HeadConfig, found: Found, target: ModelConfig) -> None:
    """Raises ModelError unless the head was made for a target of these sizes."""
    layers = config.target_layers if found.target_layers is None else found.target_layers
    pairs = (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.layers.vocab_size, target.vocab_size),
        ("layers", layers, target.num_hidden_layers),
    )
    wrong = [f"{what} {its}, not {ours}" for what, its, ours in pairs if its != ours]
    if wrong:
        raise ModelError(f"the head is for another target: {', '.join(wrong)}")
    if config.layers.hidden_size != target.hidden_size and not (config.own_embedding and config.own_lm_head):
        raise ModelError(
            f"the head is {config.layers.hidden_size} wide and its target {target.hidden_size}, so it must bring its "
            f"own {EMBEDDING} and {HEAD}"
        )


def _draft_ids(config: HeadConfig, kind: str, d2t: Tensor | None, t2d: Tensor | None) -> I64 | None:
    """d2t as ascending target ids, None where the draft vocabulary is the target's."""
    size, vocabulary = config.draft_vocab_size, config.layers.vocab_size
    if d2t is None:
        if size != vocabulary:
            raise ModelError(f"the draft vocabulary has {size} of the target's {vocabulary} tokens, but d2t is missing")
        return None
    if d2t.shape != (size,):
        raise ModelError(f"tensor d2t must have shape {[size]}, got {list(d2t.shape)}")
    values = d2t.ints()
    ids = values + np.arange(size) if kind == "offset" else values
    for name, wrong in (
        (f"a target id outside 0 .. {vocabulary - 1}", (ids < 0) | (ids >= vocabulary)),
        ("target ids that do not ascend", np.diff(ids, prepend=-1) <= 0),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ModelError(f"tensor d2t, read as {kind} ids, gives {name}: {int(ids[at])} at {at}")
    if t2d is not None:
        if t2d.shape != (vocabulary,):
            raise ModelError(f"tensor t2d must have shape {[vocabulary]}, got {list(t2d.shape)}")
        if not np.array_equal(np.flatnonzero(t2d.ints()), ids):
            raise ModelError("tensors t2d and d2t name different tokens")
    return None if size == vocabulary else ids
