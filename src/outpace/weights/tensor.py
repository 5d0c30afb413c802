"""One named array as it lies in a file, and the exact group form that the native core multiplies with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..types import F32


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix in groups of 32 along its input axis: w[o, i] = scale[o, i // 32] * q[o, i] + offset[o, i // 32].

    q: int8 [out, in], in a multiple of 32. scale: float32 [out, in / 32]. offset: the same shape, or None for zeros.
    """

    q: NDArray[np.int8]
    scale: F32
    offset: F32 | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bytes, how to read them, and the logical shape in PyTorch order ([out, in] for a matrix).

    kind: a key of formats.KINDS ("F32", "BF16", "Q4_1", "F8_E4M3", ...). data: uint8 [bytes], usually a read-only view
    of a mapped file. block_scale: for F8 with block scales the float32 tensor that goes with it.
    """

    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]
    block_scale: Tensor | None = None

    def f32(self) -> F32:
        """The values as a new or shared C-contiguous float32 array of `shape`."""
        raise NotImplementedError

    def groups(self) -> Groups | None:
        """The exact group-of-32 form of a 2-D tensor, None where the kind has no exact one (F32, BF16, Q6_K, ...)."""
        raise NotImplementedError

    def select(self, rows: NDArray[np.int64]) -> Tensor:
        """The rows (first axis) in this order, without decoding them."""
        raise NotImplementedError

    def unstack(self) -> list[Tensor]:
        """The tensors along the first axis of a 3-D tensor, without decoding them."""
        raise NotImplementedError
