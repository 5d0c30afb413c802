"""A model's own weights at 4 bits, rounded by what its inputs are, layers left out; and when they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outpace
import tiny
import tiny_folder
from outpace import self_draft
from outpace.backends import memory
from outpace.backends.base import Rows
from outpace.backends.memory import estimate
from outpace.backends.native import NativeBackend
from outpace.backends.reference import ReferenceBackend
from outpace.models import rounding
from outpace.models.loading import load_model
from outpace.models.names import EMBEDDING, HEAD, expected_tensors
from outpace.models.rounding import DraftWeights, best_q4, with_layers
from outpace.self_draft import kept_layers, pays, smaller
from outpace.types import CapacityError, ModelError, UsageError
from outpace.weights.formats import pack_q4, quantise_q4, ungroup
from outpace.weights.relaid import Relaid
from outpace.weights.tensor import Groups, Tensor
from outpace.weights.weight_map import WeightMap

TEXT = [3, 9, 27, 14, 42, 59, 43, 62, 5, 5, 60, 1]

# ----------------------------------------------------------------------------------------------------------- rounding


def values(groups: Groups) -> np.ndarray:
    """float32 [out, in]."""
    return ungroup(groups.scale, groups.q.reshape(*groups.scale.shape, 32), None).reshape(groups.q.shape)


def squared_error(weight: np.ndarray, rounded: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """By group of 32: float64 [out, groups]."""
    error = (weight.astype(np.float64) - rounded) ** 2 * importance
    return error.reshape(len(weight), -1, 32).sum(axis=2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-30, 4), st.floats(0, 3))
def test_no_scale_that_is_tried_has_a_smaller_error(seed: int, size: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((3, 64)) * 10.0**size).astype(np.float32)
    weight[0, :32] = 0
    importance = np.exp(rng.standard_normal(64) * spread).astype(np.float32)
    groups = best_q4(weight, importance)
    found = values(groups)
    assert np.array_equal(Tensor((3, 64), "Q4_0", pack_q4(groups)).f32(), found)  # a block can hold it
    error = squared_error(weight, found, importance)
    plain = quantise_q4(weight)
    for factor in (None, *rounding.FACTORS):
        scale = plain.scale if factor is None else (plain.scale * factor).astype(np.float16).astype(np.float32)
        wide = np.repeat(scale, 32, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            q = np.where(wide == 0, 0, np.clip(np.rint(weight / wide), -8, 7))
        assert (error <= squared_error(weight, q * wide, importance) * (1 + 1e-4) + 1e-300).all()


def test_inputs_that_matter_are_rounded_best() -> None:
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    importance = np.ones(128, np.float32)
    importance[::8] = 100
    plain, weighed = values(quantise_q4(weight)), values(best_q4(weight, importance))
    errors = [squared_error(weight, rounded, importance).sum() for rounded in (plain, weighed)]
    assert errors[1] < 0.8 * errors[0]


def test_weights_that_are_no_numbers_are_named() -> None:
    weight = np.full((2, 32), np.nan, np.float32)
    with pytest.raises(ModelError, match="tensor bad"):
        best_q4(weight, np.ones(32, np.float32), "bad")


# ------------------------------------------------------------------------------------------------- what inputs are like


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_the_text_is_read_as_the_oracle_reads_it(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, arrays = tiny.random_model(variant)
    taps = list(range(config.num_hidden_layers))
    oracle = ReferenceBackend(config, WeightMap.from_tensors(arrays), precision="f32")
    want = oracle.forward([Rows(oracle.new_slot(), TEXT)], taps).taps
    read = rounding._read
    outputs: list[np.ndarray] = []

    def spy(*args: Any) -> Any:
        x, seen = read(*args)
        outputs.append(x)
        names = {name for name, tensor in args[2].items() if len(tensor.shape) == 2}
        assert seen.keys() == names
        return x, seen

    monkeypatch.setattr(rounding, "_read", spy)
    layers = tuple(taps)
    DraftWeights(config, WeightMap.from_tensors(arrays), TEXT, layers).take_tensor(EMBEDDING)
    for tap in taps:
        np.testing.assert_allclose(outputs[tap], want[tap], rtol=2e-4, atol=2e-5)


def test_squares_are_those_of_the_inputs() -> None:
    config, arrays = tiny.random_model("qwen3")
    tensors = {name: Tensor.from_array(a) for name, a in arrays.items() if name.startswith("model.layers.0.")}
    x = arrays[EMBEDDING][TEXT]
    _, seen = rounding._read(config, 0, tensors, x)
    norm = arrays["model.layers.0.input_layernorm.weight"].astype(np.float64)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + config.rms_norm_eps) * norm
    for name in ("q_proj", "k_proj", "v_proj"):
        squares = seen[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_allclose(squares, (normed**2).sum(axis=0), rtol=1e-4)


# ------------------------------------------------------------------------------------------------- the draft's weights


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_what_is_foretold_is_made_and_only_when_it_is_asked_for(variant: str) -> None:
    config, arrays = tiny.random_model(variant)
    layers = (0, 2)
    source = WeightMap.from_tensors(arrays)
    weights = DraftWeights(config, source, TEXT, layers)
    small = with_layers(config, layers)
    shapes = expected_tensors(small)
    assert set(weights) == set(shapes)
    assert len(source) == len(arrays)  # untouched
    foretold = {name: weights.kind(name) for name in weights}
    need = estimate(small, weights, "int8", 64)
    taken = {name: weights.take_tensor(name) for name in list(weights)}
    assert not source.keys()
    assert {name: tensor.kind for name, tensor in taken.items()} == foretold
    assert {name: tensor.shape for name, tensor in taken.items()} == shapes
    four = {name for name, kind in foretold.items() if kind == "Q4_0"}
    assert {"model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"} <= four
    assert (EMBEDDING if config.tie_word_embeddings else HEAD) in four
    assert config.tie_word_embeddings or EMBEDDING not in four
    norm = "input_layernorm.weight"
    assert np.array_equal(taken[f"model.layers.1.{norm}"].f32(), arrays[f"model.layers.2.{norm}"])
    for name in four:  # near the weights that they were
        old = name.replace("layers.1.", "layers.2.")
        assert np.abs(taken[name].f32() - arrays[old]).max() <= np.abs(arrays[old]).max() * 0.4
    backend = NativeBackend(small, WeightMap(taken), precision="int8")
    assert need.weights == pytest.approx(backend.memory[0], rel=0.1)
    logits = backend.forward([Rows(backend.new_slot(), TEXT)]).logits
    assert np.isfinite(logits).all()


def test_weights_kept_on_the_disk_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, arrays = tiny.random_model("qwen3")
    (tmp_path / "source.gguf").write_bytes(b"any")

    def opened(layers: tuple[int, ...]) -> tuple[np.ndarray, WeightMap]:
        source = WeightMap.from_tensors(arrays)
        relaid = Relaid(tmp_path / "kept" / "x", tmp_path / "source.gguf", variant=f"self {layers}", least=0)
        weights = DraftWeights(config, source, TEXT, layers)
        backend = NativeBackend(with_layers(config, layers), weights, precision="int8", relaid=relaid)
        return backend.forward([Rows(backend.new_slot(), TEXT)]).logits, source

    first, other = opened((0, 1))[0], opened((0, 2))[0]
    assert not np.array_equal(first, other)

    def never(*args: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(rounding, "draft_weights", never)
    for layers, want in (((0, 1), first), ((0, 2), other)):
        logits, source = opened(layers)
        assert np.array_equal(logits, want)
        assert not source.keys()  # let go
    with pytest.raises(AssertionError, match="made again"):
        opened((1, 2))


def test_layers_keep_their_windows_and_experts() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}
    config = tiny.random_config(num_hidden_layers=6, **sliding)
    kept = (0, 3, 5)
    small = with_layers(config, kept)
    assert [small.window(i) for i in range(3)] == [config.window(layer) for layer in kept] == [None, None, 4]
    config = tiny.random_config("moe")
    small = with_layers(config, (1, 2))
    assert [small.is_moe(i) for i in range(2)] == [config.is_moe(1), config.is_moe(2)] == [False, True]
    for wrong in ((), (1, 0), (0, 0), (0, 3), (-1,)):
        with pytest.raises(UsageError, match="layers must be"):
            with_layers(config, wrong)


def test_layers_are_left_out_in_the_middle() -> None:
    assert kept_layers(30, None) == tuple(range(30))
    assert kept_layers(30, 26) == (*range(13), *range(17, 30))
    assert kept_layers(3, 2) == (0, 2)
    assert kept_layers(5, 1) == (0,)
    for wrong in (0, 6, True, 2.0):
        with pytest.raises(UsageError, match=r"draft_layers must be in 1 \.\. 5"):
            kept_layers(5, wrong)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------- load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_any_number_of_layers_changes_no_token(folder: Path, backend: Any) -> None:
    opts = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    with outpace.load(folder, draft="none", backend=backend) as plain:
        want = plain.generate("once upon", **opts).token_ids
    for count in (1, 2, 3):
        with outpace.load(folder, draft="self", draft_layers=count, draft_tokens=3, backend=backend) as model:
            found = model.generate("once upon", **opts)
            assert found.token_ids == want
            assert found.stats.by_source["self"][0] > 0


def test_options_that_do_not_go_together(folder: Path) -> None:
    for more in ({}, {"draft": "auto"}, {"draft": "ngram"}):
        with pytest.raises(UsageError, match=r"draft_layers= and draft='.*' exclude each other: it goes with self"):
            outpace.load(folder, draft_layers=2, **more)  # type: ignore[arg-type]
    for wrong in (0, 4, "2"):
        with pytest.raises(UsageError, match=r"draft_layers must be in 1 \.\. 3"):
            outpace.load(folder, draft="self", draft_layers=wrong)  # type: ignore[arg-type]


def test_the_memory_of_both_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(folder)
    own = estimate(loaded.config, loaded.weights, "int8", loaded.config.max_position_embeddings).total
    monkeypatch.setattr(memory, "available_memory", lambda: own + 1000)
    outpace.load(folder, draft="suffix").close()
    with pytest.raises(CapacityError, match=r"for what drafts for it.*without what drafts for it it would fit"):
        outpace.load(folder, draft="self")
    with pytest.raises(CapacityError, match="for what drafts for it"):
        outpace.load(folder, draft_model=folder)


def test_auto_takes_the_model_itself_where_its_bytes_promise_a_gain(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(**more: Any) -> list[str]:
        with outpace.load(folder, **more) as model:
            return [drafter.name for drafter in model.drafters]

    assert names(precision="f32") == ["suffix"]  # small models never
    monkeypatch.setattr(self_draft, "LEAST", 0)
    assert names(precision="f32") == ["self", "suffix"]
    assert names(precision="int8") == ["suffix"]
    assert names(precision="int4") == ["suffix"]
    assert names(precision="f32", cache=False) == ["suffix"]  # it would be made at every start
    assert names(precision="f32", draft="suffix") == ["suffix"]
    assert names(precision="f32", draft_model=folder) == ["draft_model", "suffix"]
    loaded = load_model(folder)
    whole = estimate(loaded.config, loaded.weights, "f32").total
    monkeypatch.setattr(self_draft, "available_memory", lambda: whole + 1000)
    assert not pays(loaded, "f32")
    assert names(precision="f32") == ["suffix"]
    assert not smaller(loaded, loaded, "int8")
