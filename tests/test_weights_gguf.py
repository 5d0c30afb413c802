"""GGUF: what the gguf package writes we read, what we write it reads, and damage is refused by name."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.types import ModelError, UsageError
from outpace.weights.formats import KINDS
from outpace.weights.gguf import TENSOR_TYPES, GGUFFile, Planned, gguf_size, write_gguf
from outpace.weights.tensor import Tensor

ALL = {"F32": 1, "F16": 1, "BF16": 1} | dict.fromkeys(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"], 32)
ALL |= dict.fromkeys(["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"], 256)


def random_tensor(kind, shape, seed=0):
    size = int(np.prod(shape)) // KINDS[kind].block * KINDS[kind].size
    return Tensor(shape, kind, np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


# ----------------------------------------------------------------------------- against the gguf package, both ways


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("n", 7)
    writer.add_int8("small", -3)
    writer.add_uint64("big", 2**63 + 1)
    writer.add_float32("eps", 1e-5)
    writer.add_float64("wide", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "naïve ☃")
    writer.add_array("tokens", ["a", "", "Ġthe", "☃"])
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("types", [1, 2, 3])
    writer.add_array("flags", [True, False])
    raw = {}
    for seed, (kind, block) in enumerate(ALL.items()):
        raw[kind] = random_tensor(kind, (5, 2 * block), seed)
        data = raw[kind].data.reshape(5, -1)
        if kind in ("F32", "F16"):
            data = data.view(kind.lower().replace("f", "<f").replace("32", "4").replace("16", "2"))
            writer.add_tensor(kind, data)
        else:
            writer.add_tensor(kind, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("stack", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("vector", np.arange(3, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(path)
    meta = file.metadata
    assert file.version == 3
    assert {k: meta[k] for k in ("general.architecture", "n", "small", "big", "wide", "flag", "text")} == {
        "general.architecture": "llama", "n": 7, "small": -3, "big": 2**63 + 1, "wide": 0.1, "flag": True,
        "text": "naïve ☃",
    }  # fmt: skip
    assert type(meta["n"]) is int
    assert type(meta["flag"]) is bool
    assert meta["eps"] == float(np.float32(1e-5))
    assert meta["tokens"] == ["a", "", "Ġthe", "☃"]
    assert (meta["scores"].dtype, meta["scores"].tolist()) == (np.float32, [0.5, -1.5])
    assert (meta["types"].dtype, meta["types"].tolist()) == (np.int32, [1, 2, 3])
    assert (meta["flags"].dtype, meta["flags"].tolist()) == (np.bool_, [True, False])
    for kind in ALL:
        tensor = file.tensors[kind]
        assert (tensor.kind, tensor.shape) == (kind, raw[kind].shape)
        assert np.array_equal(tensor.data, raw[kind].data)
        assert not tensor.data.flags.writeable
    assert np.array_equal(file.tensors["stack"].f32(), np.arange(24).reshape(2, 3, 4))
    assert file.tensors["vector"].ints().tolist() == [0, 1, 2]


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "model.gguf"
    metadata = {
        "general.architecture": "llama",
        "n": 7,
        "minus": -7,
        "big": 2**40,
        "eps": 1e-5,
        "flag": False,
        "tokens": ["a", "", "☃"],
        "scores": np.array([0.5, -1.5], np.float32),
        "types": np.array([1, 2], np.int32),
        "half": np.uint16(3),
    }
    tensors = {kind: random_tensor(kind, (3, 2 * block), seed) for seed, (kind, block) in enumerate(ALL.items())}
    tensors["stack"] = Tensor.from_array(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    write_gguf(path, metadata, tensors)

    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].tensor_type.name == tensor.kind
        assert found[name].shape.tolist() == list(tensor.shape[::-1])
        assert np.array_equal(found[name].data.view(np.uint8).reshape(-1), tensor.data)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    types = {key: field.types[-1].name for key, field in reader.fields.items()}
    assert fields["tokens"] == ["a", "", "☃"]
    assert (fields["scores"], fields["types"]) == ([0.5, -1.5], [1, 2])
    assert (fields["n"], fields["minus"], fields["big"], fields["flag"], fields["half"]) == (7, -7, 2**40, False, 3)
    assert [types[k] for k in ("n", "minus", "big", "eps", "half")] == [
        "UINT32",
        "INT32",
        "UINT64",
        "FLOAT32",
        "UINT16",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf"]


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False),
    TEXT,
    st.lists(TEXT, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(TEXT.filter(lambda key: key not in ("general.alignment", "split.count")), VALUES, max_size=6),
    st.dictionaries(TEXT, st.tuples(st.sampled_from(list(ALL)), st.integers(0, 4), st.integers(1, 2)), max_size=5),
    st.sampled_from([1, 8, 32, 4096]),
)
def test_round_trip(tmp_path_factory, metadata, layout, alignment):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = {name: random_tensor(k, (rows, width * ALL[k])) for name, (k, rows, width) in layout.items()}
    write_gguf(path, metadata | {"general.alignment": alignment}, tensors)
    file = GGUFFile.open(path)
    assert file.metadata == metadata | {"general.alignment": alignment}
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = file.tensors[name]
        assert (got.shape, got.kind) == (tensor.shape, tensor.kind)
        assert np.array_equal(got.data, tensor.data)


def test_arrays_of_arrays_are_lists(tmp_path):
    inner = struct.pack("<IQ2H", 2, 2, 5, 6) + struct.pack("<IQ", 8, 1) + string("x")
    path = build(tmp_path, entries=[string("k") + struct.pack("<IIQ", 9, 9, 2) + inner])
    first, second = GGUFFile.open(path).metadata["k"]
    assert (first.tolist(), second) == ([5, 6], ["x"])


# --------------------------------------------------------------------------------------------------------- damage


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, code, raw):
    return string(key) + struct.pack("<I", code) + raw


def info(name="t", dims=(4,), kind=0, offset=0, count=None):
    count = len(dims) if count is None else count
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def build(folder, *, magic=b"GGUF", version=3, entries=(), infos=(), data=b"", tensors=None, pairs=None, align=32):
    head = magic + struct.pack(
        "<IQQ", version, len(infos) if tensors is None else tensors, len(entries) if pairs is None else pairs
    )
    raw = head + b"".join(entries) + b"".join(infos)
    path = folder / "model.gguf"
    path.write_bytes(raw + bytes(-len(raw) % align) + data)
    return path


HUGE = 2**60
DAMAGE = {
    "not gguf": ({"magic": b"GGML"}, "not a GGUF file"),
    "version 1": ({"version": 1}, "version 1 is not supported"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "tensor count": ({"tensors": HUGE}, f"tensor count: {HUGE} tensors cannot fit"),
    "metadata count": ({"pairs": HUGE}, f"metadata count: {HUGE} metadata entries cannot fit"),
    "key length": ({"entries": [struct.pack("<Q", 2**63) + b"k" * 20]}, "key of metadata entry 0: .* file ends"),
    "key text": ({"entries": [entry(b"\xff\xfe", 0, b"\1")]}, "key of metadata entry 0: .* not valid UTF-8"),
    "value text": ({"entries": [entry("k", 8, string(b"\xff"))]}, "metadata 'k': .* not valid UTF-8"),
    "value type": ({"entries": [entry("k", 13, b"\1" * 8)]}, "metadata 'k': unknown value type 13"),
    "twice the key": ({"entries": [entry("k", 0, b"\1"), entry("k", 0, b"\1")]}, "metadata 'k' appears twice"),
    "truth value": ({"entries": [entry("k", 7, b"\2")]}, "metadata 'k': a truth value"),
    "numbers": ({"entries": [entry("k", 9, struct.pack("<IQ", 0, HUGE))]}, f"{HUGE} numbers cannot fit"),
    "numbers, 64-bit overflow": ({"entries": [entry("k", 9, struct.pack("<IQ", 10, 2**61))]}, "numbers cannot fit"),
    "strings": ({"entries": [entry("k", 9, struct.pack("<IQ", 8, HUGE))]}, f"{HUGE} strings cannot fit"),
    "arrays": ({"entries": [entry("k", 9, struct.pack("<IQ", 9, HUGE))]}, f"{HUGE} arrays cannot fit"),
    "array type": ({"entries": [entry("k", 9, struct.pack("<IQ", 99, 1))]}, "unknown array type 99"),
    "nesting": ({"entries": [entry("k", 9, struct.pack("<IQ", 9, 1) * 50)]}, "nested deeper than 4"),
    "string in array": (
        {"entries": [entry("k", 9, struct.pack("<IQQ", 8, 2, 1) + b"a" + struct.pack("<Q", 2**63) + b"b" * 8)]},
        "string 1 of 2 runs past",
    ),
    "no room for the last string": (
        {"entries": [entry("k", 9, struct.pack("<IQ", 8, 2) + string("a" * 8))], "align": 1},
        "string 1 of 2 runs past",
    ),
    "text in array": ({"entries": [entry("k", 9, struct.pack("<IQ", 8, 1) + string(b"\xff"))]}, "not valid UTF-8"),
    "alignment 0": ({"entries": [entry("general.alignment", 4, bytes(4))]}, "general.alignment must be a power of two"),
    "alignment 24": ({"entries": [entry("general.alignment", 0, b"\x18")]}, "power of two, got 24"),
    "alignment text": ({"entries": [entry("general.alignment", 8, string("32"))]}, "power of two, got '32'"),
    "split": ({"entries": [entry("split.count", 2, b"\3\0")]}, "one of 3 parts"),
    "split array": ({"entries": [entry("split.count", 9, struct.pack("<IQ", 0, 2) + b"ab")]}, "parts of a split model"),
    "dimensions": ({"infos": [info(count=5, dims=(1,) * 5)]}, "tensor 't' has 5 dimensions"),
    "dimensions, huge": ({"infos": [info(count=2**32 - 1)]}, "has 4294967295 dimensions"),
    "product": ({"infos": [info(dims=(2**33, 2**33))]}, "tensor 't': impossible shape"),
    "product and zero": ({"infos": [info(dims=(2**33, 2**33, 0))]}, "tensor 't': impossible shape"),
    "row": ({"infos": [info(dims=(33,), kind=8)]}, "'t': shape .33. does not fit Q8_0"),
    "unsupported": (
        {"infos": [info(dims=(256,), kind=10)]},
        "tensor 't' has type Q2_K, which is not supported; .* Q6_K",
    ),
    "unknown type": ({"infos": [info(kind=4)]}, "tensor 't' has type number 4"),
    "offset": ({"infos": [info(offset=1)], "data": bytes(64)}, "offset 1 is not a multiple"),
    "offset, huge": ({"infos": [info(offset=2**64 - 32)], "data": bytes(64)}, "past the file's end"),
    "past the end": ({"infos": [info(dims=(4, 4))], "data": bytes(63)}, "'t': .* past the file's end"),
    "twice the tensor": ({"infos": [info(), info()], "data": bytes(16)}, "tensor 't' appears twice"),
    "overlap": ({"infos": [info(dims=(16,)), info("u", offset=32)], "data": bytes(64)}, "'t' and 'u' overlap"),
    "name text": ({"infos": [info(b"\xff")]}, "name of tensor 0: .* not valid UTF-8"),
    "lone truncation": ({"infos": [info()[:20]]}, "truncated or damaged|cannot fit"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path, name):
    parts, message = DAMAGE[name]
    path = build(tmp_path, **parts)
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_undamaged_file_of_these_tests_loads(tmp_path):
    path = build(tmp_path, entries=[entry("k", 0, b"\1")], infos=[info(dims=(2, 2))], data=bytes(16))
    assert GGUFFile.open(path).tensors["t"].shape == (2, 2)


def test_every_truncation_is_refused(tmp_path):
    path = build(tmp_path, entries=[entry("k", 8, string("value"))], infos=[info()], data=bytes(16))
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError):
            GGUFFile.open(path)


def test_every_type_of_the_format_that_we_lack_is_refused_by_name(tmp_path):
    for kind in gguf.GGMLQuantizationType:
        assert TENSOR_TYPES.get(int(kind), kind.name) == kind.name
        block, size = gguf.GGML_QUANT_SIZES[kind]
        path = build(tmp_path, infos=[info(dims=(block,), kind=int(kind))], data=bytes(size))
        if kind.name in KINDS:
            assert GGUFFile.open(path).tensors["t"].nbytes == size
        else:
            name = TENSOR_TYPES.get(int(kind), f"number {int(kind)}")
            with pytest.raises(ModelError, match=f"type {name}, which is not supported"):
                GGUFFile.open(path)


@pytest.mark.parametrize("what", ["missing", "empty", "folder", "pickle"])
def test_paths_that_are_no_gguf_file(tmp_path, what):
    path = tmp_path / ("model.bin" if what == "pickle" else "model.gguf")
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(b"GGUF" if what == "pickle" else b"")
    message = {"missing": "no such file", "empty": "empty", "folder": "not a regular file", "pickle": "runs code"}
    with pytest.raises(ModelError, match=message[what]):
        GGUFFile.open(path)


# -------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("value", [None, 2**64, [1, 2], {"a": 1}, np.zeros((2, 2)), np.complex64(1), ["a", 1]])
def test_writing_refuses_what_gguf_cannot_hold(tmp_path, value):
    with pytest.raises(UsageError, match="metadata 'k'"):
        write_gguf(tmp_path / "m.gguf", {"k": value}, {})
    assert list(tmp_path.iterdir()) == []


def test_writing_refuses_fp8_and_deep_tensors(tmp_path):
    for tensor in (Tensor((1,), "F8_E4M3", np.zeros(1, np.uint8)), Tensor((1,) * 5, "U8", np.zeros(1, np.uint8))):
        with pytest.raises(UsageError, match="GGUF cannot hold"):
            write_gguf(tmp_path / "m.gguf", {}, {"t": tensor})


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def pieces(error):
        yield np.zeros(1000, np.uint8)
        if error is not None:
            raise error

    def planned(error):
        return {"t": Planned((1000,), "F32", lambda: pieces(error))}

    with pytest.raises(ModelError, match=r"m\.gguf: cannot be written: No space left"):
        write_gguf(path, {}, planned(OSError(28, "No space left on device")))
    with pytest.raises(ModelError, match="a damaged weight"):
        write_gguf(path, {}, planned(ModelError("a damaged weight")))
    with pytest.raises(UsageError, match="needs 4000 bytes, its pieces had 1000"):
        write_gguf(path, {}, planned(None))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    with pytest.raises(ModelError, match="cannot be written"):
        write_gguf(tmp_path / "no" / "m.gguf", {}, {})


def test_a_planned_tensor_is_written_piece_by_piece(tmp_path):
    tensor = random_tensor("Q4_0", (6, 64))
    pieces = [tensor.data[:36], tensor.data[36:]]
    metadata, plan = {"text": "ab"}, {"p": Planned(tensor.shape, tensor.kind, lambda: pieces)}
    write_gguf(tmp_path / "a.gguf", metadata, plan | {"v": Tensor.from_array(np.ones(3, np.float32))})
    write_gguf(tmp_path / "b.gguf", metadata, {"p": tensor, "v": Tensor.from_array(np.ones(3, np.float32))})
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    write_gguf(tmp_path / "c.gguf", metadata, plan)
    assert (tmp_path / "c.gguf").stat().st_size == gguf_size(metadata, plan)
