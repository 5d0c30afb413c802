"""`outpace export`: what is written loads as the same head in every layout, or is refused by the field's name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from heads_files import D2T, HEADS, LAYOUTS, LLAMA3, TARGET, TARGET_ARRAYS, d2t, hf, random_head, shared_tensors
from heads_oracle import draft, extend, target_id
from outpace.cli.app import build
from outpace.config import RopeScaling
from outpace.heads.config import HeadConfig
from outpace.heads.export import DTYPES, export_head, head_files
from outpace.heads.loading import LoadedHead, load_head
from outpace.heads.reference import make_head
from outpace.models.export import lost
from outpace.models.rotary import rotary_frequencies
from outpace.types import CapacityError, ModelError, UsageError
from outpace.weights.safetensors import write_safetensors
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=24.0, attention_factor=1.25)
FACTORS = RopeScaling(kind="factors", factors=(1.0,) * 8)
_LLAMA, _QWEN3 = HEADS["eagle3"].layers, HEADS["mtp"].layers
PLAIN = HEADS["eagle3"]


def drafts(head: Any) -> list[np.ndarray]:
    """Logits of a few slots and of a greedy draft after them."""
    random = np.random.default_rng(9)
    features = random.standard_normal((4, head.config.feature_width)).astype(np.float32)
    cache = head.new_cache(32)
    slots = extend(head, features, [int(t) for t in random.integers(0, 67, 4)], cache)
    guesses = draft(head, slots, 4, lambda logits: target_id(head, int(np.argmax(logits))), cache)
    return [slots.logits, *(guess.logits for guess in guesses)]


def loaded_head(loaded: LoadedHead) -> Any:
    tensors = shared_tensors(loaded, WeightMap.from_tensors(TARGET_ARRAYS), TARGET)
    return make_head(loaded.config, tensors, loaded.d2t)


def same(config: HeadConfig, loaded: LoadedHead) -> None:
    for each in fields(HeadConfig):
        if each.name != "layers":
            assert getattr(loaded.config, each.name) == getattr(config, each.name), each.name
    assert set(lost(config.layers, loaded.config.layers)) <= {"tie_word_embeddings"}
    for ours, theirs in zip(rotary_frequencies(config.layers), rotary_frequencies(loaded.config.layers), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@st.composite
def eagles(draw: st.DrawFn, layout: str) -> HeadConfig:
    """EAGLE-3 heads that a layout has a place for."""
    flag = lambda: draw(st.booleans())  # noqa: E731
    whole, free = layout == "gguf", layout == "speculators"
    heads = draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    more: dict[str, Any] = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8}
    kind = draw(st.sampled_from(["llama", "qwen3"])) if free else "llama"
    bias = not whole and flag()
    layers = replace(
        _LLAMA if kind == "llama" else _QWEN3,
        rope_scaling=draw(st.sampled_from([None, LLAMA3, YARN, RopeScaling(kind="linear", factor=2.0)])),
        num_hidden_layers=draw(st.integers(1, 3)) if free else 1,
        attention_bias=bias, attention_out_bias=bias, mlp_bias=kind == "llama" and not whole and flag(),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])), rope_theta=draw(st.sampled_from([1e4, 123456.789])),
        intermediate_size=draw(st.sampled_from([32, 40])), **more,
    )  # fmt: skip
    if kind == "qwen3" and flag():
        layers = replace(layers, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    small = flag()
    count = 3 if whole else draw(st.integers(1, 4))
    taps = draw(st.lists(st.integers(-1, 8), min_size=count, max_size=count, unique=True))
    return replace(
        PLAIN, layers=layers, taps=tuple(taps), draft_vocab_size=15 if small else 67, own_lm_head=small or flag(),
        own_embedding=flag(), norm_before_residual=flag(), norm_output=not whole and flag(),
        feature_norm="none" if whole else draw(st.sampled_from(["none", "whole", "each"])),
    )  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> HeadConfig:
    """DFlash and DSpark heads."""
    config = HEADS[draw(st.sampled_from(["dflash", "dspark"]))]
    flag = lambda: draw(st.booleans())  # noqa: E731
    if config.markov != "none":
        kinds = st.sampled_from(["none", "hidden", "hidden_markov"])
        config = replace(config, markov=draw(st.sampled_from(["vanilla", "gated", "rnn"])), confidence=draw(kinds))
    layers = replace(config.layers, num_hidden_layers=draw(st.integers(1, 2)))
    if flag():
        layers = replace(layers, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    small = flag()
    return replace(
        config, layers=layers, draft_vocab_size=15 if small else 67, own_lm_head=small, own_embedding=flag(),
        sample_from_anchor=flag(), sliding_window_non_causal=flag(), block_size=draw(st.integers(2, 6)),
        mask_token=draw(st.integers(0, 66)), taps=tuple(draw(st.permutations([-1, 2, 7, 8]))[:3]),
    )  # fmt: skip


@st.composite
def heads(draw: st.DrawFn) -> tuple[str, HeadConfig]:
    layout = draw(st.sampled_from(["speculators", "specforge", "gguf"]))
    kind = draw(
        st.sampled_from({"speculators": ["eagle3", "dflash", "mtp"], "gguf": ["eagle3", "mtp"]}.get(layout, ["eagle3"]))
    )
    if kind == "eagle3":
        return layout, draw(eagles(layout))
    if kind == "dflash":
        return layout, draw(blocks())
    return layout, HEADS["mtp_before" if layout == "speculators" else "mtp"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=heads(), seed=st.integers(0, 99))
def test_what_is_written_loads_as_the_same_head(which: tuple[str, HeadConfig], seed: int, tmp_path: Path) -> None:
    layout, config = which
    arrays, ids = random_head(config, seed), d2t(config)
    out = tmp_path / ("head.gguf" if layout == "gguf" else "head")
    export_head(out, config, arrays, ids, "t", to=layout, dtype="float32", target_config=TARGET, force=True)
    loaded = load_head(out, TARGET)
    same(config, loaded)
    assert (ids is None) == (loaded.d2t is None)
    assert ids is None or np.array_equal(loaded.d2t, ids)
    shared = {name: TARGET_ARRAYS[name] for name in (EMBEDDING, LM_HEAD)}
    for ours, theirs in zip(drafts(loaded_head(loaded)), drafts(make_head(config, shared | arrays, ids)), strict=True):
        if config.layers.rope_scaling is not None and layout == "gguf":  # GGUF's divisors are float32
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        else:
            np.testing.assert_array_equal(ours, theirs)
    again = load_head(out, TARGET).weights
    for name, array in arrays.items():
        np.testing.assert_array_equal(again.take(name)[0], array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_any_layout_goes_into_any_other_or_is_refused(layout: str, tmp_path: Path) -> None:
    name, write = LAYOUTS[layout]
    first = load_head(write(tmp_path, HEADS[name], random_head(HEADS[name])), TARGET)
    weights = {name: first.weights.take_tensor(name) for name in list(first.weights.keys())}
    went = 0
    for to in ("speculators", "specforge", "gguf"):
        out = tmp_path / ("x.gguf" if to == "gguf" else to)
        try:
            export_head(out, first.config, weights, first.d2t, None, to=to, dtype="float32", target_config=TARGET)  # type: ignore[arg-type]
        except UsageError as error:
            refused = str(error)
        else:
            went += 1
            same(first.config, load_head(out, TARGET))
            continue
        assert f"the {to} layout" in refused
        assert "\n" not in refused
        assert not out.exists()
    assert went or layout.startswith("MiMo")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    arrays = random_head(PLAIN)
    out = tmp_path / "head.gguf"
    export_head(out, PLAIN, arrays, D2T, None, to="gguf", dtype=dtype)
    loaded = load_head(out, TARGET).weights
    most = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 0.0, "q8_0": 1 / 127, "q4_0": 1 / 6}[dtype]
    for name, array in arrays.items():
        tensor = loaded.take_tensor(name)
        assert tensor.kind == (DTYPES[dtype] if array.ndim == 2 else "F32")
        assert np.abs(tensor.f32() - array).max() <= most * np.abs(array).max()
    if dtype.startswith("q"):
        with pytest.raises(UsageError, match="dtype must be one of bfloat16, float16, float32 in the speculators"):
            head_files(PLAIN, arrays, D2T, None, dtype=dtype)


def test_what_float16_cannot_hold_is_named() -> None:
    arrays = random_head(PLAIN)
    arrays["fc.weight"][3, 2] = 1e5
    with pytest.raises(UsageError, match=r"fc.weight holds values that float16 cannot"):
        head_files(PLAIN, arrays, D2T, None, dtype="float16")
    bits = head_files(PLAIN, arrays, D2T, None).tensors["fc.weight"]  # bfloat16: the nearest, ties to even
    import torch

    want = torch.tensor(arrays["fc.weight"]).bfloat16().view(torch.uint8).numpy().reshape(-1)
    np.testing.assert_array_equal(bits.data, want)


def test_llama_cpps_reader_reads_the_gguf(tmp_path: Path) -> None:
    config = replace(PLAIN, layers=replace(_LLAMA, rope_scaling=LLAMA3))
    arrays = random_head(config)
    export_head(tmp_path / "h.gguf", config, arrays, D2T, "a/b", to="gguf", dtype="bfloat16")
    read = gguf.GGUFReader(tmp_path / "h.gguf")
    value = {key: field.contents() for key, field in read.fields.items()}
    assert value["general.architecture"] == "eagle3"
    assert value["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert value["eagle3.extract_layers"] == [tap + 1 for tap in config.taps]
    assert (value["eagle3.block_count"], value["eagle3.target_hidden_size"]) == (1, 64)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert tensors["d2t"].tensor_type == gguf.GGMLQuantizationType.I64
    np.testing.assert_array_equal(tensors["d2t"].data, D2T)  # target ids themselves
    assert {"fc.weight", "output.weight", "output_norm.weight", "blk.0.attn_norm_2.weight", "rope_freqs.weight"} < set(
        tensors
    )
    key = gguf.dequantize(tensors["blk.0.attn_k.weight"].data, tensors["blk.0.attn_k.weight"].tensor_type)
    ours = arrays["model.layers.0.self_attn.k_proj.weight"].reshape(config.layers.num_key_value_heads, 2, -1, 128)
    want = ours.swapaxes(1, 2).reshape(-1, 128)  # neighbours turn together there
    np.testing.assert_allclose(key, want, rtol=2**-8)


REFUSED = [
    ("gguf", {"feature_norm": "whole"}, r"feature_norm \(whole\)"),
    ("gguf", {"norm_output": True}, r"norm_output \(yes\)"),
    ("gguf", {"taps": (0, 1)}, r"taps \(2, llama.cpp reads 3\)"),
    ("gguf", {"layers": replace(_LLAMA, attention_bias=True, attention_out_bias=True)}, "biases"),
    ("gguf", {"layers": replace(_LLAMA, num_hidden_layers=2)}, r"layers \(2\)"),
    ("gguf", {"layers": _QWEN3}, "layers' kind"),
    ("specforge", {"layers": replace(_LLAMA, num_hidden_layers=2)}, r"layers \(2\)"),
    ("specforge", {"layers": _QWEN3}, "layers' kind"),
    ("speculators", {"layers": replace(_LLAMA, attention_bias=True)}, "attention_out_bias|o_proj.bias"),
    ("speculators", {"layers": replace(_LLAMA, rope_scaling=FACTORS)}, "factors"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "text"), REFUSED, ids=[f"{r[0]}: {r[2]}" for r in REFUSED])
def test_what_a_layout_has_no_place_for_is_named(layout: Any, change: dict[str, Any], text: str) -> None:
    config = replace(PLAIN, **change)
    with pytest.raises(UsageError, match=text) as caught:
        head_files(config, random_head(config), D2T, None, to=layout)
    assert f"the {layout} layout" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "layout", "text"),
    [
        ("mtp", "speculators", "taps .*read as"),
        ("mtp_before", "gguf", "taps .*read as"),
        ("mtp_mimo", "gguf", "concat .*hidden_first.* read as embedding_first"),
        ("mtp", "specforge", r"algorithm \(mtp\)"),
        ("dflash", "gguf", r"algorithm \(dflash\)"),
    ],
)
def test_conventions_that_a_layout_fixes_are_named(name: str, layout: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        head_files(HEADS[name], random_head(HEADS[name]), None, None, to=layout, target_config=TARGET)


def test_a_gguf_mtp_head_is_of_its_models_sizes() -> None:
    """Its layer is described by the model's metadata alone."""
    other = replace(TARGET, rope_theta=5e5)
    with pytest.raises(UsageError, match="rope_theta"):
        head_files(HEADS["mtp"], random_head(HEADS["mtp"]), None, None, to="gguf", target_config=other)


def test_the_usual_taps_need_no_ids_in_specforge() -> None:
    """vLLM and SGLang count given ids differently, but agree on the default."""
    usual = head_files(replace(PLAIN, taps=(1, 3, 4)), random_head(PLAIN), D2T, None, to="specforge")
    assert usual.data["eagle_config"] == {"use_aux_hidden_state": True}
    assert usual.notices == ()
    other = head_files(replace(PLAIN, taps=(2, 3, 4)), random_head(PLAIN), D2T, None, to="specforge")
    assert other.data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert "vLLM reads them as inputs" in other.notices[0]


# ------------------------------------------------------------------------------------------------------------ writing


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = random_head(PLAIN)
    export_head(tmp_path / "a", PLAIN, arrays, D2T, None)
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    with pytest.raises(UsageError, match="is there already; --force"):
        export_head(tmp_path / "a", PLAIN, arrays, D2T, None)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for out, to in ((tmp_path / "b", "speculators"), (tmp_path / "c.gguf", "gguf"), (tmp_path / "a", "specforge")):
        with pytest.raises(ModelError, match="No space left"):
            export_head(out, PLAIN, arrays, D2T, None, to=to, force=True)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CapacityError, match="not enough disk space"):
        export_head(tmp_path / "b", PLAIN, arrays, D2T, None)


@pytest.mark.parametrize(
    ("out", "to", "text"),
    [
        ("x.gguf", "speculators", "is a folder"),
        ("x", "gguf", "must be named .gguf"),
        ("no/x", "specforge", "no such folder"),
        ("file", "speculators", "is there and not a folder"),
        ("x", "other", "the layout must be one of speculators, specforge, gguf, got 'other'"),
    ],
)
def test_places_that_cannot_be(out: str, to: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=text):
        export_head(tmp_path / out, PLAIN, random_head(PLAIN), D2T, None, to=to)


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(hf(TARGET)))
    write_safetensors(folder / "model.safetensors", TARGET_ARRAYS)
    return folder


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(build(), ["export", *map(str, args)])


def test_the_command_brings_the_targets_rows(tmp_path: Path, target: Path) -> None:
    """Other programs cannot take the draft vocabulary's rows of the model's head themselves."""
    bare = replace(PLAIN, own_lm_head=False)
    arrays = random_head(bare)
    export_head(tmp_path / "bare", bare, arrays, D2T, None, dtype="float32")
    wanted = drafts(loaded_head(load_head(tmp_path / "bare", TARGET)))
    for bring, own in (("none", (False, False)), ("head", (False, True)), ("all", (True, True))):
        out = tmp_path / bring
        done = run(
            tmp_path / "bare", "-m", target, "--to", "speculators", "--out", out, "--bring", bring, "--dtype", "float32"
        )
        assert done.exit_code == 0, done.output
        loaded = load_head(out, TARGET)
        assert (loaded.config.own_embedding, loaded.config.own_lm_head) == own
        for ours, theirs in zip(drafts(loaded_head(loaded)), wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
    assert run(tmp_path / "bare", "-m", target, "--to", "gguf", "--out", tmp_path / "h.gguf", "-q").exit_code == 0
    assert load_head(tmp_path / "h.gguf", TARGET).config.own_lm_head


def test_the_command_says_what_is_wrong(tmp_path: Path, target: Path) -> None:
    name, write = LAYOUTS["native MTP"]
    (tmp_path / "inside").mkdir()
    inside = write(tmp_path / "inside", HEADS[name], random_head(HEADS[name]))
    assert run(inside, "--to", "gguf", "--out", tmp_path / "m.gguf").exit_code == 0  # no --model: it is inside
    assert load_head(tmp_path / "m.gguf", TARGET).format == "GGUF nextn"
    export_head(tmp_path / "e", PLAIN, random_head(PLAIN), D2T, None)
    for args, text in (
        ((tmp_path / "e", "--to", "gguf", "--out", tmp_path / "x.gguf"), "say which model this head drafts for"),
        (
            (tmp_path / "e", "-m", target, "--to", "gguf", "--out", tmp_path / "x.gguf", "--bring", "x"),
            "--bring must be",
        ),
        ((tmp_path / "e", "-m", target, "--to", "odd", "--out", tmp_path / "x"), "layout must be one of"),
    ):
        done = run(*args)
        assert done.exit_code == 2
        assert text in done.output
        assert not (tmp_path / "x.gguf").exists()


def test_a_quantised_source_keeps_its_blocks(tmp_path: Path) -> None:
    """A GGUF head in Q8_0 goes into another GGUF file bit by bit."""
    arrays = random_head(PLAIN)
    made = head_files(PLAIN, arrays, D2T, None, to="gguf", dtype="q8_0")
    names = {"fc.weight": "fc.weight", "lm_head.weight": "output.weight"}
    kept = {name: Tensor.from_array(array) for name, array in arrays.items()} | {
        ours: made.tensors[theirs] for ours, theirs in names.items()
    }
    again = head_files(PLAIN, kept, D2T, None, to="gguf", dtype="q8_0")
    for theirs in names.values():
        assert np.array_equal(again.tensors[theirs].data, made.tensors[theirs].data)


def test_upstream_names() -> None:
    from outpace import hub

    assert hub.upstream("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub.upstream("Qwen/Qwen3-0.6B@main:x.gguf") == "Qwen/Qwen3-0.6B"
    assert hub.upstream("./a-folder") is None
