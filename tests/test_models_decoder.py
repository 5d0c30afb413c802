"""The oracle's own rules: the seed's exact weights, the int8 arithmetic, and that its tests would see a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from outpace.backends.base import Rows
from outpace.backends.reference import ReferenceBackend
from outpace.models import decoder
from outpace.models.names import expected_tensors, is_matrix
from outpace.models.quantise import GROUP, GroupMatrix, quantise_activations, quantise_weights
from outpace.types import ModelError, UsageError
from outpace.weights.tensor import Groups, Tensor
from outpace.weights.weight_map import WeightMap

TOKENS = [3, 17, 66, 5, 5, 41, 0, 22, 9, 33]


def run(model: tuple[Any, tiny.Arrays], precision: Any = "f32") -> np.ndarray:
    backend = ReferenceBackend(model[0], WeightMap.from_tensors(model[1]), precision=precision)
    return backend.forward([Rows(backend.new_slot(), TOKENS)]).logits


def test_seed_weights_follow_the_formula() -> None:
    """Against plain Python integers, at places where 32 bits have wrapped."""
    config, arrays = tiny.seed_model()
    assert set(arrays) == set(expected_tensors(config))
    salts = {
        "model.embed_tokens.weight": 1,
        "model.layers.1.self_attn.q_proj.weight": 301,
        "model.layers.0.mlp.down_proj.weight": 1100,
        "model.layers.1.post_attention_layernorm.weight": 201,
        "lm_head.weight": 3000,
    }
    for name, salt in salts.items():
        flat = arrays[name].reshape(-1)
        for i in (0, 1, 7, len(flat) - 1):
            assert flat[i] == (((i * 2654435761 + salt) % 2**32) >> 8) / 2**24 - 0.5


def test_weights_are_taken_out_and_checked() -> None:
    config, arrays = tiny.random_model("qwen3")
    weights = WeightMap.from_tensors(arrays | {"extra": np.zeros(3, np.float32)})
    ReferenceBackend(config, weights)
    assert list(weights) == ["extra"]
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        ReferenceBackend(config, WeightMap.from_tensors({k: v for k, v in arrays.items() if k != "model.norm.weight"}))
    wrong = arrays | {"lm_head.weight": arrays["lm_head.weight"][:-1]}
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[66, 64\], expected \[67, 64\]"):
        ReferenceBackend(config, WeightMap.from_tensors(wrong))
    with pytest.raises(UsageError, match="precision"):
        ReferenceBackend(config, WeightMap.from_tensors(arrays), precision="int3")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- int8 arithmetic


def test_activation_rule_on_known_values() -> None:
    x = np.zeros(64, np.float32)
    x[:5] = [127.0, 0.5, 1.5, 2.5, -126.5]  # d = 1: halves go to the even neighbour
    q, d = quantise_activations(x)
    assert q.shape == (2, 32)
    assert q[0, :5].tolist() == [127, 0, 2, 2, -126]
    assert d.tolist() == [1.0, 0.0]
    assert not q[1].any()
    assert not quantise_activations(np.full(32, 1e-40, np.float32))[0].any()  # 127 / amax would overflow


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 100), st.floats(-30, 30))
def test_activation_rounding_is_within_half_a_step(seed: int, width: int, log_scale: float) -> None:
    x = (np.random.default_rng(seed).standard_normal(width) * np.exp(log_scale)).astype(np.float32)
    q, d = quantise_activations(x)
    assert q.dtype == d.dtype == np.float32
    assert q.shape == (-(-width // GROUP), GROUP)
    assert np.abs(q).max() == 127
    assert (q == np.rint(q)).all()
    back = (q.astype(np.float64) * d[:, None].astype(np.float64)).reshape(-1)
    assert not back[width:].any()
    step = np.repeat(d, GROUP)[:width]
    assert (np.abs(back[:width] - x) <= 0.5001 * step).all()


@pytest.mark.parametrize("offset", [False, True])
def test_group_product_is_the_integer_sum(offset: bool) -> None:
    random = np.random.default_rng(1)
    groups = Groups(
        random.integers(-128, 128, (7, 96)).astype(np.int8),
        random.random((7, 3)).astype(np.float32),
        random.standard_normal((7, 3)).astype(np.float32) if offset else None,
    )
    x = random.standard_normal(96).astype(np.float32)
    q, d = quantise_activations(x)
    q = q.astype(np.int64)
    expected = np.zeros(7, np.float32)
    for g in range(3):
        w = groups.q[:, g * 32 : (g + 1) * 32].astype(np.int64)
        term = groups.scale[:, g] * (w @ q[g]).astype(np.float32)
        if groups.offset is not None:
            term = term + groups.offset[:, g] * np.float32(q[g].sum())
        expected = expected + d[g] * term
    matrix = GroupMatrix(groups, 96)
    np.testing.assert_array_equal(matrix(x), expected)
    np.testing.assert_array_equal(np.stack([matrix.row(i) for i in range(7)]), groups.f32())


def test_narrow_matrices_are_filled_up_with_zeros() -> None:
    weight = np.random.default_rng(2).standard_normal((5, 40)).astype(np.float32)
    matrix = GroupMatrix(quantise_weights(weight), 40)
    np.testing.assert_allclose(matrix.row(3), weight[3], atol=np.abs(weight).max() / 200)
    x = np.random.default_rng(3).standard_normal(40).astype(np.float32)
    np.testing.assert_allclose(matrix(x), weight @ x, atol=0.2)


def test_int8_uses_the_files_exact_groups() -> None:
    """A Q8_0 matrix keeps its values: its embedding rows are the file's, not rounded again."""
    gguf = pytest.importorskip("gguf")
    config, arrays = tiny.random_model("qwen3")
    name = "model.embed_tokens.weight"
    quantised = gguf.quants.quantize(arrays[name], gguf.GGMLQuantizationType.Q8_0)
    tensors = {k: Tensor.from_array(v) for k, v in arrays.items()}
    tensors[name] = Tensor((67, 64), "Q8_0", quantised.reshape(-1))
    backend = ReferenceBackend(config, WeightMap(tensors), precision="int8")
    taps = backend.forward([Rows(backend.new_slot(), TOKENS)], taps=[-1]).taps[-1]
    np.testing.assert_array_equal(taps, tensors[name].f32()[TOKENS])


def test_int8_is_near_f32_but_not_equal() -> None:
    for variant in tiny.VARIANTS:
        model = tiny.random_model(variant)
        exact, rounded = run(model), run(model, "int8")
        assert 0 < np.abs(exact - rounded).mean() < 0.1 * exact.std(), variant


def test_routers_and_vectors_stay_float32() -> None:
    names = expected_tensors(tiny.random_config("moe_shared"))
    kept = {name.split(".", 3)[-1] for name, shape in names.items() if len(shape) == 2 and not is_matrix(name, shape)}
    assert kept == {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}


# ------------------------------------------------------------------------------------- faults in the oracle would show


def test_an_off_by_one_position_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are relative: a shift of every row is no fault, a shift of the later ones is."""
    model = tiny.random_model("qwen3")
    right, tables = run(model), decoder.rotary_tables
    monkeypatch.setattr(decoder, "rotary_tables", lambda config, at: tables(config, at + 1))
    np.testing.assert_allclose(run(model), right, atol=1e-3)
    monkeypatch.setattr(decoder, "rotary_tables", lambda config, at: tables(config, at + (at > 4)))
    wrong = run(model)
    np.testing.assert_array_equal(wrong[:5], right[:5])
    assert np.abs(wrong[5:] - right[5:]).max(axis=1).min() > 0.1


@pytest.mark.parametrize("width", [4, 6])
def test_an_off_by_one_window_shows(width: int) -> None:
    right = run(tiny.random_model("sliding"))
    assert np.abs(run(tiny.random_model("sliding", sliding_window=width)) - right).max() > 0.1


def test_every_tensor_matters() -> None:
    """A backend that forgot any one tensor would give other numbers."""
    for variant in ("qwen3", "bias", "moe_shared", "mlp_bias"):
        config, arrays = tiny.random_model(variant, num_hidden_layers=2)
        right = run((config, arrays))
        for name, array in arrays.items():
            if ".experts." in name or name.endswith("k_proj.bias"):
                continue  # not every expert is chosen; softmax ignores what all keys share, but for rotation
            changed = run((config, arrays | {name: array[::-1].copy()}))
            assert np.abs(changed - right).max() > 1e-2 or array.shape[0] == 1, name


def test_ties_of_experts_go_to_the_lowest_index() -> None:
    config, arrays = tiny.random_model("moe")
    arrays = {k: (np.zeros_like(v) if k.endswith("mlp.gate.weight") else v) for k, v in arrays.items()}
    without = {k: (np.zeros_like(v) if ".experts.2." in k or ".experts.5." in k else v) for k, v in arrays.items()}
    np.testing.assert_array_equal(run((config, arrays)), run((config, without)))
    without = {k: (np.zeros_like(v) if ".experts.1." in k else v) for k, v in arrays.items()}
    assert np.abs(run((config, arrays)) - run((config, without))).max() > 0.1


def test_expert_weights_scale_multiplies_the_experts() -> None:
    config, arrays = tiny.random_model("moe_scaled")
    assert config.expert_weights_scale == 1.7
    plain, _ = tiny.random_model("moe_scaled", expert_weights_scale=1.0)
    louder = {k: (v * np.float32(1.7) if ".experts." in k and "down_proj" in k else v) for k, v in arrays.items()}
    np.testing.assert_allclose(run((config, arrays)), run((plain, louder)), atol=1e-3)
    assert np.abs(run((config, arrays)) - run((plain, arrays))).max() > 0.1
