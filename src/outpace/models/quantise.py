"""The arithmetic of each precision, written once: what a matrix is held as, how activations, weights and the KV cache
are rounded, how a product is summed.

The native core follows these rules; this module is what it is tested against. Groups are of 32 along the input axis;
a width that is no multiple of 32 is filled up with zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from ..cache import CacheKind, KVCache
from ..config import ModelConfig
from ..types import F32, ModelError, UsageError
from ..weights.formats import KINDS, quantise_q4, quantise_q8, round_bfloat16
from ..weights.tensor import Groups, Supers, Tensor

GROUP = 32

Precision = Literal["int8", "int4", "bf16", "f32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FOUR_BITS = ("Q3_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS")  # at most, in the file


def check_precision(precision: str) -> Precision:
    """The same. Raises UsageError for what is no precision."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be int8, int4, bf16 or f32, got {precision!r}")
    return precision


def held_kind(kind: str, precision: str) -> str:
    """The kind that a matrix of a file's `kind` is held in (a key of formats.KINDS).

    f32: float32. bf16: 2 bytes a weight: F16 and BF16 as they are, F32 and FP8 rounded to BF16. int8: the file's own
    blocks, where their values go into 8 bits; others are rounded to Q8_0. int4: blocks of 4 bits or fewer as they are,
    all others rounded to Q4_0. Raises UsageError for a quantised kind with
    bf16, which would hold the same values in four times the memory.
    """
    if precision == "f32":
        return "F32"
    form = KINDS[kind]
    quantised = form.parts is not None or form.supers is not None
    if precision == "int8":
        return kind if quantised else "Q8_0"
    if precision == "int4":
        return kind if kind in FOUR_BITS else "Q4_0"
    if quantised:
        raise UsageError(f"precision bf16 is for files of floats; for {kind} use int8 (the file's own values) or f32")
    return "F16" if kind == "F16" else "BF16"


HeadPrecision = tuple[Precision, Precision]  # of a learned head's layers, and of its lm_head


def head_precision(target: str, layers: Iterable[str], lm_head: str) -> HeadPrecision:
    """What a learned head is held in beside a target of this precision: the target's own bits, so that a draft step is
    cheap beside a pass. Its layers are of 4 bits where most of the target's are, its lm_head where the target's is: at
    4 bits layers lost nothing that they guess right, rows of lm_head did (docs/LOG.md).

    layers, lm_head: kinds of the target's matrices in its file.
    """
    precision = check_precision(target)
    if precision not in ("int8", "int4"):
        return precision, precision
    four = [held_kind(kind, precision) in FOUR_BITS for kind in layers]
    last = held_kind(lm_head, precision) in FOUR_BITS
    return "int4" if 2 * sum(four) > len(four) else "int8", "int4" if last else "int8"


def held(tensor: Tensor, precision: str, name: str = "without a name") -> Tensor | Groups | Supers:
    """A matrix as held_kind tells, ready to multiply with: floats as a Tensor (F32, F16, BF16), or groups.

    Raises ModelError, naming the tensor, for weights that cannot be rounded; UsageError as held_kind.
    """
    kind = held_kind(tensor.kind, precision)
    if precision in ("int8", "int4"):
        groups = (tensor.supers() or tensor.groups()) if tensor.kind == kind else None
        return quantise_weights(tensor.f32(), name, kind) if groups is None else groups
    if tensor.kind == kind and tensor.block_scale is None:
        return tensor
    values = tensor.f32()
    if kind == "F32":
        return Tensor.from_array(values)
    return Tensor(tensor.shape, "BF16", round_bfloat16(values).reshape(-1).view(np.uint8))


def quantise_activations(x: F32) -> tuple[F32, F32]:
    """Rounds activations to 8 bits in groups of 32.

    x: float32 [..., n]. Returns q, whole numbers from -127 to 127 held as float32 [..., g, 32] with g = ceil(n / 32),
    and d, float32 [..., g], so that x is about q * d. The rule, in float32: amax = the group's largest |x|,
    d = amax / 127, q = rint(x * (127 / amax)) with ties to even; q = 0 where amax = 0.
    """
    groups = _grouped(x)
    amax = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0))
    # 127 / amax overflows for amax below 4e-37: such a group is as good as zero
    inverse = np.where(np.isinf(inverse), np.float32(0), inverse).astype(np.float32)
    return np.rint(groups * inverse[..., None]), amax / np.float32(127)


def new_cache(config: ModelConfig, positions: int, kind: CacheKind) -> KVCache:
    """An empty cache. "f16" rounds keys and values to float16; "q8" rounds them to 8 bits as activations, and the
    queries that meet these keys as well."""
    if kind == "q8":
        return KVCache(config, positions, rounded_to_q8, rounded_to_q8)
    return KVCache(config, positions, rounded_to_f16) if kind == "f16" else KVCache(config, positions)


def rounded_to_f16(x: F32) -> F32:
    """The nearest float16, ties to even; what is beyond the largest one becomes that."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def rounded_to_q8(x: F32) -> F32:
    """float32 [..., n] as quantise_activations rounds it."""
    q, d = quantise_activations(x)
    values: F32 = (q * d[..., None]).reshape(*x.shape[:-1], -1)
    return values[..., : x.shape[-1]]


def quantise_weights(weight: F32, name: str = "without a name", kind: str = "Q8_0") -> Groups:
    """Rounds a float32 matrix [out, in] to groups, for kinds that have no exact group form: to the values that a file
    of `kind` (Q8_0 or Q4_0) holds, so that a model and its quantised file give the same bits.

    The result's width is filled up with zeros to a multiple of 32. Raises ModelError, naming the tensor, for a weight
    that is not finite or too large for a float16 scale.
    """
    try:
        rounded = quantise_q4 if kind == "Q4_0" else quantise_q8
        return rounded(_grouped(weight).reshape(len(weight), -1))
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from None


class FloatMatrix:
    """A float32 matrix [out, in]."""

    def __init__(self, weight: F32) -> None:
        self.weight = np.ascontiguousarray(weight)

    def __call__(self, x: F32) -> F32:
        """float32 [in] -> float32 [out]."""
        product: F32 = self.weight @ x
        return product

    def row(self, index: int) -> F32:
        """One row as float32 [in]: an embedding."""
        row: F32 = self.weight[index]
        return row


class GroupMatrix:
    """A matrix [out, in] in int8 groups; width: its true number of inputs, where zeros fill the last group."""

    def __init__(self, groups: Groups, width: int) -> None:
        out, self.width = len(groups.q), width
        # Whole numbers in float32, [g, out, 32]: a dot product of 32 stays below 2**24, so BLAS computes it exactly.
        self.q = np.ascontiguousarray(groups.q.reshape(out, -1, GROUP).transpose(1, 0, 2), dtype=np.float32)
        self.scale = np.ascontiguousarray(groups.scale.T)
        self.offset = None if groups.offset is None else np.ascontiguousarray(groups.offset.T)

    def __call__(self, x: F32) -> F32:
        """float32 [in] -> float32 [out]: the sum over groups, first to last, of
        d * (scale * sum(q_x * q_w) + offset * sum(q_x)), each step rounded to float32."""
        q, d = quantise_activations(x)
        terms = self.scale * np.matmul(self.q, q[:, :, None])[:, :, 0]
        if self.offset is not None:
            terms += self.offset * q.sum(axis=1)[:, None]
        total: F32 = (d[:, None] * terms).sum(axis=0)
        return total

    def row(self, index: int) -> F32:
        """One row, dequantised, as float32 [in]."""
        values = self.scale[:, index, None] * self.q[:, index]
        if self.offset is not None:
            values = values + self.offset[:, index, None]
        return values.reshape(-1)[: self.width]


class HalfGroupMatrix:
    """A matrix [out, in] in super-blocks without minima: groups of 32 whose halves have scales of their own."""

    def __init__(self, supers: Supers) -> None:
        out = len(supers.q)
        # As in GroupMatrix: whole numbers in float32, [h, out, 16] and [h, out], h halves of groups.
        self.q = np.ascontiguousarray(supers.q.reshape(out, -1, GROUP // 2).transpose(1, 0, 2), dtype=np.float32)
        self.scale = np.ascontiguousarray(supers.scale.T, dtype=np.float32)
        d = supers.d.view(np.float16).astype(np.float32).T
        self.d = np.repeat(d, 8, axis=0)  # [g, out]

    def __call__(self, x: F32) -> F32:
        """float32 [in] -> float32 [out]: the sum over groups, first to last, of d_x * (d * whole), each step rounded to
        float32; whole = scale * sum(q_x * q_w) over the first half + the same over the last: below 2**24, so exact."""
        q, d = quantise_activations(x)
        halves = self.scale * np.matmul(self.q, q.reshape(-1, GROUP // 2, 1))[:, :, 0]
        total: F32 = (d[:, None] * (self.d * (halves[::2] + halves[1::2]))).sum(axis=0)
        return total

    def row(self, index: int) -> F32:
        """One row, dequantised, as float32 [in]."""
        scale = np.repeat(self.d[:, index], 2) * self.scale[:, index]
        values: F32 = (scale[:, None] * self.q[:, index]).reshape(-1)
        return values


Matrix = FloatMatrix | GroupMatrix | HalfGroupMatrix


def matrix(tensor: Tensor, precision: str, name: str = "without a name") -> Matrix:
    """The oracle's matrix for a tensor [out, in]. Raises as `held`."""
    weights = held(tensor, precision, name)
    if isinstance(weights, Tensor):
        return FloatMatrix(weights.f32())
    if isinstance(weights, Supers):
        groups = tensor.groups()
        return HalfGroupMatrix(weights) if groups is None else GroupMatrix(groups, tensor.shape[1])
    return GroupMatrix(weights, tensor.shape[1])


def _grouped(x: F32) -> F32:
    """[..., n] -> [..., ceil(n / 32), 32], filled up with zeros."""
    missing = -x.shape[-1] % GROUP
    if missing:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], missing), dtype=np.float32)], axis=-1)
    return x.reshape(*x.shape[:-1], -1, GROUP)
