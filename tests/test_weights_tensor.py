"""Tensor: taking rows, unstacking, FP8 scales, and shapes that do not fit."""

import gguf
import numpy as np
import pytest
import torch

from outpace.types import ModelError, UsageError
from outpace.weights.formats import KINDS
from outpace.weights.tensor import Tensor


def random_tensor(kind, shape, seed=0):
    size = int(np.prod(shape)) // KINDS[kind].block * KINDS[kind].size
    return Tensor(shape, kind, np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def fp8(shape, seed=0):
    """An FP8 tensor of ordinary values, and the same values in torch."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    return Tensor(shape, "F8_E4M3", values.view(torch.uint8).numpy().reshape(-1)), values.float()


def scales(shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def block_scaled(weights, scale, block=128):
    """The definition, element by block."""
    rows, columns = weights.shape
    out = torch.empty_like(weights)
    for r in range(0, rows, block):
        for c in range(0, columns, block):
            factor = scale[r // block, c // block]
            out[r : r + block, c : c + block] = weights[r : r + block, c : c + block] * factor
    return out.numpy()


@pytest.mark.parametrize("kind", ["F32", "BF16", "I64", "Q4_1", "Q6_K", "Q8_0"])
def test_select_takes_rows_undecoded(kind):
    tensor = random_tensor(kind, (7, 256))
    rows = np.array([6, 0, 0, 3])
    chosen = tensor.select(rows)
    assert (chosen.shape, chosen.kind) == ((4, 256), kind)
    assert np.array_equal(chosen.data.reshape(4, -1), tensor.data.reshape(7, -1)[rows])
    if KINDS[kind].integer is None:
        assert np.array_equal(chosen.f32(), tensor.f32()[rows], equal_nan=True)
    else:
        assert np.array_equal(chosen.ints(), tensor.ints()[rows])


def test_select_of_rows_in_a_row_copies_nothing():
    tensor = random_tensor("Q4_0", (7, 64))
    assert np.shares_memory(tensor.select(np.arange(2, 5)).data, tensor.data)
    assert not np.shares_memory(tensor.select(np.array([2, 4, 3])).data, tensor.data)
    assert np.array_equal(tensor.select(np.arange(2, 5)).f32(), tensor.f32()[2:5])


def test_select_of_a_vector_and_of_no_rows():
    vector = Tensor.from_array(np.arange(5, dtype=np.float32))
    assert vector.select(np.array([4, 1])).f32().tolist() == [4, 1]
    assert random_tensor("Q4_0", (3, 64)).select(np.array([], np.int64)).f32().shape == (0, 64)


@pytest.mark.parametrize("row", [-1, 7])
def test_select_refuses_rows_out_of_range(row):
    with pytest.raises(UsageError, match="that has 7"):
        random_tensor("F32", (7, 4)).select(np.array([0, row]))


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q5_0"])
def test_unstack_gives_the_matrices_in_order(kind):
    tensor = random_tensor(kind, (3, 2, 256))
    parts = tensor.unstack()
    assert [part.shape for part in parts] == [(2, 256)] * 3
    assert np.array_equal(np.stack([part.f32() for part in parts]), tensor.f32(), equal_nan=True)
    assert parts[1].data.base is not None  # a view, not a copy
    with pytest.raises(UsageError, match="not 3-D"):
        parts[0].unstack()


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (129, 1), (5, 257)])
def test_fp8_block_scales(shape):
    tensor, values = fp8(shape)
    scale = scales((-(-shape[0] // 128), -(-shape[1] // 128)))
    scaled = Tensor(shape, "F8_E4M3", tensor.data, Tensor.from_array(scale.numpy()))
    assert np.array_equal(scaled.f32(), block_scaled(values, scale))
    assert scaled.nbytes == shape[0] * shape[1] + scale.numel() * 4
    rows = np.array([shape[0] - 1, 0, shape[0] // 2, 0])
    assert np.array_equal(scaled.select(rows).f32(), scaled.f32()[rows])
    assert np.array_equal(scaled.select(rows).select(np.array([2])).f32(), scaled.f32()[rows[[2]]])


@pytest.mark.parametrize("form", [(), (1,), (1, 1), (200,), (200, 1)])
def test_fp8_scales_for_all_or_for_each_row(form):
    tensor, values = fp8((200, 130))
    scale = scales(form)
    scaled = Tensor(tensor.shape, tensor.kind, tensor.data, Tensor.from_array(scale.numpy()))
    assert np.array_equal(scaled.f32(), (values * scale.reshape(-1, 1)).numpy())
    rows = np.array([199, 7])
    assert np.array_equal(scaled.select(rows).f32(), scaled.f32()[rows])


def test_fp8_scales_may_be_bf16():
    tensor, values = fp8((4, 4))
    scale = torch.tensor([0.3], dtype=torch.bfloat16)
    scaled = Tensor((4, 4), "F8_E4M3", tensor.data, Tensor((1,), "BF16", scale.view(torch.uint8).numpy()))
    assert np.array_equal(scaled.f32(), (values * scale.float()).numpy())


@pytest.mark.parametrize("single", [False, True])
def test_stacked_fp8_experts(single):
    tensor, values = fp8((3, 130, 140))
    scale = scales((1,)) if single else scales((3, 2, 2))
    scaled = Tensor(tensor.shape, tensor.kind, tensor.data, Tensor.from_array(scale.numpy()))
    full = scale.expand(3, 2, 2) if not single else scale.reshape(1, 1, 1).expand(3, 2, 2)
    want = np.stack([block_scaled(values[i], full[i]) for i in range(3)])
    assert np.array_equal(scaled.f32(), want)
    assert np.array_equal(np.stack([part.f32() for part in scaled.unstack()]), want)
    assert np.array_equal(scaled.select(np.array([2, 0])).f32(), want[[2, 0]])


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3), (2, 1), (1, 2), (2, 2, 1), (0, 2)])
def test_scales_that_do_not_fit_are_refused(shape):
    tensor, _ = fp8((200, 200))
    with pytest.raises(ModelError, match="do not fit"):
        Tensor(tensor.shape, tensor.kind, tensor.data, Tensor.from_array(np.ones(shape, np.float32)))


def test_integer_scales_are_refused():
    with pytest.raises(ModelError, match="I64"):
        Tensor((1, 1), "F8_E4M3", np.zeros(1, np.uint8), Tensor.from_array(np.ones(1, np.int64)))


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "bool"])
def test_integers_round_trip(dtype):
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    tensor = Tensor.from_array(values)
    assert tensor.ints().dtype == np.int64
    assert tensor.ints().tolist() == values.astype(int).tolist()
    with pytest.raises(ModelError, match="integers"):
        tensor.f32()


def test_negative_offsets_keep_their_sign():
    assert Tensor.from_array(np.array([-5, 2**40])).ints().tolist() == [-5, 2**40]


def test_a_damaged_bool_counts_as_true():
    assert Tensor((3,), "BOOL", np.array([0, 1, 200], np.uint8)).ints().tolist() == [0, 1, 1]


def test_floats_are_not_integers():
    with pytest.raises(ModelError, match="F32"):
        Tensor.from_array(np.ones(2, np.float32)).ints()


def test_from_array_shares_memory_and_takes_any_layout():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(Tensor.from_array(values).f32(), values)
    assert np.array_equal(Tensor.from_array(values.T).f32(), values.T)
    assert np.array_equal(Tensor.from_array(values.astype(">f4")).f32(), values)
    assert Tensor.from_array(np.float32(3).reshape(())).f32().shape == ()
    with pytest.raises(UsageError, match="complex64"):
        Tensor.from_array(np.ones(2, np.complex64))


def test_f32_is_aligned_even_when_the_file_is_not():
    raw = np.concatenate([np.zeros(1, np.uint8), np.arange(4, dtype="<f4").view(np.uint8)])
    values = Tensor((4,), "F32", raw[1:]).f32()
    assert values.flags.aligned
    assert values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "kind", "size", "message"),
    [
        ((2, 2), "F32", 15, "needs 16 bytes"),
        ((31,), "Q8_0", 34, "multiple of 32"),
        ((), "Q8_0", 34, "multiple of 32"),
        ((2, 255), "Q4_K", 288, "multiple of 256"),
        ((2,), "Q2_K", 2, "Q2_K is not supported; supported are F32"),
        ((-1, -4), "U8", 4, "impossible shape"),
        ((1 << 40, 1 << 40, 0), "U8", 0, "impossible shape"),
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_cannot_exist(shape, kind, size, message):
    with pytest.raises(ModelError, match=message):
        Tensor(shape, kind, np.zeros(size, np.uint8))


def test_3d_tensors_of_the_gguf_package_decode_alike():
    raw = np.random.default_rng(3).integers(0, 256, (2, 3, 210), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K)
    assert np.array_equal(Tensor((2, 3, 256), "Q6_K", raw.reshape(-1)).f32(), want, equal_nan=True)
