"""safetensors: against the safetensors package both ways, folders with an index, FP8 scales, and damage by name."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import save_file

from outpace.types import ModelError, UsageError
from outpace.weights.safetensors import read_safetensors, write_safetensors
from outpace.weights.tensor import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]


def test_reads_what_the_safetensors_package_writes(tmp_path):
    path = tmp_path / "m.safetensors"
    made = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randn(7, 5, generator=made).to(dtype) for dtype in FLOATS}
    tensors |= {str(dtype): torch.randint(0, 100, (2, 3, 4), generator=made).to(dtype) for dtype in INTEGERS}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_safetensors(path)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        assert found[name].shape == tuple(want.shape)
        assert not found[name].data.flags.writeable
        if want.dtype in INTEGERS:
            assert np.array_equal(found[name].ints(), want.long().numpy())
        else:
            assert np.array_equal(found[name].f32(), want.float().numpy())


ARRAYS = st.tuples(
    st.sampled_from(["float32", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"]),
    st.lists(st.integers(0, 4), max_size=4),
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9).filter("__metadata__".__ne__), ARRAYS, max_size=6)
)
def test_round_trip_and_the_safetensors_package_agrees(tmp_path_factory, layout):
    path = tmp_path_factory.mktemp("st") / "m.safetensors"
    rng = np.random.default_rng(len(layout))
    arrays = {name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in layout.items()}
    write_safetensors(path, arrays)
    ours, theirs = read_safetensors(path), load_file(path)
    assert ours.keys() == theirs.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (theirs[name].dtype, theirs[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(theirs[name], array)
        values = ours[name].f32() if array.dtype.kind == "f" else ours[name].ints()
        assert values.shape == array.shape
        assert np.array_equal(values, array)


def test_writes_bf16_and_fp8_bytes_and_metadata(tmp_path):
    raw = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "b": Tensor((4, 4), "BF16", raw.bfloat16().view(torch.uint8).numpy().reshape(-1)),
        "f": Tensor((4, 4), "F8_E4M3", raw.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1)),
    }
    write_safetensors(tmp_path / "m.safetensors", tensors, {"made": "here"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"made": "here"}
        assert torch.equal(file.get_tensor("b"), raw.bfloat16())
        assert torch.equal(file.get_tensor("f").float(), raw.to(torch.float8_e4m3fn).float())


def test_writing_refuses_what_the_format_cannot_hold(tmp_path):
    for name, value in {
        "q": Tensor((32,), "Q8_0", np.zeros(34, np.uint8)),
        "__metadata__": np.ones(1, np.int8),
    }.items():
        with pytest.raises(UsageError, match="safetensors cannot hold"):
            write_safetensors(tmp_path / "m.safetensors", {name: value})
    with pytest.raises(UsageError, match="complex128"):
        write_safetensors(tmp_path / "m.safetensors", {"c": np.ones(1, complex)})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ FP8


def test_fp8_weights_come_with_their_scales(tmp_path):
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=made).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 3, generator=made)
    rows = torch.rand(200, 1, generator=made).bfloat16()
    save_file(
        {
            "a.weight": weight, "a.weight_scale_inv": blocks, "b.weight": weight.clone(), "b.weight_scale": rows,
            "c.weight": torch.ones(2, 2), "c.weight_scale": torch.ones(1), "d.weight": weight.clone(),
        },
        tmp_path / "model.safetensors",
    )  # fmt: skip
    found = read_safetensors(tmp_path)
    # Scales without an FP8 weight stay: the loader will not understand them, and must say so.
    assert sorted(found) == ["a.weight", "b.weight", "c.weight", "c.weight_scale", "d.weight"]
    full = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert np.array_equal(found["a.weight"].f32(), (weight.float() * full).numpy())
    assert np.array_equal(found["b.weight"].f32(), (weight.float() * rows.float()).numpy())
    assert found["d.weight"].block_scale is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a.weight_scale_inv": torch.ones(2, 3)}, "'a.weight': block scales of shape .2, 3. do not fit"),
        ({"a.weight_scale_inv": torch.ones(1), "a.weight_scale": torch.ones(1)}, "two scales"),
        ({"a.weight_scale": torch.ones(1, dtype=torch.int64)}, "'a.weight': block scales of kind I64"),
    ],
)
def test_fp8_scales_that_do_not_fit(tmp_path, extra, message):
    save_file({"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)} | extra, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        read_safetensors(tmp_path)


# -------------------------------------------------------------------------------------------------------- folders


def folder(path, shards, index=None):
    """A sharded model: shard name -> tensor names; each tensor holds its own number."""
    number = 0
    placed = {}
    for shard, names in shards.items():
        arrays = {}
        for name in names:
            arrays[name] = np.full((2, 3), number, np.float32)
            placed[name], number = shard, number + 1
        write_safetensors(path / shard, arrays)
    index = {"metadata": {}, "weight_map": placed if index is None else index}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_a_sharded_folder(tmp_path):
    found = read_safetensors(folder(tmp_path, {A: ["x", "y"], B: ["z"]}))
    assert {name: tensor.f32()[1, 2] for name, tensor in found.items()} == {"x": 0, "y": 1, "z": 2}


def test_an_fp8_weight_and_its_scale_in_different_shards(tmp_path):
    folder(tmp_path, {A: ["x"], B: ["y"]}, {"w.weight": A, "w.weight_scale_inv": B})
    save_file({"w.weight": torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)}, tmp_path / A)
    save_file({"w.weight_scale_inv": torch.full((1, 1), 0.5)}, tmp_path / B)
    assert read_safetensors(tmp_path)["w.weight"].f32().tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_links_to_the_files_of_a_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_safetensors(tmp_path / "blobs" / "abc", {"x": np.ones(2, np.float32)})
    os.symlink("../blobs/abc", tmp_path / "snapshot" / "model.safetensors")
    assert list(read_safetensors(tmp_path / "snapshot")) == ["x"]


@pytest.mark.parametrize(
    ("shards", "index", "message"),
    [
        ({A: ["x"]}, {"x": A, "y": B}, f"shard '{B}' is missing"),
        ({A: ["x"], B: ["y"]}, {"x": A, "y": A, "z": B}, f"'y' is not in its shard {A}"),
        ({A: ["x"], B: ["y"]}, {"x": A, "y": B, "z": B}, f"'z' is not in its shard {B}"),
        ({A: ["x"], B: ["x"]}, {"x": A, "y": B}, f"'x' is in both {A} and {B}"),
        ({A: ["x"]}, {"x": "../x.safetensors"}, "not a plain .safetensors name"),
        ({A: ["x"]}, {"x": "/etc/x.safetensors"}, "not a plain .safetensors name"),
        ({A: ["x"]}, {"x": "..\\x.safetensors"}, "not a plain .safetensors name"),
        ({A: ["x"]}, {"x": "pytorch_model.bin"}, "not a plain .safetensors name"),
        ({A: ["x"]}, {"x": "a\0b.safetensors"}, "is missing"),
        ({A: ["x"]}, {"x": "\ud800.safetensors"}, "is missing"),
        ({A: ["x"]}, {"x": "n" * 400 + ".safetensors"}, "is missing"),
        ({A: ["x"]}, {"x": 7}, "not a plain .safetensors name"),
        ({A: ["x"]}, {}, "weight_map is not an object"),
        ({A: ["x"]}, [A], "weight_map is not an object"),
    ],
)
def test_indexes_that_lie(tmp_path, shards, index, message):
    folder(tmp_path, shards, index)
    with pytest.raises(ModelError, match=message):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", "", '{"weight_map": 1}', "[" * 100_000, '{"a":1,"a":2}'])
def test_an_index_that_is_not_one(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        read_safetensors(tmp_path)


def test_folders_and_files_without_safetensors(tmp_path):
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        read_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pickle files .* runs code"):
        read_safetensors(tmp_path)
    for suffix in (".bin", ".pt", ".pth", ".ckpt", ".PT"):
        with pytest.raises(ModelError, match=r"pickle files .* runs code"):
            read_safetensors(tmp_path / f"model{suffix}")
    with pytest.raises(ModelError, match="no such file"):
        read_safetensors(tmp_path / "absent.safetensors")


# --------------------------------------------------------------------------------------------------------- damage


def one(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}, **extra}


def two(first, second):
    return {
        n: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]}
        for n, (b, e) in zip("tu", (first, second), strict=True)
    }


DAMAGE = {
    "not JSON": (b"{]", 0, "header is not valid JSON"),
    "not an object": ([1, 2], 0, "header is not a JSON object"),
    "not UTF-8": (b'{"\xff":1}', 0, "header is not valid JSON"),
    "deep": (b'{"a":' + b"[" * 100_000, 0, "header is not valid JSON"),
    "huge number": (b'{"a":' + b"9" * 100_000 + b"}", 0, "header is not valid JSON"),
    "twice": (b'{"t":1,"t":2}', 0, "appears twice"),
    "entry": ({"t": 3}, 0, "tensor 't': its entry must have"),
    "entry lacks": ({"t": {"dtype": "F32", "shape": [2]}}, 8, "tensor 't': its entry must have"),
    "dtype": (one("F64", offsets=(0, 16)), 16, "'t': dtype 'F64' is not supported; supported are F32"),
    "dtype list": (one(["F32"]), 8, "dtype .* is not supported"),
    "shape negative": (one(shape=(-1, -2)), 8, "not a list of whole numbers"),
    "shape fraction": (one(shape=(2.0,)), 8, "not a list of whole numbers"),
    "shape truth": (one(shape=(True, 2)), 8, "not a list of whole numbers"),
    "shape product": (one(shape=(2**40, 2**40)), 8, "impossible shape"),
    "shape product with zero": (one(shape=(0, 2**62, 2**62), offsets=(0, 0)), 0, "impossible shape"),
    "shape rank": (one("U8", (1,) * 5000, (0, 1)), 1, "impossible shape"),
    "size": (one(shape=(3,)), 8, "needs 12 bytes, data_offsets hold 8"),
    "offset past the end": (one(shape=(4,), offsets=(0, 16)), 8, "truncated or damaged"),
    "offsets swapped": (one(offsets=(8, 0)), 8, "data_offsets"),
    "offset negative": (one(offsets=(-8, 0)), 8, "data_offsets"),
    "offset huge": (one(offsets=(0, 2**70)), 8, "data_offsets"),
    "three offsets": (one(offsets=(0, 4, 8)), 8, "data_offsets"),
    "rest": (one(), 9, "end at byte 8 of the data, which has 9"),
    "hole": (two((0, 4), (5, 8)), 8, "'u': byte 5 of the data leaves a hole"),
    "hole at the start": (one("U8", (7,), (1, 8)), 8, "leaves a hole"),
    "overlap": (two((0, 4), (3, 8)), 8, "'u': byte 3 of the data overlaps"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path, name):
    header, size, message = DAMAGE[name]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    with pytest.raises(ModelError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


@pytest.mark.parametrize("raw", [b"", b"\1\2", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_that_does_not_fit(tmp_path, raw):
    (tmp_path / "m.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match=r"does not fit|empty"):
        read_safetensors(tmp_path / "m.safetensors")


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.int8)})
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError):
            read_safetensors(path)
