"""The memory foretold is the memory taken, and what cannot fit is refused with what would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

import outpace
import tiny
import tiny_folder
from heads_files import D2T, HEADS, TARGET, TARGET_ARRAYS, random_head
from heads_files import _native as native_names
from outpace import self_draft
from outpace.backends import memory
from outpace.backends.base import Rows
from outpace.backends.head import HeadRows
from outpace.backends.memory import available_memory, check_fits, estimate, estimate_head, step_bytes
from outpace.backends.native import NativeBackend
from outpace.backends.running_head import run_head
from outpace.cache import CacheOption
from outpace.cli.app import build
from outpace.config import ModelConfig
from outpace.heads.config import HeadConfig
from outpace.models.loading import load_model
from outpace.models.names import expected_tensors, is_matrix
from outpace.models.quantise import held_kind
from outpace.types import CapacityError
from outpace.weights.formats import KINDS
from outpace.weights.safetensors import read_safetensors, write_safetensors
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap


def compare(
    config: ModelConfig, weights: WeightMap, precision: str, tokens: int = 100, kv_cache: CacheOption = "auto"
) -> None:
    """The estimate against the backend's own figures."""
    need = estimate(config, weights, precision, tokens, kv_cache)
    backend = NativeBackend(config, weights, precision=precision, kv_cache=kv_cache)  # type: ignore[arg-type]
    slot = backend.new_slot()
    backend.forward([Rows(slot, [1] * tokens)])
    backend.commit(slot, range(tokens))
    held, cache = backend.memory
    assert need.weights == pytest.approx(held, rel=0.1)
    assert need.cache == cache
    assert need.total == need.weights + need.cache + need.activations


@pytest.mark.parametrize("precision", ["int8", "f32"])
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_tiny_models(variant: str, precision: str) -> None:
    config, arrays = tiny.random_model(variant)
    compare(config, WeightMap.from_tensors(arrays), precision)


def test_odd_widths_and_heads() -> None:
    config, arrays = tiny.random_model("qwen3", vocab_size=257, intermediate_size=72, head_dim=20)
    for precision in ("int8", "f32"):
        compare(config, WeightMap.from_tensors(arrays), precision)


@pytest.mark.parametrize("kv_cache", ["f32", "f16", "q8"])
@pytest.mark.parametrize("head_dim", [2, 32, 80, 128])
def test_every_kind_of_cache(head_dim: int, kv_cache: CacheOption) -> None:
    config, arrays = tiny.random_model("qwen3", head_dim=head_dim)
    compare(config, WeightMap.from_tensors(arrays), "int8", kv_cache=kv_cache)
    per_token = {
        kind: estimate(config, WeightMap.from_tensors(arrays), "int8", 64, kind).cache_per_token
        for kind in ("f32", "f16", "q8")
    }
    assert per_token["f16"] * 2 == per_token["f32"]
    if head_dim >= 32:
        assert per_token["q8"] < 0.58 * per_token["f16"]


FLOATS = ["F32", "F16", "BF16"]
QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [*((kind, p) for kind in FLOATS for p in ("int8", "bf16", "f32")), *((kind, "int8") for kind in QUANTISED)],
)
def test_every_kind_of_file(kind: str, precision: str) -> None:
    config, arrays = tiny.random_model("qwen3", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    random = np.random.default_rng(0)

    def tensor(name: str, array: np.ndarray) -> Tensor:
        if not is_matrix(name, array.shape):
            return Tensor.from_array(array)
        try:
            data = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        except NotImplementedError:  # the k-quants: any bytes with finite scales
            blocks = random.integers(0, 60, (array.size // KINDS[kind].block, KINDS[kind].size), dtype=np.uint8)
            data = blocks
        return Tensor(array.shape, kind, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    weights = WeightMap({name: tensor(name, array) for name, array in arrays.items()})
    need = estimate(config, weights, precision)
    held = NativeBackend(config, weights, precision=precision).memory[0]  # type: ignore[arg-type]
    assert need.weights == pytest.approx(held, rel=0.02)
    if kind in ("Q4_K", "Q6_K"):  # as in the file, but for the scales, which have whole bytes
        assert held < 1.05 * sum(
            KINDS[kind].size * a.size / 256 if a.ndim == 2 else 4 * a.size for a in arrays.values()
        )


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])  # of the target's head, whose rows a small vocabulary takes
@pytest.mark.parametrize("precision", ["int8", "int4", "bf16", "f32"])
@pytest.mark.parametrize("name", [*HEADS, "eagle3 of the target's head"])
def test_heads(name: str, precision: Any, kind: str) -> None:
    config = HEADS.get(name) or replace(HEADS["eagle3"], own_lm_head=False)
    whole = tiny.random_model(num_hidden_layers=8, seed=3)[1]["lm_head.weight"]
    rows = len(whole) * whole.shape[1] // KINDS[kind].block
    lm_head = Tensor(whole.shape, kind, np.full(rows * KINDS[kind].size, 16, np.uint8))
    if precision == "bf16" and kind == "Q8_0":
        return  # is refused
    weights = WeightMap.from_tensors(random_head(config))
    own = {tensor: Tensor.from_array(array) for tensor, array in random_head(config).items()}
    target = NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision=precision)
    assert target.head_precision == (precision, precision)
    need = estimate_head(config, weights, kind, target.head_precision, 100)
    small = config.draft_vocab_size < TARGET.vocab_size
    head = run_head(target, config, own, lambda: {"lm_head.weight": lm_head}, D2T if small else None)
    slot = head.new_slot()
    features = np.ones((100, config.feature_width), np.float32)
    if config.algorithm == "dflash":
        head.read(slot, features)
    else:
        head.forward([HeadRows(slot, [1] * 100, features)])
        head.commit(slot, range(100))
    held, cache = head.memory  # type: ignore[attr-defined]
    assert need.weights == pytest.approx(held, rel=0.08)  # vectors count in the forecast alone
    assert need.cache == cache
    assert need.precision == precision
    step = step_bytes(config, weights, kind, target.head_precision, held_kind("F32", precision))
    assert step == pytest.approx(head.pass_bytes, rel=0.02)  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["int8", "f32"])
def test_the_real_model(smollm2: Path, precision: str) -> None:
    loaded = load_model(smollm2)
    compare(loaded.config, loaded.weights, precision, tokens=200)


# -------------------------------------------------------------------------------------------------------- the machine


def test_what_the_machine_has_is_about_what_linux_says() -> None:
    pytest.importorskip("resource")
    found = available_memory()
    assert found is None or 10**7 < found < 2**50


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_cut_it(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "memory" if version == 1 else tmp_path
    inner = base / "outer" / "inner"
    inner.mkdir(parents=True)
    limit, used, cached = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    of = tmp_path / "cgroup"
    of.write_text("9:name=systemd:/\n8:cpu,memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n")
    assert memory._groups(tmp_path, of) == []
    (inner / limit).write_text("1000\n")
    (inner / used).write_text("700\n")
    assert memory._groups(tmp_path, of) == [300]
    (inner / "memory.stat").write_text(f"cache 9\n{cached} 50\n")
    assert memory._groups(tmp_path, of) == [350]
    (inner.parent / limit).write_text("900\n")  # the group around it
    (inner.parent / used).write_text("800\n")
    assert sorted(memory._groups(tmp_path, of)) == [100, 350]
    (inner.parent / limit).write_text("max\n")
    assert memory._groups(tmp_path, of) == [350]
    of.write_text("8:memory:/a/host/s/path\n" if version == 1 else "0::/a/host/s/path\n")
    assert memory._groups(tmp_path, of) == []
    (base / limit).write_text("500\n")  # in a container the limits lie at the root
    (base / used).write_text("100\n")
    assert memory._groups(tmp_path, of) == [400]
    monkeypatch.setattr(memory, "_groups", lambda: [400])
    assert available_memory() == 400


# ----------------------------------------------------------------------------------------------------------- refusing


def have(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: count)


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.random_config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, max_position_embeddings=32768
    )
    shapes = expected_tensors(config)
    weights = WeightMap({name: Tensor(s, "F32", np.zeros(4 * int(np.prod(s)), np.uint8)) for name, s in shapes.items()})

    def refusal(available: int, precision: str, context: int | None) -> str:
        have(monkeypatch, available)
        with pytest.raises(CapacityError, match=r"^some/model needs .* are missing; ") as caught:
            check_fits("some/model", config, weights, precision, context)
        assert "\n" not in str(caught.value)
        return str(caught.value).split("; ")[-1]

    for precision in ("int8", "f32"):
        need = estimate(config, weights, precision, 2048)
        have(monkeypatch, need.total)
        check_fits("some/model", config, weights, precision, None)
        have(monkeypatch, None)  # nothing is known
        check_fits("some/model", config, weights, precision, None)
    # A long context: a shorter one fits, and that is true of the one which is named.
    room = estimate(config, weights, "int8", 5000).total
    advice = refusal(room, "int8", 32768)
    found = re.fullmatch(r"--context (\d+) would fit", advice)
    assert found is not None
    assert 2048 < int(found[1]) <= 5000
    check_fits("some/model", config, weights, "int8", int(found[1]))
    # The weights alone are too large in float32.
    assert refusal(estimate(config, weights, "int8", 2048).total, "f32", None) == "--precision int8 would fit"
    # ... and in 8 bits.
    assert estimate(config, weights, "int8", 64).total > estimate(config, weights, "int8", 1).weights
    small = estimate(config, weights, "int8", 1).weights
    assert "4-bit file (outpace quantize --to q4)" in refusal(small, "int8", 64)
    assert "use a smaller model" in refusal(1000, "int8", 64)
    assert "use a smaller model" in refusal(1000, "f32", None)


def test_load_and_the_command_line_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder.write(tmp_path)
    have(monkeypatch, 1000)
    with pytest.raises(CapacityError, match="are missing"):
        outpace.load(folder)
    result = CliRunner().invoke(build(), ["generate", "x", "--model", str(folder)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"outpace: {folder} needs ")
    have(monkeypatch, 10**9)
    with outpace.load(folder) as model:
        assert model.generate("x", max_tokens=1).token_ids


@pytest.mark.parametrize("what", ["head", "head inside", "draft_model"])
def test_what_drafts_is_part_of_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """With exactly what both need it loads, and the second is not judged again by what the first has left; with a
    little less it is refused in a line that names what drafts."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = tiny_folder.write(tmp_path / "model")
    loaded = load_model(folder)
    more: dict[str, Any] = {}
    if what == "draft_model":
        (tmp_path / "small").mkdir()
        more["draft_model"] = tiny_folder.write(tmp_path / "small")
        beside = [estimate(loaded.config, loaded.weights, "int8", tokens).total for tokens in (64, 256)]
    else:
        layers = replace(tiny_folder.CONFIG, num_hidden_layers=1)
        head = HeadConfig(
            algorithm="mtp", layers=layers, taps=(3,), norm_output=True, target_layers=3, target_hidden_size=64,
            draft_vocab_size=layers.vocab_size,
        )  # fmt: skip
        own = WeightMap.from_tensors(random_head(head))
        beside = [estimate_head(head, own, "F32", ("int8", "int8"), tokens).total for tokens in (64, 256)]
        if what == "head":
            more["head"] = tmp_path / "mtp.safetensors"
            write_safetensors(more["head"], native_names(random_head(head)))
        else:
            whole = {name: tensor.f32() for name, tensor in read_safetensors(folder).items()}
            write_safetensors(folder / "model.safetensors", whole | native_names(random_head(head)))
    have(monkeypatch, 10**9)
    facts = json.loads(CliRunner().invoke(build(), ["info", str(folder), "--json"]).stdout)["memory"]
    assert facts["head"] == (beside[1] if what == "head inside" else None)
    for context, both in ((64, beside[0]), (None, beside[1])):
        need = estimate(loaded.config, loaded.weights, "int8", context or 256).total + both
        if what == "head inside" and context is None:
            assert facts["total"] == need
        have(monkeypatch, need)
        outpace.load(folder, context=context, cache=False, **more).close()
        have(monkeypatch, need - 1)
        with pytest.raises(
            CapacityError, match=r"for what drafts for it.*without what drafts for it it would fit"
        ) as e:
            outpace.load(folder, context=context, cache=False, **more)
        assert str(e.value).startswith(f"{folder} needs ")
        outpace.load(folder, context=context, cache=False, draft="suffix").close()


def test_info_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder.write(tmp_path)

    def info(*args: str) -> Any:
        return CliRunner().invoke(build(), ["info", str(folder), *args])

    have(monkeypatch, 10**9)
    facts = json.loads(info("--json").stdout)["memory"]
    loaded = load_model(folder)
    need = estimate(loaded.config, loaded.weights, "int8")
    assert facts == {
        "precision": "int8",
        "kv_cache": "f16",
        "context": 256,
        "weights": need.weights,
        "cache_per_token": need.cache_per_token,
        "cache": need.cache,
        "activations": need.activations,
        "head": None,
        "total": need.total,
        "self_draft": self_draft.memory(loaded).total,
        "available": 10**9,
        "fits": True,
    }
    wide = json.loads(info("--json", "--precision", "f32", "--context", "64").stdout)["memory"]
    assert wide["weights"] > 2 * facts["weights"]
    assert wide["cache"] == 64 * 2 * facts["cache_per_token"]
    assert json.loads(info("--json", "--precision", "int4").stdout)["memory"]["self_draft"] is None
    small = json.loads(info("--json", "--kv-cache", "q8").stdout)["memory"]
    assert small["kv_cache"] == "q8"
    assert small["cache"] < 0.75 * facts["cache"]  # head_dim 16: a scale for every 16 numbers
    parts = r"weights .* cache .* in f16 for 256 tokens .*; --draft self adds .*; 1.0 GB are available, fits"
    line = rf"\nmemory +\d.* in int8: {parts}\n"
    assert re.search(line, info().stdout)
    have(monkeypatch, 1000)
    assert "1.0 kB are available: " in info().stdout
    assert info().stdout.endswith(" are missing\n")
    have(monkeypatch, None)
    assert json.loads(info("--json").stdout)["memory"]["fits"] is None
    assert info("--context", "257").exit_code == 2
    assert info("--precision", "int3").exit_code == 2
    assert "kv_cache must be" in info("--kv-cache", "q4").stderr
