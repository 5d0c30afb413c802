"""A model's weights by name. The loader takes each tensor out of the map; what is left at the end was not understood.

Neighbours: gguf.py and safetensors.py read the files; tensor.py decodes. Names are the file's own: the model's loader
renames them.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import F32, I64, ModelError, UsageError
from .gguf import GGUFFile
from .safetensors import read_safetensors
from .tensor import Tensor


class WeightMap:
    """Name -> tensor, decoded only when taken."""

    def __init__(self, tensors: Mapping[str, Tensor], orders: Mapping[str, I64] | None = None) -> None:
        """orders: permutations of some tensors' rows, carried out when the tensor is taken."""
        self._tensors = dict(tensors)
        self._orders = dict(orders or {})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any] | tuple[Any, tuple[int, ...]]]) -> WeightMap:
        """From arrays, or pairs of data (any sequence of numbers, row-major) and shape.

        Floats of any width and plain Python numbers become float32; integer arrays stay integers. Raises UsageError
        when data and shape do not fit.
        """
        return cls({name: _tensor(name, value) for name, value in tensors.items()})

    @classmethod
    def from_safetensors(cls, path: str | Path) -> WeightMap:
        """From a .safetensors file or a folder (single file or shards with an index). Raises ModelError."""
        return cls(read_safetensors(path))

    @classmethod
    def from_gguf(cls, path: str | Path) -> WeightMap:
        """From a GGUF file, under its own names (blk.0.attn_q.weight ...). Raises ModelError."""
        return cls(GGUFFile.open(path).tensors)

    def take(self, name: str) -> tuple[F32, tuple[int, ...]]:
        """Removes a tensor: its values as a float32 array of its shape (perhaps a read-only view), and the shape.

        Raises ModelError when there is none of that name, or it holds integers.
        """
        tensor = self.take_tensor(name)
        try:
            return tensor.f32(), tensor.shape
        except ModelError as error:
            raise ModelError(f"tensor {name!r}: {error}") from None

    def take_tensor(self, name: str) -> Tensor:
        """Removes a tensor and returns it undecoded. Raises ModelError when there is none of that name."""
        if name not in self._tensors:
            close = difflib.get_close_matches(name, self._tensors, n=3, cutoff=0.6)
            hint = f"the closest are {', '.join(close)}" if close else f"the model has {len(self)} others, none close"
            raise ModelError(f"tensor {name!r} is missing from the weights; {hint}")
        tensor, order = self._tensors.pop(name), self._orders.pop(name, None)
        return tensor if order is None else tensor.select(order)

    def take_shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same for a tensor that must have this shape. Raises ModelError."""
        if not self.has(name):
            raise ModelError(f"tensor {name} is missing")
        tensor = self.take_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def clear(self) -> None:
        """Removes all tensors, untouched."""
        self._tensors.clear()
        self._orders.clear()

    def put(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor. Raises ModelError when the name is taken."""
        if name in self._tensors:
            raise ModelError(f"tensor {name!r} is already among the weights")
        self._tensors[name] = tensor

    def rename(self, old: str, new: str) -> None:
        """Gives a tensor another name. Raises ModelError when `old` is missing or `new` is taken."""
        if new == old:
            return
        if new in self._tensors:
            raise ModelError(f"tensor {new!r} is already among the weights")
        self._tensors[new] = self.take_tensor(old)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def kind(self, name: str) -> str:
        """The kind of a tensor that stays in the map. Raises KeyError when there is none of that name."""
        return self._tensors[name].kind

    def kinds(self) -> Counter[str]:
        """How many tensors there are of each kind (Q4_1, BF16, ...)."""
        return Counter(tensor.kind for tensor in self._tensors.values())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._tensors)


def _tensor(name: str, value: NDArray[Any] | tuple[Any, tuple[int, ...]]) -> Tensor:
    data, shape = value if isinstance(value, tuple) else (value, np.shape(value))
    try:
        array = np.asarray(data) if isinstance(data, np.ndarray) else np.asarray(data, dtype=np.float32)
        if array.dtype.kind == "f":
            array = array.astype(np.float32, copy=False)
        return Tensor.from_array(array.reshape(shape))
    except (TypeError, ValueError) as error:
        raise UsageError(f"tensor {name!r}: {error}") from None
