"""`outpace bench kernels`: the figures hang together. No time is compared with an absolute one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tiny_folder
from outpace import _native
from outpace.backends.base import Rows
from outpace.backends.native import STAGES, NativeBackend
from outpace.bench import kernels, shapes
from outpace.cache import CacheKind
from outpace.cli.app import build
from outpace.config import ModelConfig
from outpace.models.names import expected_tensors
from outpace.types import CapacityError, UsageError

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BIG_BUFFER", 1 << 22)
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


def measured(*args: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(build(), ["bench", "kernels", "--seconds", "0.01", "--threads", "2", *map(str, args)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_json_is_the_last_line_and_holds_what_is_documented() -> None:
    found = measured("--shape", "tiny", "--bits", "4", "--json")
    assert found["model"] == "tiny, 4 bits, random weights"
    assert list(found["pass_ms"]) == [str(n) for n in range(1, 17)]
    for n, ms in found["pass_ms"].items():
        assert 0 < found["pass_min_ms"][n] <= ms
        assert found["pass_ratio"][n] == pytest.approx(ms / found["pass_ms"]["1"])
    assert found["kv_cache"] == "f16"
    assert set(found["decode"]) == set(found["verify"]) == {"0", "1024", "4096"}
    assert found["left_out"] == []
    assert set(found["prefill"]) == {"64", "512"}
    assert found["rounds"] >= 5
    documented = {line.split()[0] for line in (kernels.measure_kernels.__doc__ or "").splitlines() if line[4:5].strip()}
    assert set(found) - {"model", "pass_min_ms", "pass_ratio", "rounds"} <= documented


def test_the_tables_begin_with_the_ceiling(tmp_path: Path) -> None:
    folder = tiny_folder.write(tmp_path)
    result = CliRunner().invoke(
        build(), ["bench", "kernels", str(folder), "--seconds", "0.01", "--context", "0", "--context", "20"]
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["machine", "model", "reading", "int8 peak"]
    assert "decoding after a context, cache in f16" in result.stdout
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["model", "--shape", "tiny"], "not both"),
        (["--bits", "4"], "--shape"),
        (["--shape", "huge"], "unknown shape 'huge'"),
        (["--shape", "tiny", "--bits", "3"], "8 or 4"),
        (["--kind", "q4_k"], "--shape"),
        (["--shape", "tiny", "--bits", "4", "--kind", "q4_0"], "not both"),
        (["--shape", "tiny", "--kind", "q2_k"], "q6_k, f16, bf16, got 'q2_k'"),
        (["--shape", "tiny", "--kind", "q4_k"], "no Q4_K form"),
        (["--shape", "tiny", "--context", "-1"], "negative"),
        (["--shape", "tiny", "--seconds", "0"], "--seconds"),
        (["--shape", "tiny", "--threads", "0"], "threads"),
        (["--shape", "tiny", "--kv-cache", "q4"], "kv_cache must be auto, f32, f16, q8, got 'q4'"),
    ],
)
def test_wrong_usage_is_one_line(args: list[str], part: str) -> None:
    result = CliRunner().invoke(build(), ["bench", "kernels", *args])
    assert result.exit_code == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_random_weights_are_complete_and_of_the_size_that_is_said(bits: int) -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, bits), threads=1)
    matrices = sum(
        np.prod(shape) for name, shape in expected_tensors(TINY).items() if len(shape) == 2 and "embed" not in name
    )
    # One float16 scale for 32 weights; the embedding is not read, the head (96 outputs) fills whole blocks.
    assert target.pass_bytes == matrices * bits / 8 + matrices / 16
    logits = target.forward([Rows(target.new_slot(), [1, 2, 3])]).logits
    assert np.isfinite(logits).all()
    assert logits.std() > 0


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("q4_1", 5), ("q3_k", 4 + 9 / 16), ("q4_k", 4 + 5 / 8), ("q5_k", 5 + 5 / 8), ("Q6_K", 6 + 9 / 16), ("bf16", 16)],
)
def test_random_weights_of_a_kind(kind: str, bits: float) -> None:
    sizes = {name: getattr(TINY, name) for name in TINY.__slots__}
    config = ModelConfig(**{**sizes, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 32})
    precision = "bf16" if kind == "bf16" else "int8"
    target = NativeBackend(config, shapes.random_weights(config, kind), precision=precision, threads=1)
    shapes_read = [s for name, s in expected_tensors(config).items() if len(s) == 2 and "embed" not in name]
    assert target.pass_bytes == sum(np.prod(s) for s in shapes_read) * bits / 8
    logits = target.forward([Rows(target.new_slot(), [1, 2, 3])]).logits
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_the_kind_can_be_named() -> None:
    found = measured("--shape", "tiny", "--kind", "BF16", "--json", "--context", "0")
    assert found["model"] == "tiny, bf16, random weights"


def test_a_tied_head_is_read_and_unused_experts_are_not() -> None:
    small = {name: getattr(TINY, name) for name in TINY.__slots__}
    tied = ModelConfig(**{**small, "tie_word_embeddings": True})
    sparse = ModelConfig(
        **{**small, "architecture": "qwen3_moe", "num_experts": 4, "num_experts_used": 2, "expert_ffn_size": 64}
    )
    read = {
        name: NativeBackend(config, shapes.random_weights(config, 8), threads=1).pass_bytes
        for name, config in {"untied": TINY, "tied": tied, "sparse": sparse}.items()
    }
    per_weight = 1 + 2 / 32
    mlp, experts = 3 * 64 * 128 * per_weight, 2 * 3 * 64 * 64 * per_weight
    router = 64 * 16 * 4  # float32, four outputs in a block of 16
    assert read["tied"] == read["untied"]
    assert read["sparse"] == read["untied"] + 2 * (experts + router - mlp)


def test_stages_add_up_to_the_pass_and_cost_nothing_when_off() -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, 8), threads=2)
    slot = target.new_slot()
    target.forward([Rows(slot, [1])])
    assert set(target.time_stages(True).values()) == {0.0}
    target.forward([Rows(slot, [1, 2])])
    stages = target.time_stages(False)
    assert tuple(stages) == STAGES
    assert all(seconds > 0 for seconds in stages.values())
    target.forward([Rows(slot, [1])])
    assert set(target.time_stages(False).values()) == {0.0}


def test_bits_do_not_depend_on_the_clock() -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, 8), threads=2)
    slot = target.new_slot()
    plain = target.forward([Rows(slot, [5, 6])]).logits
    target.time_stages(True)
    assert (target.forward([Rows(slot, [5, 6])]).logits == plain).all()


def test_jobs_run_in_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    times = kernels.in_turns([("a", lambda: calls.append("a")), ("b", lambda: calls.append("b"))], 0.0, least=3)
    rounds = [set(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert all(found == {"a", "b"} for found in rounds)
    assert {key: len(found) for key, found in times.items()} == {"a": len(rounds) - 1, "b": len(rounds) - 1}
    assert len(rounds) - 1 == 3


def test_the_ceiling_is_measured_and_refuses_nonsense() -> None:
    reader = _native.Reader(1 << 20, 2)
    assert (1 << 20) - 8 * 256 < reader.bytes <= 1 << 20
    reader.read()
    if _native.isa() in ("avx2", "avxvnni", "avx512vnni"):
        assert _native.int8_peak(1, 0.01) > 1e9
    for bytes_, threads in ((0, 1), (1 << 50, 1), (1 << 20, 0), (1 << 20, 1000)):
        with pytest.raises(ValueError, match=r"must be|too small"):
            _native.Reader(bytes_, threads)
    with pytest.raises(ValueError, match="seconds"):
        _native.int8_peak(1, float("nan"))


def test_a_model_that_is_too_small_is_refused() -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, 8), rows=8, threads=1)
    with pytest.raises(UsageError, match="16 rows"):
        kernels.measure_kernels(target, seconds=0.01)


def test_a_context_beyond_the_capacity_is_left_out_and_said() -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, 8), positions=508, threads=1)
    found = kernels.measure_kernels(target, contexts=(0, 500, 501), seconds=0.01)
    assert list(found["decode"]) == [0, 500]
    assert found["left_out"] == ["context 501: the model was opened for 508"]


@pytest.mark.parametrize("kv_cache", ["f32", "f16", "q8"])
def test_a_filled_slot_is_long_and_works(kv_cache: CacheKind) -> None:
    target = NativeBackend(TINY, shapes.random_weights(TINY, 8), threads=2, slots=2, kv_cache=kv_cache)
    slot = target.new_slot()
    target.fill_slot(slot, 1500)
    assert target.length(slot) == 1500
    logits = target.forward([Rows(slot, [1, 2])]).logits
    assert np.isfinite(logits).all()
    target.commit(slot, [0])
    with pytest.raises(UsageError, match="not empty"):
        target.fill_slot(slot, 3)
    other = target.new_slot()
    for length, error in ((-1, UsageError), (TINY.max_position_embeddings + 1, CapacityError)):
        with pytest.raises(error):
            target.fill_slot(other, length)
    target.fill_slot(other, 1000)  # the same numbers, whatever the length
    target.truncate(slot, 1000)
    a, b = (target.forward([Rows(s, [7])]).logits for s in (slot, other))
    assert (a == b).all()


def test_starts_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    folder = tiny_folder.write(tmp_path)
    result = CliRunner().invoke(build(), ["bench", "start", str(folder), "--runs", "2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found["modes"]) == {"second start", "without the cache", "libraries"}
    for figures in found["modes"].values():
        for name in ("first_token_s", "whole_s", "processor_s"):
            assert len(figures[name]["samples"]) == 2
            assert 0 < figures[name]["least"] <= figures[name]["median"]
        assert figures["first_token_s"]["least"] <= figures["whole_s"]["least"]
    result = CliRunner().invoke(build(), ["bench", "start", str(folder), "--runs", "0"])
    assert result.exit_code == 2
