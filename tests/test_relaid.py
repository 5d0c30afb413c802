"""Weights kept as the kernels read them: the same bits with and without, and no file, however damaged, does harm."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
import tiny_folder
from outpace import _native, api, hub
from outpace.backends import native
from outpace.backends.base import Rows
from outpace.backends.native import NativeBackend
from outpace.backends.native_core import core_config
from outpace.types import UsageError
from outpace.weights import relaid as relaid_module
from outpace.weights.relaid import MAGIC, Part, Relaid
from outpace.weights.weight_map import WeightMap

TOKENS = [1, 5, 9, 2, 60, 33, 7]
VARIANTS = ("qwen3", "tied", "qwen2", "moe_shared")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(5 << 20))
    return file


def kept(source: Path, **options: int) -> Relaid:
    return Relaid(source.parent / "relaid" / source.stem, source, **{"least": 0, **options})


def files(relaid: Relaid) -> list[Path]:
    return sorted(file for file in relaid.folder.parent.rglob("*") if file.is_file())


def backend(variant: str, relaid: Relaid | None) -> NativeBackend:
    config, arrays = tiny.random_model(variant)
    return NativeBackend(config, WeightMap.from_tensors(arrays), relaid=relaid)


def logits(model: NativeBackend) -> bytes:
    return model.forward([Rows(model.new_slot(), TOKENS)]).logits.tobytes()


def parts(n: int = 3) -> list[Part]:
    random = np.random.default_rng(n)
    sizes = (0, 1, 4096, 9000, 12345)
    return [Part(f"p{i}", (i, -i), random.integers(0, 256, sizes[i % 5], dtype=np.uint8)) for i in range(n)]


def equal(a: list[Part] | None, b: list[Part]) -> bool:
    return a is not None and all(
        x.name == y.name and x.form == y.form and np.array_equal(x.data, y.data) for x, y in zip(a, b, strict=True)
    )


# ------------------------------------------------------------------------------------------------------ the backend


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_with_and_without(variant: str, isa: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_ISA", isa)
    plain, first = backend(variant, None), backend(variant, kept(source))
    assert len(files(kept(source))) == 1
    laid: list[str] = []
    monkeypatch.setattr(native, "put", lambda core, name, *rest: laid.append(name))
    second = backend(variant, kept(source))
    assert laid == []
    assert logits(plain) == logits(first) == logits(second)
    assert plain.memory[0] == second.memory[0]


def test_the_mapping_lives_as_long_as_the_model(source: Path) -> None:
    expected = logits(backend("qwen3", kept(source)))
    model = backend("qwen3", kept(source))
    files(kept(source))[0].unlink()
    filler = [np.zeros(1 << 20, np.uint8) for _ in range(8)]
    assert logits(model) == expected
    assert len(filler) == 8


def test_every_kernel_family_with_its_own_layout_has_its_own_file(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = set()
    for isa in _native.isas():
        monkeypatch.setenv("OUTPACE_ISA", isa)
        layouts.add(_native.unsigned_bytes())
        backend("qwen3", kept(source))
    assert len(files(kept(source))) == len(layouts)


def test_float32_keeps_nothing(source: Path) -> None:
    config, arrays = tiny.random_model("qwen3")
    NativeBackend(config, WeightMap.from_tensors(arrays), precision="f32", relaid=kept(source))
    assert files(kept(source)) == []


def test_parts_that_do_not_fit_are_laid_out_anew(source: Path) -> None:
    """A file with a right key and wrong content: every single form and size is refused, and the results stay."""
    expected = logits(backend("qwen3", kept(source)))
    file = files(kept(source))[0]
    whole = file.read_bytes()
    head, start = read_head(whole)
    changed = 0
    for row in range(0, len(head["parts"]), 4):
        for field, value in ((0, "other"), (1, []), (1, [9] * 6), (1, [3, 1, 1, 0, 0, 0]), (3, 64)):
            bad = json.loads(json.dumps(head))
            if bad["parts"][row][field] == value:
                continue
            bad["parts"][row][field] = value
            if field == 3:
                bad["parts"][row][4] = ends(whole[start + bad["parts"][row][2] :][:64])
            file.write_bytes(with_head(bad, whole[start:]))
            changed += 1
            assert logits(backend("qwen3", kept(source))) == expected
            assert file.read_bytes() == whole, "it was not mended"
    assert changed > 20


@pytest.mark.parametrize(
    "form",
    [
        [],
        [2, 16, 32, 1, 0],
        [0, 16, 32, 1, 0, 0],
        [4, 16, 32, 1, 0, 0],
        [-1, 16, 32, 1, 0, 0],
        [2, 0, 32, 1, 0, 0],
        [2, 16, -32, 1, 0, 0],
        [2, 2**31 - 1, 2**31 - 1, 1, 0, 0],
        [2, 16, 32, 1, 0, 5],
        [3, 16, 32, 1, 0, -128],
        [1, 16, 32, 1, 0, 0],
        [3, 16, 32, 1, 1, -8],  # offsets need more bytes
        [3, 17, 32, 1, 0, -8],
    ],
)
def test_the_core_refuses_impossible_matrices(form: list[int], source: Path) -> None:
    config, arrays = tiny.random_model("qwen3")
    model = NativeBackend(config, WeightMap.from_tensors(arrays)).core
    name = "model.layers.0.mlp.up_proj.weight"
    fresh = fresh_model()
    room = np.zeros(320 + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][:320]
    fresh.put_packed(name, [3, 16, 32, 1, 0, -8], room)  # this is a possible one
    fresh.forget()
    with pytest.raises((ValueError, TypeError)):
        fresh.put_packed(name, form, room)
    with pytest.raises(ValueError, match="do not fit"):
        fresh.put_packed(name, [3, 16, 32, 1, 0, -8], np.zeros(400, np.uint8)[room.ctypes.data % 64 + 1 :][:320])
    with pytest.raises(ValueError, match="in use"):
        model.forget()


def fresh_model() -> _native.Model:
    """A core that has no weights yet."""
    config, _ = tiny.random_model("qwen3")
    return _native.Model(core_config(config), slots=1, positions=8, rows=8, threads=1, cache="f32")


# --------------------------------------------------------------------------------------------------------- the file


def read_head(whole: bytes) -> tuple[dict, int]:
    length = struct.unpack_from("<Q", whole, len(MAGIC))[0]
    head = json.loads(whole[len(MAGIC) + 12 :][:length])
    return head, -(-(len(MAGIC) + 12 + length) // 4096) * 4096


def with_head(head: dict, data: bytes) -> bytes:
    text = json.dumps(head).encode()
    fixed = MAGIC + struct.pack("<QI", len(text), zlib.crc32(text)) + text
    return fixed.ljust(-(-len(fixed) // 4096) * 4096, b"\0") + data


def ends(data: bytes) -> int:
    return zlib.crc32(data[-4096:], zlib.crc32(data[:4096]))


def test_what_was_kept_comes_back(source: Path) -> None:
    relaid = kept(source)
    assert relaid.read("a") is None
    assert relaid.write("a", parts())
    assert relaid.write("b", parts(5))
    assert equal(relaid.read("a"), parts())
    assert equal(relaid.read("b"), parts(5))
    found = relaid.read("a")
    assert found is not None
    assert not any(part.data.flags.writeable for part in found)
    assert all(part.data.ctypes.data % 64 == 0 for part in found if len(part.data))


@pytest.mark.parametrize("change", ["begin", "middle", "end", "time", "longer", "other file"])
def test_a_changed_source_is_another_one(change: str, source: Path) -> None:
    relaid = kept(source)
    assert relaid.write("a", parts())
    about = source.stat()
    content = bytearray(source.read_bytes())
    at = {"begin": 100, "middle": len(content) // 2 - 1, "end": -1}.get(change)
    if at is not None:
        content[at] ^= 1
    source.write_bytes(bytes(content) + (b"x" if change == "longer" else b""))
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns + (1 if change == "time" else 0)))
    if change == "other file":
        other = source.with_name("other.gguf")
        os.rename(source, other)
        relaid = Relaid(relaid.folder, other, least=0)
    assert relaid.read("a") is None
    assert relaid.write("a", parts(2))
    assert equal(relaid.read("a"), parts(2))
    assert len(files(relaid)) == 1


def test_a_source_that_changes_while_it_is_read_is_not_kept(source: Path) -> None:
    relaid = kept(source)
    assert relaid.read("a") is None
    source.write_bytes(b"new")
    assert not relaid.write("a", parts())
    assert files(relaid) == []


def test_shards_of_a_folder_all_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode() * 100)
    relaid = Relaid(tmp_path / "relaid" / "x", tmp_path, least=0)
    assert relaid.write("l", parts())
    (tmp_path / "b.safetensors").write_bytes(b"c" * 100)
    assert relaid.read("l") is None


def test_a_truncated_file_is_not_used(source: Path) -> None:
    relaid = kept(source)
    relaid.write("a", parts())
    file = files(relaid)[0]
    whole = file.read_bytes()
    for size in [*range(0, 600, 7), len(whole) - 1, len(whole) - 5000]:
        file.write_bytes(whole[:size])
        assert relaid.read("a") is None
    file.write_bytes(whole)
    assert equal(relaid.read("a"), parts())


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(make, source: Path) -> None:
    relaid = kept(source)
    relaid.write("a", parts())
    file = files(relaid)[0]
    file.unlink()
    make(file)
    assert relaid.read("a") is None
    assert relaid.write("a", parts()) == (make is os.mkfifo)


def test_damaged_content_is_not_used(source: Path) -> None:
    relaid = kept(source)
    relaid.write("a", parts())
    file = files(relaid)[0]
    whole = bytearray(file.read_bytes())
    _, start = read_head(whole)
    for at in (0, 9, 17, 40, start + 4096, start + 8191):
        bad = bytearray(whole)
        bad[at] ^= 0x40
        file.write_bytes(bad)
        assert relaid.read("a") is None


VALUES = st.sampled_from([-1, 0, 1, 64, 4096, 4097, 2**31, 2**63, 2**64, 10**30, 1.5, None, "x", [], {}, [[]]])


@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, 2), field=st.integers(0, 5), value=VALUES, where=st.sampled_from(["part", "row", "head"]))
def test_a_hostile_head_is_refused_or_harmless(tmp_path_factory, row, field, value, where) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    source = folder / "m.gguf"
    source.write_bytes(b"x")
    relaid = kept(source)
    relaid.write("a", parts())
    file = files(relaid)[0]
    head, start = read_head(file.read_bytes())
    data = file.read_bytes()[start:]
    if where == "head":
        head = [head, {**head, "parts": value}, {**head, "key": value}, value, [value], {}][field]
    elif where == "row":
        head["parts"][row] = value
    else:
        head["parts"][row][field:] = [value, *head["parts"][row][field + 1 :]]
    file.write_bytes(with_head(head, data))
    found = relaid.read("a")
    assert found is None or all(isinstance(part.data.sum(), np.integer) for part in found)


# ------------------------------------------------------------------------------------------------- room and company


def test_small_models_are_not_kept(source: Path) -> None:
    assert not Relaid(source.parent / "relaid" / "x", source).write("a", parts())
    assert not (source.parent / "relaid").exists()


def test_the_oldest_makes_room(tmp_path: Path) -> None:
    made = []
    for i in range(4):
        source = tmp_path / f"{i}.gguf"
        source.write_bytes(bytes([i]))
        relaid = kept(source, most=60_000)
        relaid.write("a", [Part("x", (), np.full(20_000, i, np.uint8))])
        os.utime(files(relaid)[-1] if i == 0 else relaid.folder / os.listdir(relaid.folder)[0], (100 + i, 100 + i))
        made.append(relaid)
        if i == 1:
            assert made[0].read("a") is not None  # used again: now it is the newest
    assert [relaid.read("a") is not None for relaid in made] == [True, False, False, True]
    assert not kept(tmp_path / "0.gguf", most=10_000).write("b", parts(5) * 2)


def test_a_full_disk_keeps_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaid_module, "SPARE", 1 << 60)
    assert not kept(source).write("a", parts())
    assert files(kept(source)) == []


def test_given_up_writing_is_cleared_away(source: Path) -> None:
    relaid = kept(source)
    relaid.folder.mkdir(parents=True)
    old, new = (relaid.folder / f".{name}.weights.1.part" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    relaid.write("a", parts())
    assert (old.exists(), new.exists()) == (False, True)


def test_a_home_that_cannot_be_written_is_no_error(source: Path) -> None:
    expected = logits(backend("qwen3", None))
    blocked = source.parent / "blocked"
    blocked.write_text("a file where a folder should be")
    relaid = Relaid(blocked / "x", source, least=0)
    assert logits(backend("qwen3", relaid)) == expected
    gone = Relaid(source.parent / "relaid" / "x", source.with_name("gone.gguf"), least=0)
    assert logits(backend("qwen3", gone)) == expected


def test_two_processes_at_once(source: Path) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_relaid import equal, kept, parts
relaid = kept(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    assert relaid.write("a", parts(5))
    assert equal(relaid.read("a"), parts(5))
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(source)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    for one in both:
        assert one.communicate(timeout=60)[1] == ""
        assert one.returncode == 0
    assert len(files(kept(source))) == 1


# ------------------------------------------------------------------------------------------------------ load and rm


def test_load_keeps_and_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Relaid.__init__, "__kwdefaults__", {"beside": None, "variant": "", "least": 0, "most": 1 << 40})
    (tmp_path / "model").mkdir()
    folder = tiny_folder.write(tmp_path / "model")
    home = tmp_path / "home" / "relaid"
    answers = []
    for cache in (False, True, True):
        with api.load(folder, cache=cache, slots=1) as model:
            answers.append(model.generate("some text", max_tokens=8, seed=3).token_ids)
        assert home.exists() == cache
    assert answers[0] == answers[1] == answers[2]
    assert [file.parent for file in home.rglob("*.weights")] == [hub.relaid(folder)]


def test_remove_deletes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path))
    name, package = next(iter(hub.BUILT_IN.items()))
    root = Path("models") / name
    target = tmp_path / root / package.file_name
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x")
    hub._write_record(name, root, target, {target: "0"}, "gguf")
    other = hub.relaid(tmp_path / "other.gguf")
    for folder in (hub.relaid(target), other):
        folder.mkdir(parents=True)
        (folder / "a.weights").write_bytes(b"x")
    hub.remove(name)
    assert not hub.relaid(target).exists()
    assert other.exists()


def test_cache_must_be_a_truth_value(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cache"):
        api.load(tmp_path, cache="no")  # type: ignore[arg-type]
