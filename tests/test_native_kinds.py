"""Weights that the native core holds as the file has them (k-quants, float16, bfloat16): values, rule and bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outpace
import tiny
from kinds import LARGE, SUPERS, TOKENS, inputs, logits, model, product, quantised, supers
from outpace import _native
from outpace.backends import native
from outpace.backends.base import Rows
from outpace.backends.native import NativeBackend
from outpace.backends.reference import ReferenceBackend
from outpace.models.export import export_gguf
from outpace.models.loading import load_model
from outpace.models.quantise import GroupMatrix, HalfGroupMatrix, held, matrix
from outpace.types import UsageError
from outpace.weights.formats import KINDS, Supers, round_bfloat16
from outpace.weights.gguf import GGUFFile, write_gguf
from outpace.weights.relaid import Relaid
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap
from test_native import run_python, same
from test_relaid import fresh_model

# ------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("kind", SUPERS)
def test_product_follows_the_rule(kind: str) -> None:
    tensor, x = quantised(kind, (37, 768)), inputs(5, 768)
    x[1] = 0
    x[2, :32] = 1e-38  # 127 / amax overflows
    oracle = matrix(tensor, "int8")
    assert isinstance(oracle, HalfGroupMatrix if kind in ("Q3_K", "Q6_K") else GroupMatrix)
    expected = np.stack([oracle(row) for row in x])
    y = product(x, supers(tensor))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    # The rounding of the activations is all that lies between it and the file's values.
    near = x.astype(np.float64) @ tensor.f32().astype(np.float64).T
    assert np.abs(y - near).max() < 0.02 * np.abs(near).max()


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_products_with_minima_are_those_of_the_group_form(kind: str) -> None:
    tensor, x = quantised(kind, (37, 512)), inputs(7, 512)
    groups = tensor.groups()
    assert groups is not None
    assert same(product(x, supers(tensor)), _native.matmul_int8(x, groups.q, groups.scale, groups.offset))


@pytest.mark.parametrize("kind", SUPERS)
def test_bits_do_not_depend_on_rows_or_threads(kind: str) -> None:
    s, x = supers(quantised(kind, (53, 512))), inputs(40, 512)
    expected = np.concatenate([product(x[r : r + 1], s) for r in range(40)])
    for rows in [*range(1, 21), 40]:
        assert same(product(x[:rows], s, 1 + rows % 3), expected[:rows]), rows


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K"])
def test_the_largest_whole_numbers_are_exact(kind: str) -> None:
    """All weights, scales and activations at their ends: the sum of a group is just below 2^24."""
    shape = (16, 256)
    q = np.full(shape, -32 if kind == "Q6_K" else -4, np.int8)
    scale = np.full((16, 16), -128 if kind == "Q6_K" else -32, np.int8)
    d = np.full((16, 1), 0x3C00, np.uint16)
    x = np.full((2, 256), 127, np.float32)
    x[1, ::2] = -127
    s = Supers(kind.lower(), q, d, scale, None, None)
    assert same(product(x, s), np.stack([HalfGroupMatrix(s)(row) for row in x]))
    assert product(x, s)[0, 0] == 127 * 256 * float(q[0, 0]) * float(scale[0, 0])


@pytest.mark.parametrize("kind", SUPERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_factor_stays_visible_in_its_output_alone(kind: str, bad: float) -> None:
    s, x = supers(quantised(kind, (20, 512))), inputs(3, 512)
    clean = product(x, s)
    for factors in filter(lambda f: f is not None, (s.d, s.dmin)):
        before = factors[17, 1]
        factors[17, 1] = np.float16(bad).view(np.uint16)
        damaged = product(x, s)
        factors[17, 1] = before
        assert not np.isfinite(damaged[:, 17]).any()
        assert same(np.delete(damaged, 17, axis=1), np.delete(clean, 17, axis=1))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([*SUPERS, "f16", "bf16"]),
    rows=st.integers(1, 40),
    out=st.integers(1, 70),
    width=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_products_of_any_shape(kind: str, rows: int, out: int, width: int, seed: int) -> None:
    x = inputs(rows, 256 * width, seed)
    if kind in SUPERS:
        tensor = quantised(kind, (out, 256 * width), seed)
        y, row = product(x, supers(tensor), 2), seed % rows
        expected = matrix(tensor, "int8")(x[row])
        np.testing.assert_allclose(y[row], expected, atol=1e-5 * max(1e-3, np.abs(expected).max()))
        return
    x = x[:, : 100 * width].copy()
    weight = np.random.default_rng(seed).standard_normal((out, 100 * width)).astype(np.float32)
    bits = round_bfloat16(weight) if kind == "bf16" else weight.astype(np.float16).view(np.uint16)
    wide = Tensor(bits.shape, kind.upper(), bits.reshape(-1).view(np.uint8)).f32()
    assert same(_native.matmul_16(x, kind, bits, 2), _native.matmul_f32(x, wide))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_every_value_of_two_bytes_is_widened_exactly(kind: str) -> None:
    bits = np.arange(1 << 16).astype(np.uint16).reshape(1 << 12, 16)
    wide = Tensor(bits.shape, kind, bits.reshape(-1).view(np.uint8)).f32()
    usual = np.isfinite(wide).all(axis=1)
    x = np.eye(16, dtype=np.float32)
    assert np.array_equal(_native.matmul_16(x, kind.lower(), bits).T[usual], wide[usual])
    assert not np.isfinite(_native.matmul_16(x, kind.lower(), bits).T[~usual]).all(axis=1).any()


def test_arrays_that_do_not_fit_are_refused() -> None:
    x, s = inputs(2, 512), supers(quantised("Q4_K", (16, 512)))
    for wrong in (
        (x[:, :256].copy(), "q4_k", s.q, s.d, s.scale, s.dmin, s.minimum),
        (x[:0], "q4_k", s.q, s.d, s.scale, s.dmin, s.minimum),
        (x, "q4_0", s.q, s.d, s.scale, s.dmin, s.minimum),
        (x, "bf16", s.q, s.d, s.scale, s.dmin, s.minimum),
        (x, "q6_k", s.q, s.d, s.scale, s.dmin, s.minimum),
        (x, "q4_k", s.q, s.d, s.scale, None, None),
        (x, "q4_k", s.q, s.d, s.scale, s.dmin, None),
        (x, "q4_k", s.q, s.d[:, :1].copy(), s.scale, s.dmin, s.minimum),
        (x, "q4_k", s.q, s.d, s.scale[:8].copy(), s.dmin, s.minimum),
        (x, "q4_k", s.q, s.d, s.scale, s.dmin, s.minimum[:, :8].copy()),
        (x, "q4_k", s.q + np.int8(1), s.d, s.scale, s.dmin, s.minimum),  # 16 has no four bits
        (x[:, :300].copy(), "q4_k", s.q[:, :300].copy(), s.d, s.scale, s.dmin, s.minimum),
    ):
        with pytest.raises(ValueError, match=r"."):
            _native.matmul_super(*wrong)
    for wrong in ((x, "f32", s.q.view(np.uint8).astype(np.uint16)), (x, "q4_k", s.q.astype(np.uint16))):
        with pytest.raises(ValueError, match=r"no such kind"):
            _native.matmul_16(*wrong)


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("variant", ["tied", "moe_shared"])
@pytest.mark.parametrize("kind", [*SUPERS, "IQ4_NL", "IQ4_XS"])
def test_models_agree_with_the_oracle_and_embed_the_files_values(kind: str, variant: str) -> None:
    changes = {"expert_ffn_size": 256, "shared_expert_ffn_size": 256} if variant == "moe_shared" else {}
    table = model(kind, variant, **changes)[1].take("model.embed_tokens.weight")[0]
    results = []
    for make in (ReferenceBackend, NativeBackend):
        config, weights = model(kind, variant, **changes)
        backend = make(config, weights, precision="int8")
        found = backend.forward([Rows(backend.new_slot(), TOKENS)], taps=(-1,))
        assert same(found.taps[-1], table[TOKENS])
        results.append(found.logits)
    # As in test_native.py: a rounding edge may tip a few activations.
    error = np.abs(results[1] - results[0]).max(axis=1) / np.abs(results[0]).max()
    assert np.mean(error < 2e-5) > 0.1
    assert error.max() < 0.06


@pytest.mark.parametrize("variant", ["tied", "moe_shared", "bias"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_bf16_gives_the_bits_of_f32_at_half_the_bytes(kind: str, variant: str) -> None:
    source = "BF16" if kind == "F32" else kind
    config, halves = model(source, variant)
    _, floats = model(source, variant)
    if kind == "F32":  # rounded to bfloat16 while it is loaded
        config, arrays = tiny.random_model(variant, **LARGE)
        halves = WeightMap.from_tensors(arrays)
    wide = NativeBackend(config, floats, precision="f32", threads=1)
    narrow = NativeBackend(config, halves, precision="bf16", kv_cache="f32", threads=2)
    assert narrow.memory[0] < 0.6 * wide.memory[0]
    expected = logits(wide)
    assert same(logits(narrow), expected)
    slot = narrow.new_slot()
    for row, token in enumerate(TOKENS):
        assert same(narrow.forward([Rows(slot, [token])]).logits[0], expected[row])
        narrow.commit(slot, [0])
    config, halves = model(source, variant)
    oracle = logits(ReferenceBackend(config, halves, precision="bf16", kv_cache="f32"))
    np.testing.assert_allclose(expected, oracle, atol=2e-5 * np.abs(oracle).max())


def test_bf16_refuses_what_is_quantised() -> None:
    config, weights = model("Q4_K")
    with pytest.raises(UsageError, match="bf16 is for files of floats; for Q4_K use int8"):
        NativeBackend(config, weights, precision="bf16")


def test_rounding_to_bfloat16_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, np.array([np.nan, np.inf, -np.inf, 0, -0.0, 3.4e38, 1e-45, 1.00390625], "f4")])
    want = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = round_bfloat16(values)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("kind", [*SUPERS, "F16", "BF16"])
def test_kept_weights_give_the_same_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"x" * 4096)
    precision = "int8" if kind in SUPERS else "bf16"
    laid: list[str] = []
    put = native.put
    monkeypatch.setattr(native, "put", lambda core, name, *rest: (laid.append(name), put(core, name, *rest)))
    results = []
    for _ in range(2):
        config, weights = model(kind)
        relaid = Relaid(tmp_path / "relaid" / "model", source, least=0)
        backend = NativeBackend(config, weights, precision=precision, relaid=relaid)  # type: ignore[arg-type]
        results.append((logits(backend).tobytes(), backend.memory[0], len(laid)))
        laid.clear()
    assert results[0][:2] == results[1][:2]
    assert (results[0][2] > 0, results[1][2]) == (True, 0)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.integers(-2, 12),
    out=st.integers(-1, 40),
    width=st.sampled_from([1, 16, 31, 32, 64, 255, 256, 257, 512]),
    half=st.integers(0, 1),
    offset=st.integers(0, 1),
    base=st.sampled_from([0, -4, -8, -32, -128]),
    size=st.integers(0, 1 << 16),
)
def test_any_form_is_refused_or_computes(
    kind: int, out: int, width: int, half: int, offset: int, base: int, size: int
) -> None:
    """Placed bytes that the core takes are exactly those of the form: none of them is read beyond its end."""
    core = fresh_model()
    room = np.zeros(size // 32 * 32 + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][: size // 32 * 32]
    try:
        core.put_packed("x", [kind, out, width, half, offset, base], room)
    except (ValueError, TypeError):
        return
    blocks = -(-out // 16)
    bits = {1: 32, 2: 8, 3: 4, 4: 16, 5: 16, 6: 4, 7: 4, 8: 5, 9: 6}[kind]
    assert room.nbytes >= blocks * 16 * width * bits / 8


def test_a_gguf_file_of_q4_k_and_q6_k_answers_as_the_oracle(tmp_path: Path) -> None:
    """The usual mixture of k-quants, embedding in Q6_K and tied."""
    from test_export import write_folder  # brings torch, which the sanitizers' run of this file does without

    write_folder(tmp_path / "model", "tied", **LARGE)
    export_gguf(load_model(tmp_path / "model"), "q8", tmp_path / "q8.gguf")
    file = GGUFFile.open(tmp_path / "q8.gguf")
    tensors = {}
    for i, (name, tensor) in enumerate(file.tensors.items()):
        kind = "Q6_K" if name.endswith(("token_embd.weight", "ffn_down.weight", "attn_v.weight")) else "Q4_K"
        gain = 3.0 if name == "token_embd.weight" else 0.7
        tensors[name] = tensor if tensor.kind == "F32" else quantised(kind, tensor.shape, i, gain)  # type: ignore[arg-type]
    write_gguf(tmp_path / "k.gguf", dict(file.metadata), tensors)
    reader = gguf.GGUFReader(tmp_path / "k.gguf")
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    answers = []
    for backend in ("native", "reference"):
        with outpace.load(tmp_path / "k.gguf", backend=backend, cache=False) as opened:  # type: ignore[arg-type]
            answers.append(opened.generate("salt and", max_tokens=12, temperature=0).token_ids)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3
    loaded = load_model(tmp_path / "k.gguf")
    assert np.array_equal(loaded.weights.take("model.embed_tokens.weight")[0], values["token_embd.weight"])


_PRINT_BITS = """
import hashlib
import numpy as np
import kinds as t
from outpace.backends.native import NativeBackend
digest = hashlib.sha256()
for kind in t.SUPERS:
    digest.update(t.product(t.inputs(30, 512), t.supers(t.quantised(kind, (20, 512))), 2).tobytes())
for kind, precision in (("Q4_K", "int8"), ("Q6_K", "int8"), ("F16", "bf16"), ("BF16", "bf16")):
    small = t.model(kind, num_hidden_layers=1)
    digest.update(t.logits(NativeBackend(*small, precision=precision), t.TOKENS[:5]).tobytes())
print(t._native.isa(), digest.hexdigest())
"""


def test_every_kernel_family_gives_the_same_bits() -> None:
    digests = {}
    for isa in _native.isas():
        done = run_python(_PRINT_BITS, OUTPACE_ISA=isa)
        assert done.returncode == 0, done.stderr
        name, digests[isa] = done.stdout.split()
        assert name == isa
    assert len(set(digests.values())) == 1, digests


def test_what_is_held() -> None:
    for kind in KINDS:
        if KINDS[kind].decode is None:
            continue
        tensor = (
            quantised(kind, (16, 256))
            if KINDS[kind].block > 1
            else Tensor((16, 256), kind, np.zeros(16 * 256 * KINDS[kind].size, np.uint8))
        )
        assert isinstance(held(tensor, "int8"), Supers) == (kind in SUPERS)
        assert held(tensor, "f32").kind == "F32"  # type: ignore[union-attr]
