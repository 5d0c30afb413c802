"""Reads and writes safetensors files and folders (specification: README of the safetensors project, "Format").

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), and the
tensors' bytes without holes or overlaps. A folder holds model.safetensors, or shards and an index that says which
shard holds which tensor. FP8 weights come back together with their scales as one Tensor. Nothing in a file is
believed before it is checked. Knows no model: see weight_map.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import ModelError, UsageError
from .files import map_file, refuse_pickle, replacing
from .tensor import Tensor, byte_size

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_INDEX = 100_000_000
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8", "I16", "I32", "I64", "U8", "BOOL")
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # both multiply: "inv" is the inverse of the factor used when rounding


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Name -> tensor (a view of the mapped file) of a .safetensors file or of a folder, FP8 scales joined.

    Raises ModelError naming file and tensor when anything is missing, damaged or not supported.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _join_scales(path, _read_folder(path))
    refuse_pickle(path)
    return _join_scales(path, _read_file(path))


# ------------------------------------------------------------------------------------------------------ one file


def _read_file(path: Path) -> dict[str, Tensor]:
    data = map_file(path)
    try:
        return _read_tensors(data)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _read_tensors(data: NDArray[np.uint8]) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise ModelError(
            f"header of {length} bytes does not fit in a file of {len(data)}: not safetensors, or truncated"
        )
    header = parse_object(data[8 : 8 + length].tobytes(), "header")
    body = data[8 + length :]
    tensors = {}
    spans = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, kind, begin, end = _tensor_info(info, len(body))
            tensors[name] = Tensor(shape, kind, body[begin:end])
        except ModelError as error:
            raise ModelError(f"tensor {name!r:.120}: {error}") from None
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise ModelError(f"tensor {name!r:.120}: byte {begin} of the data {what} (expected {at})")
        at = end
    if at != len(body):
        raise ModelError(f"the tensors end at byte {at} of the data, which has {len(body)}")
    return tensors


def _tensor_info(info: Any, size: int) -> tuple[tuple[int, ...], str, int, int]:
    """Shape, kind and the bytes [begin, end) of one header entry, for data of `size` bytes."""
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise ModelError("its entry must have dtype, shape and data_offsets")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if kind not in DTYPES:
        raise ModelError(f"dtype {kind!r:.40} is not supported; supported are {', '.join(DTYPES)}")
    if not _naturals(shape):
        raise ModelError(f"shape {shape!r:.80} is not a list of whole numbers")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise ModelError(f"data_offsets {offsets!r:.80} do not lie in the {size} bytes of data: truncated or damaged")
    needed = byte_size(kind, tuple(shape))
    if needed != offsets[1] - offsets[0]:
        raise ModelError(f"{kind} of shape {shape} needs {needed} bytes, data_offsets hold {offsets[1] - offsets[0]}")
    return tuple(shape), kind, offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ModelError naming `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON: {str(error) or 'nested too deeply':.120}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} is not a JSON object")
    return value


# ------------------------------------------------------------------------------------------------------ a folder


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if os.path.isfile(folder / SINGLE):
        return _read_file(folder / SINGLE)
    if os.path.isfile(folder / INDEX):
        return _read_shards(folder, folder / INDEX)
    for file in sorted(folder.glob("*model*")):
        refuse_pickle(file)
    raise ModelError(f"{folder}: holds neither {SINGLE} nor {INDEX}")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    raw = map_file(index)
    if len(raw) > MAX_INDEX:
        raise ModelError(f"{index}: an index of {len(raw)} bytes is damaged")
    shard_of = parse_object(raw.tobytes(), f"{index}: the index").get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ModelError(f"{index}: weight_map is not an object that names the shards' tensors")
    for name, shard in shard_of.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or Path(shard).name != shard
            or "\\" in shard
        ):
            raise ModelError(
                f"{index}: tensor {name!r:.120} lies in {shard!r:.80}, which is not a plain .safetensors name"
            )
    tensors: dict[str, Tensor] = {}
    found_in: dict[str, str] = {}
    for shard in sorted(set(shard_of.values())):
        if not os.path.isfile(folder / shard):
            raise ModelError(f"{index}: shard {shard!r:.80} is missing from the folder; fetch the model again")
        for name, tensor in _read_file(folder / shard).items():
            if name in tensors:
                raise ModelError(f"{folder}: tensor {name!r:.120} is in both {found_in[name]} and {shard}")
            tensors[name], found_in[name] = tensor, shard
    for name, shard in shard_of.items():
        if found_in.get(name) != shard:
            raise ModelError(f"{index}: tensor {name!r:.120} is not in its shard {shard}")
    return tensors


def _join_scales(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each FP8 `x` takes `x_scale_inv` or `x_scale` as its block_scale; the scales are no longer listed."""
    joined = dict(tensors)
    for name, tensor in tensors.items():
        scales = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in tensors]
        if not tensor.kind.startswith("F8_") or not scales:
            continue
        if len(scales) > 1:
            raise ModelError(f"{path}: tensor {name!r:.120} has two scales: {' and '.join(scales)}")
        try:
            joined[name] = replace(tensor, block_scale=joined.pop(scales[0]))
        except ModelError as error:
            raise ModelError(f"{path}: tensor {name!r:.120}: {error}") from None
    return joined


# ------------------------------------------------------------------------------------------------------- writing


def write_safetensors(
    path: str | Path, tensors: Mapping[str, NDArray[Any] | Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one file: all of it, or nothing. Arrays keep their dtype; a Tensor writes its bytes as they are.

    metadata: default {"format": "pt"}, which other readers ask for. Raises UsageError for what the format cannot hold,
    ModelError when the file cannot be written.
    """
    found = {name: value if isinstance(value, Tensor) else Tensor.from_array(value) for name, value in tensors.items()}
    for name, tensor in found.items():
        if tensor.kind not in DTYPES or tensor.block_scale is not None or name == "__metadata__":
            raise UsageError(f"tensor {name!r}: safetensors cannot hold {tensor.kind}, or a tensor of that name")
    # Wide numbers first: then every tensor is aligned to the size of its numbers.
    order = sorted(found, key=lambda name: (-found[name].nbytes // max(1, math.prod(found[name].shape)), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name in order:
        tensor = found[name]
        header[name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with replacing(Path(path)) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            file.write(np.ascontiguousarray(found[name].data).data)
