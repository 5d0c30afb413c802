"""Every kind decodes to the same bits as the outside definitions: the gguf package and torch."""

import warnings

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outpace.types import ModelError
from outpace.weights.formats import KINDS, pack_q4, pack_q8, quantise_q4, quantise_q8
from outpace.weights.tensor import Tensor

SUPER_KINDS = ["Q3_K", "Q4_K", "Q5_K", "Q6_K"]
BLOCK_KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SUPER_KINDS, "IQ4_NL", "IQ4_XS"]
GROUP_KINDS = [kind for kind in BLOCK_KINDS if kind not in ("Q3_K", "Q6_K")]


def same_bits(got, want):
    """Equal bit for bit (so -0.0 is not 0.0), and NaN exactly where NaN is due."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    nan = np.isnan(want)
    return (
        got.shape == want.shape
        and np.array_equal(np.isnan(got), nan)
        and np.array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))
    )


def random_blocks(kind, rows, row_blocks, seed=0):
    """Random bytes are valid blocks of every kind: all bit patterns, NaN and infinite scales among them."""
    return np.random.default_rng(seed).integers(0, 256, (rows, row_blocks * KINDS[kind].size), dtype=np.uint8)


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "F16", "BF16", "F32"])
def test_same_bits_as_the_gguf_package(kind):
    raw = random_blocks(kind, 64, 40)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = Tensor(want.shape, kind, raw.reshape(-1)).f32()
    assert got.flags.c_contiguous
    assert same_bits(got, want)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_the_group_form_is_exact(kind):
    raw = random_blocks(kind, 24, 3, seed=1)
    tensor = Tensor((24, 3 * KINDS[kind].block), kind, raw.reshape(-1))
    groups = tensor.groups()
    assert groups.q.dtype == np.int8
    assert groups.q.shape == tensor.shape
    assert groups.scale.shape == (24, tensor.shape[1] // 32)
    # Written out here, in the order that the native core uses: product, then sum, each in float32.
    with np.errstate(all="ignore"):
        values = np.repeat(groups.scale, 32, axis=1) * groups.q.astype(np.float32)
        if groups.offset is not None:
            values = values + np.repeat(groups.offset, 32, axis=1)
    assert (groups.offset is None) == (kind in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"))
    assert same_bits(values, tensor.f32())
    assert same_bits(groups.f32(), tensor.f32())


@pytest.mark.parametrize("kind", SUPER_KINDS)
def test_super_blocks_are_exact_and_in_their_range(kind):
    raw = random_blocks(kind, 24, 3, seed=2)
    tensor = Tensor((24, 768), kind, raw.reshape(-1))
    supers = tensor.supers()
    low, high = {"q3_k": (-4, 3), "q4_k": (0, 15), "q5_k": (0, 31), "q6_k": (-32, 31)}[supers.kind]
    assert (supers.q.min(), supers.q.max()) == (low, high)
    with np.errstate(all="ignore"):
        run = 768 // supers.scale.shape[1]
        scale = np.repeat(supers.d.view(np.float16).astype(np.float32), 256 // run, axis=1) * supers.scale
        values = np.repeat(scale, run, axis=1) * supers.q.astype(np.float32)
        if supers.dmin is not None:
            minimum = np.repeat(supers.dmin.view(np.float16).astype(np.float32), 8, axis=1) * supers.minimum
            values = values - np.repeat(minimum, 32, axis=1)
    assert same_bits(values, tensor.f32())
    assert same_bits(supers.f32(), tensor.f32())
    assert Tensor((24, 768), "F32", np.zeros(24 * 768 * 4, np.uint8)).supers() is None


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q6_K"])
def test_no_group_form_where_none_is_exact(kind):
    assert Tensor((2, 256), kind, np.zeros(512 * KINDS[kind].size // KINDS[kind].block, np.uint8)).groups() is None


def test_tensors_longer_than_a_chunk_decode_whole():
    raw = random_blocks("Q4_K", 9, 1024, seed=2)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    tensor = Tensor(want.shape, "Q4_K", raw.reshape(-1))
    assert same_bits(tensor.f32(), want)
    assert same_bits(tensor.groups().f32(), want)


def test_a_q4_1_block_written_by_hand():
    half = np.array([0.5, -1.0], dtype="<f2").view(np.uint8)
    packed = np.arange(16, dtype=np.uint8) | (15 << 4)  # low halves 0..15, high halves 15
    values = Tensor((32,), "Q4_1", np.concatenate([half, packed])).f32()
    assert values.tolist() == [0.5 * i - 1.0 for i in range(16)] + [6.5] * 16


@pytest.mark.parametrize(
    ("kind", "dtype", "bits"),
    [
        ("F8_E4M3", torch.float8_e4m3fn, np.uint8),
        ("F8_E5M2", torch.float8_e5m2, np.uint8),
        ("F16", torch.float16, np.uint16),
        ("BF16", torch.bfloat16, np.uint16),
    ],
)
def test_every_bit_pattern_decodes_as_in_torch(kind, dtype, bits):
    codes = np.arange(np.iinfo(bits).max + 1).astype(bits)
    want = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    assert same_bits(Tensor(codes.shape, kind, codes.view(np.uint8)).f32(), want)


# ------------------------------------------------------------------------------------------------------ quantising


def weights(low=-1e4, high=1e4):
    numbers = st.floats(low, high, width=32)
    return arrays(np.float32, st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 96])), elements=numbers)


@settings(max_examples=60, deadline=None)
@given(weights())
def test_quantise_q8_follows_its_rule_value_by_value(w):
    groups = quantise_q8(w)
    for o in range(w.shape[0]):
        for g in range(w.shape[1] // 32):
            part = w[o, 32 * g : 32 * g + 32]
            scale = float(np.float16(np.float32(max(abs(float(v)) for v in part)) / np.float32(127)))
            assert float(groups.scale[o, g]) == scale
            for i, v in enumerate(part):
                want = 0 if scale == 0 else max(-127, min(127, round(float(np.float32(v) / np.float32(scale)))))
                assert groups.q[o, 32 * g + i] == want


@settings(max_examples=60, deadline=None)
@given(weights().filter(lambda w: np.abs(w.reshape(-1, 32)).max(axis=1).min() > 0.01))
def test_quantising_loses_at_most_half_a_step_and_nothing_the_second_time(w):
    groups = quantise_q8(w)
    error = np.abs(groups.f32().astype(np.float64) - w)
    assert (error <= np.repeat(groups.scale, 32, axis=1) * 0.57).all()  # half a step, plus the scale's own rounding
    again = quantise_q8(groups.f32())
    assert np.array_equal(again.q, groups.q)
    assert np.array_equal(again.scale, groups.scale)


def test_packed_q8_blocks_hold_the_same_values():
    groups = quantise_q8(np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32))
    packed = pack_q8(groups)
    assert np.array_equal(Tensor((5, 96), "Q8_0", packed).groups().q, groups.q)
    want = gguf.quants.dequantize(packed.reshape(5, -1), gguf.GGMLQuantizationType.Q8_0)
    assert same_bits(groups.f32(), want)


@settings(max_examples=60, deadline=None)
@given(weights())
def test_quantise_q4_follows_its_rule_value_by_value(w):
    groups = quantise_q4(w)
    for o in range(w.shape[0]):
        for g in range(w.shape[1] // 32):
            part = w[o, 32 * g : 32 * g + 32]
            largest = max(part, key=lambda v: abs(float(v)))  # the first of several
            scale = float(np.float16(np.float32(largest) / np.float32(-8)))
            assert float(groups.scale[o, g]) == scale
            for i, v in enumerate(part):
                want = 0 if scale == 0 else max(-8, min(7, round(float(np.float32(v) / np.float32(scale)))))
                assert groups.q[o, 32 * g + i] == want


def test_packed_q4_blocks_hold_the_same_values():
    groups = quantise_q4(np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32))
    packed = pack_q4(groups)
    assert np.array_equal(Tensor((5, 96), "Q4_0", packed).groups().q, groups.q)
    want = gguf.quants.dequantize(packed.reshape(5, -1), gguf.GGMLQuantizationType.Q4_0)
    assert same_bits(groups.f32(), want)


def test_q4_is_about_as_near_as_the_gguf_package():
    w = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    theirs = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q4_0)
    theirs = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q4_0)
    assert np.square(quantise_q4(w).f32() - w).mean() < 1.01 * np.square(theirs - w).mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e7])
def test_quantising_refuses_what_has_no_scale(bad):
    w = np.ones((3, 64), np.float32)
    w[2, 40] = bad
    for rule in (quantise_q8, quantise_q4):
        with pytest.raises(ModelError, match="NaN, infinite or too large"):
            rule(w)


@pytest.mark.parametrize("shape", [(2, 33), (32,), (2, 0), (1, 2, 32)])
def test_quantising_refuses_shapes_without_whole_groups(shape):
    with pytest.raises(ModelError, match="multiple of 32"):
        quantise_q8(np.ones(shape, np.float32))
