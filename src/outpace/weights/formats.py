"""How numbers lie in model files: every kind of value that outpace reads, and the exact way back to float32.

Neighbours: tensor.py holds bytes together with a kind of this file; gguf.py and safetensors.py find the bytes. Nothing
here knows files or models.

Sources: the block layouts and the order of their float32 operations are those of ggml (block_q4_0 ... block_q6_K in
ggml-common.h, dequantize_row_* in ggml-quants.c); FP8 is Micikevicius et al. 2022, arXiv 2209.05433 (E4M3 without
infinities). Decoding gives the same bits as that definition, so a model's values are exactly its file's values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import F32, ModelError

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I8 = NDArray[np.int8]

GROUP = 32  # values that share one scale in the native core
SUPER = 256  # values of a super-block
CHUNK = 1 << 18  # values decoded at a time: the intermediate arrays stay in the processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A matrix in groups of 32 along its input axis: w[o, i] = scale[o, i // 32] * q[o, i] + offset[o, i // 32].

    q: int8 [out, in], in a multiple of 32. scale: float32 [out, in / 32]. offset: the same shape, or None for zeros.
    The product and the sum are each rounded to float32.
    """

    q: I8
    scale: F32
    offset: F32 | None

    def f32(self) -> F32:
        """The values as a new float32 array [out, in]."""
        return ungroup(self.scale, self.q.reshape(*self.scale.shape, GROUP), self.offset).reshape(self.q.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Supers:
    """A matrix in super-blocks of 256 along its input axis, whose scales are a factor times small whole numbers.

    With minima, w[o, i] = d[o, i // 256] * scale[o, i // 32] * q[o, i] - dmin[o, i // 256] * minimum[o, i // 32];
    without, w[o, i] = d[o, i // 256] * scale[o, i // 16] * q[o, i]. Products are taken from the left, and each product
    and the difference are rounded to float32 (d * scale is exact).
    kind: "q3_k", "q4_k", "q5_k" or "q6_k", which tells the range of q. q: int8 [out, in]. d, dmin: the bits of float16,
    uint16 [out, in / 256]. scale, minimum: int8 [out, in / 32], without minima [out, in / 16].
    """

    kind: str
    q: I8
    d: U16
    scale: I8
    dmin: U16 | None
    minimum: I8 | None

    def f32(self) -> F32:
        """The values as a new float32 array [out, in]."""
        runs = self.scale.shape[1] // self.d.shape[1]
        shape = (*self.scale.shape, SUPER // runs)
        offset = None
        if self.dmin is not None and self.minimum is not None:
            offset = _products(self.dmin, self.minimum, -1)
        return ungroup(_products(self.d, self.scale), self.q.reshape(shape), offset).reshape(self.q.shape)


# n blocks taken apart into g groups of 32: scale float32 [n, g], q int8 [n, g, 32], offset float32 [n, g] or None.
Parts = tuple[F32, I8, F32 | None]
# n super-blocks taken apart: q int8 [n, 256], d uint16 [n, 1], scale int8 [n, 8] or [n, 16], and either dmin and
# minimum, like d and scale, or None for both.
SuperParts = tuple[I8, U16, I8, U16 | None, I8 | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: `block` values lie in `size` bytes.

    decode: uint8 [n, size] -> float32 [n, block]; None for integers. parts: the same blocks as groups of 32, None where
    there is no exact group form. supers: the same as super-blocks, where they are some. integer: the dtype of an
    integer kind.
    """

    block: int
    size: int
    decode: Callable[[U8], F32] | None = None
    parts: Callable[[U8], Parts] | None = None
    supers: Callable[[U8], SuperParts] | None = None
    integer: np.dtype[Any] | None = None


def ungroup(scale: F32, q: I8, offset: F32 | None) -> F32:
    """float32 [n, g, run] of scale [n, g], q [n, g, run], offset [n, g]. A damaged scale (NaN) stays visible."""
    with np.errstate(all="ignore"):
        values: F32 = scale[..., None] * q
        if offset is not None:
            values += offset[..., None]
    return values


# -------------------------------------------------------------------------------------------------- plain floats


def _float32(blocks: U8) -> F32:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _float16(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def _bfloat16(blocks: U8) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _e4m3_table() -> F32:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_table()


def _float8_e4m3(blocks: U8) -> F32:
    return _E4M3[blocks]


def _float8_e5m2(blocks: U8) -> F32:
    return (blocks.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


# -------------------------------------------------------------------------------------------------- blocks of 32


def _half(blocks: U8, at: int) -> F32:
    """The float16 number at byte `at` of every block: float32 [n, 1]."""
    return _float16(blocks[:, at : at + 2])


def _nibbles(packed: U8) -> U8:
    """[n, 16] bytes -> [n, 32] values: the low halves are values 0..15, the high halves 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """The 32 bits that lie in four bytes from `at`, each worth 16: [n, 32]."""
    bits: U8 = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _signed(values: U8, minus: int = 0) -> I8:
    """[n, 32] unsigned values -> int8 [n, 1, 32], lowered by `minus`."""
    q = values.view(np.int8)
    return (q - np.int8(minus) if minus else q)[:, None, :]


def _q8_0(blocks: U8) -> Parts:
    return _half(blocks, 0), blocks[:, None, 2:34].view(np.int8), None


def _q4_0(blocks: U8) -> Parts:
    return _half(blocks, 0), _signed(_nibbles(blocks[:, 2:18]), 8), None


def _q4_1(blocks: U8) -> Parts:
    return _half(blocks, 0), _signed(_nibbles(blocks[:, 4:20])), _half(blocks, 2)


def _q5_0(blocks: U8) -> Parts:
    return _half(blocks, 0), _signed(_nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2), 16), None


def _q5_1(blocks: U8) -> Parts:
    return _half(blocks, 0), _signed(_nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)), _half(blocks, 2)


# ------------------------------------------------------------------------------------------ super-blocks of 256


def _halves(blocks: U8, at: int) -> U16:
    """The bits of the float16 number at byte `at` of every block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")


def _products(factor: U16, small: I8, sign: int = 1) -> F32:
    """float16 factors [n, s], one for each `small` [n, k * s]: sign * factor * small, exact in float32 [n, k * s]."""
    with np.errstate(all="ignore"):
        wide = np.repeat(factor.view(np.float16).astype(np.float32), small.shape[1] // factor.shape[1], axis=1)
        products: F32 = wide * small
    return -products if sign < 0 else products


def _k_scales(blocks: U8) -> tuple[I8, I8]:
    """Scales and minima, int8 [n, 8], of Q4_K and Q5_K: 8 + 8 numbers of 6 bits in the twelve bytes from the fifth on.

    Bytes 0..3 of the twelve hold the scales 0..3 and bytes 4..7 the minima 0..3 in their low 6 bits; bytes 8..11 hold
    the low 4 bits of scales and minima 4..7, whose upper 2 bits are the upper bits of bytes 0..3 and 4..7.
    """
    low_scale, low_min, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low_scale & 63, (rest & 15) | (low_scale >> 6 << 4)], axis=1)
    minimum = np.concatenate([low_min & 63, (rest >> 4) | (low_min >> 6 << 4)], axis=1)
    return scale.view(np.int8), minimum.view(np.int8)


def _k_nibbles(packed: U8) -> U8:
    """[n, 128] bytes -> [n, 8, 32]: each run of 32 bytes holds one group in its low halves, the next in its high."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: U8) -> SuperParts:
    scale, minimum = _k_scales(blocks)
    q = _k_nibbles(blocks[:, 16:144]).view(np.int8).reshape(-1, SUPER)
    return q, _halves(blocks, 0), scale, _halves(blocks, 2), minimum


def _q5_k(blocks: U8) -> SuperParts:
    scale, minimum = _k_scales(blocks)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # bit g of byte l: group g, value l
    q = (_k_nibbles(blocks[:, 48:176]) | (fifth << 4)).view(np.int8).reshape(-1, SUPER)
    return q, _halves(blocks, 0), scale, _halves(blocks, 2), minimum


def _q6_k(blocks: U8) -> SuperParts:
    """Sixteen groups of 16 with int8 scales: two halves of 128 values, each of four runs of 32."""
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    upper = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    q = (nibbles | (upper << 4)).view(np.int8).reshape(-1, SUPER) - np.int8(32)
    return q, _halves(blocks, 208), blocks[:, 192:208].view(np.int8), None, None


def _q3_k(blocks: U8) -> SuperParts:
    """Sixteen groups of 16 with scales of 6 bits, less 32.

    Values have 2 bits and are lowered by 4 where their bit of the first 32 bytes is not set (bit g of byte l: run g of
    32, value l). Of the twelve bytes of scales, scale k has its low 4 bits in half k // 8 of byte k % 8, its upper 2 in
    bits 2 * (k // 4) of byte 8 + k % 4.
    """
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    q = (low.reshape(-1, 8, 32) | (third << 2)).view(np.int8).reshape(-1, SUPER) - np.int8(4)
    nibbles, rest = blocks[:, 96:104], blocks[:, None, 104:108]
    upper = ((rest >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3).reshape(-1, 16)
    scale = (np.concatenate([nibbles & 15, nibbles >> 4], axis=1) | (upper << 4)).view(np.int8) - np.int8(32)
    return q, _halves(blocks, 108), scale, None, None


# Values that four bits choose from (ggml's kvalues_iq4nl).
_CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: U8) -> Parts:
    return _half(blocks, 0), _CODEBOOK[_nibbles(blocks[:, 2:18])][:, None, :], None


def _iq4_xs(blocks: U8) -> Parts:
    """Eight groups of 32 whose scales have 6 bits, less 32: the upper 2 in bytes 2 and 3, the low 4 in bytes 4 to 7."""
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    small = (low.reshape(-1, 8) | (high.reshape(-1, 8) << 4)).view(np.int8) - np.int8(32)
    packed = blocks[:, 8:136].reshape(-1, 8, 16)
    return _products(_halves(blocks, 0), small), _CODEBOOK[np.concatenate([packed & 15, packed >> 4], axis=2)], None


# ---------------------------------------------------------------------------------------------------- the table


def _grouped(block: int, size: int, parts: Callable[[U8], Parts]) -> Kind:
    return Kind(block, size, lambda blocks: ungroup(*parts(blocks)).reshape(-1, block), parts)


def _super(size: int, supers: Callable[[U8], SuperParts]) -> Kind:
    """With minima the super-blocks are groups of 32 too."""

    def decode(blocks: U8) -> F32:
        return Supers("", *supers(blocks)).f32()

    def parts(blocks: U8) -> Parts:
        q, d, scale, dmin, minimum = supers(blocks)
        assert dmin is not None
        assert minimum is not None
        return _products(d, scale), q.reshape(-1, SUPER // GROUP, GROUP), _products(dmin, minimum, -1)

    minima = supers(np.zeros((1, size), np.uint8))[3] is not None
    return Kind(SUPER, size, decode, parts if minima else None, supers)


def _integer(code: str) -> Kind:
    dtype = np.dtype(code)
    return Kind(1, dtype.itemsize, integer=dtype)


KINDS: dict[str, Kind] = {
    "F32": Kind(1, 4, _float32),
    "F16": Kind(1, 2, _float16),
    "BF16": Kind(1, 2, _bfloat16),
    "F8_E4M3": Kind(1, 1, _float8_e4m3),
    "F8_E5M2": Kind(1, 1, _float8_e5m2),
    "Q8_0": _grouped(32, 34, _q8_0),
    "Q4_0": _grouped(32, 18, _q4_0),
    "Q4_1": _grouped(32, 20, _q4_1),
    "Q5_0": _grouped(32, 22, _q5_0),
    "Q5_1": _grouped(32, 24, _q5_1),
    "Q3_K": _super(110, _q3_k),
    "Q4_K": _super(144, _q4_k),
    "Q5_K": _super(176, _q5_k),
    "Q6_K": _super(210, _q6_k),
    "IQ4_NL": _grouped(32, 18, _iq4_nl),
    "IQ4_XS": _grouped(256, 136, _iq4_xs),
    "I8": _integer("i1"),
    "I16": _integer("<i2"),
    "I32": _integer("<i4"),
    "I64": _integer("<i8"),
    "U8": _integer("u1"),
    "BOOL": _integer("?"),
}


# --------------------------------------------------------------------------------------------------- quantising


def round_bfloat16(values: F32) -> U16:
    """The bits of the nearest bfloat16 numbers, halves to even; NaN stays NaN. The shape of `values`."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def quantise_q8(weights: F32) -> Groups:
    """Rounds float32 [out, in] to the values that a Q8_0 block can hold.

    For each group of 32: scale = max|w| / 127 rounded to float16 (kept as its float32 value), q = w / scale rounded to
    the nearest integer, halves to even, clipped to -127..127. A group whose scale rounds to zero becomes zeros.
    Raises ModelError when `in` is not a multiple of 32, or a weight is not finite or too large for a float16 scale.
    """
    return _quantise(weights, -127, 127, lambda groups: np.abs(groups).max(axis=2) / np.float32(127))


def quantise_q4(weights: F32) -> Groups:
    """Rounds float32 [out, in] to the values that a Q4_0 block can hold.

    For each group of 32: scale = m / -8 rounded to float16, where m is the weight of largest size with its sign (the
    first of several), so that it falls on the one end that has eight steps; q = w / scale rounded to the nearest
    integer, halves to even, clipped to -8..7. A group whose scale rounds to zero becomes zeros. Raises as quantise_q8.
    """

    def scales(groups: F32) -> F32:
        largest = np.abs(groups).argmax(axis=2)[..., None]
        scale: F32 = np.take_along_axis(groups, largest, axis=2)[..., 0] / np.float32(-8)
        return scale

    return _quantise(weights, -8, 7, scales)


def _quantise(weights: F32, low: int, high: int, scales: Callable[[F32], F32]) -> Groups:
    """scales: float32 [n, g, 32] -> [n, g], before they are rounded to float16."""
    if weights.ndim != 2 or weights.shape[1] % GROUP or not weights.shape[1]:
        raise ModelError(
            f"cannot quantise shape {list(weights.shape)}: it must be [out, in] with in a multiple of {GROUP}"
        )
    out, width = weights.shape
    q = np.empty((out, width), dtype=np.int8)
    scale = np.empty((out, width // GROUP), dtype=np.float32)
    step = max(1, CHUNK // width)
    with np.errstate(all="ignore"):
        for at in range(0, out, step):
            groups = weights[at : at + step].astype(np.float32, copy=False).reshape(-1, width // GROUP, GROUP)
            part = scales(groups).astype(np.float16).astype(np.float32)
            if not np.isfinite(part).all():
                raise ModelError("cannot quantise: a weight is NaN, infinite or too large for a float16 scale")
            divisor = np.where(part != 0, part, np.float32(np.inf))[..., None]
            q[at : at + step] = np.clip(np.rint(groups / divisor), low, high).reshape(-1, width)
            scale[at : at + step] = part
    return Groups(q, scale, None)


def pack_q8(groups: Groups) -> U8:
    """The bytes of quantise_q8's result as Q8_0 blocks, uint8 [out * in / 32 * 34]: float16 scale, then 32 int8."""
    return _blocks(groups, groups.q.reshape(-1, GROUP).view(np.uint8))


def pack_q4(groups: Groups) -> U8:
    """The bytes of quantise_q4's result as Q4_0 blocks, uint8 [out * in / 32 * 18]: float16 scale, then 16 bytes."""
    raised = (groups.q.reshape(-1, GROUP) + np.int8(8)).view(np.uint8)
    return _blocks(groups, raised[:, :16] | raised[:, 16:] << np.uint8(4))


def _blocks(groups: Groups, weights: U8) -> U8:
    scale = groups.scale.reshape(-1, 1).astype("<f2").view(np.uint8)
    return np.concatenate([scale, weights], axis=1).reshape(-1)
