"""Every public layout of a head loads to the same head; what does not fit, is damaged or unsupported is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heads_files
from heads_files import D2T, HEADS, LAYOUTS, TARGET, TARGET_ARRAYS, d2t, random_head, shared_tensors
from heads_oracle import Guess, draft, extend, target_id
from outpace.heads.config import HeadConfig
from outpace.heads.loading import load_head
from outpace.heads.reference import Head, make_head
from outpace.types import ModelError, OutpaceError, UsageError
from outpace.weights.safetensors import read_safetensors, write_safetensors
from outpace.weights.weight_map import WeightMap

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def canonical(config: HeadConfig, seed: int = 0) -> Head:
    """The head made of canonical weights, without any file."""
    shared = {name: TARGET_ARRAYS[name] for name in (EMBEDDING, LM_HEAD)}
    return make_head(config, shared | random_head(config, seed), d2t(config))


def drafts(head: Head, count: int = 6, n: int = 5) -> tuple[np.ndarray, list[Guess]]:
    """All slots' logits over a few committed ones, and a greedy draft after them."""
    random = np.random.default_rng(9)
    features = random.standard_normal((count, head.config.feature_width)).astype(np.float32)
    cache = head.new_cache(32)
    slots = extend(head, features, [int(t) for t in random.integers(0, 67, count)], cache)
    return slots.logits, draft(head, slots, n, lambda logits: target_id(head, int(np.argmax(logits))), cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_head(layout: str, tmp_path: Path) -> None:
    name, write = LAYOUTS[layout]
    config = HEADS[name]
    loaded = load_head(write(tmp_path, config, random_head(config)), TARGET)
    assert loaded.format == layout.split(",")[0]
    for each in fields(HeadConfig):
        if each.name not in ("layers", "own_embedding"):
            assert getattr(loaded.config, each.name) == getattr(config, each.name), each.name
    ids = d2t(config)
    assert (loaded.d2t is None) == (ids is None)
    assert {"taps"} <= set(loaded.origins)
    tensors = shared_tensors(loaded, WeightMap.from_tensors(TARGET_ARRAYS), TARGET)
    logits, guesses = drafts(make_head(loaded.config, tensors, loaded.d2t))
    want_logits, want_guesses = drafts(canonical(config))
    np.testing.assert_allclose(logits, want_logits, atol=1e-4)
    assert [g.token for g in guesses] == [g.token for g in want_guesses]
    for guess, want in zip(guesses, want_guesses, strict=True):
        np.testing.assert_allclose(guess.logits, want.logits, atol=1e-4)
        assert (guess.confidence is None) == (config.confidence == "none")


# ------------------------------------------------------------------------------------------------------- refusals


def changed(layout: str, folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Path:
    """Files of a layout whose config.json and tensors were changed in place."""
    name, write = LAYOUTS[layout]
    write(folder, HEADS[name], random_head(HEADS[name]))
    data = json.loads((folder / "config.json").read_text())
    raw = read_safetensors(folder / "model.safetensors")
    arrays = {n: (t.ints() if t.kind in ("I64", "BOOL") else t.f32()).copy() for n, t in raw.items()}
    change(data, arrays)
    (folder / "config.json").write_text(json.dumps(data))
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def both(*, config: dict[str, Any] | None = None, **tensors: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """A change: fields and tensors replaced; None removes."""

    def change(data: dict[str, Any], arrays: dict[str, Any]) -> None:
        for target, news in ((data, config or {}), (arrays, {k.replace("__", "."): v for k, v in tensors.items()})):
            for key, value in news.items():
                if value is None:
                    target.pop(key)
                else:
                    target[key] = value(target[key]) if callable(value) else value

    return change


def poke(index: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return change


def nested(**news: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda old: old | news


REFUSALS = [
    ("SpecForge EAGLE-3", both(fc__weight=None), "1 missing: fc.weight"),
    ("SpecForge EAGLE-3", both(other__weight=np.ones(3, np.float32)), "1 not known.*other.weight"),
    ("SpecForge EAGLE-3", both(norm__weight=np.ones(3, np.float32)), r"model.norm.weight \[3\] instead of \[64\]"),
    ("SpecForge EAGLE-3", both(norm__weight=poke(3, np.nan)), "model.norm.weight holds values that are not finite"),
    ("SpecForge EAGLE-3", both(d2t=None), "d2t is missing"),
    ("SpecForge EAGLE-3", both(d2t=poke(-1, 53)), "outside 0 .. 66: 67 at 14"),
    ("SpecForge EAGLE-3", both(d2t=poke(0, -1)), "outside 0 .. 66: -1 at 0"),
    ("SpecForge EAGLE-3", both(d2t=poke(3, 0)), "do not ascend: 3 at 3"),
    ("SpecForge EAGLE-3", both(d2t=poke(14, 2**62)), "outside 0"),
    ("SpecForge EAGLE-3", both(t2d=poke(1, 1)), "t2d and d2t name different tokens"),
    ("SpecForge EAGLE-3", both(d2t=lambda d: d[:-1]), r"d2t must have shape \[15\], got \[14\]"),
    ("SpecForge EAGLE-3", both(config={"draft_vocab_size": 99}), "draft_vocab_size must be"),
    ("SpecForge EAGLE-3", both(config={"vocab_size": 80}), "another target: vocabulary 80, not 67"),
    ("SpecForge EAGLE-3", both(config={"hidden_size": 32}), "another target: hidden size 32, not 64"),
    (
        "SpecForge EAGLE-3",
        both(config={"eagle_config": nested(eagle_aux_hidden_state_layer_ids=[1, 3, 9])}),
        "tap .*8 layers.* got 9",
    ),
    ("SpecForge EAGLE-3", both(config={"eagle_config": nested(use_aux_hidden_state=False)}), "use_aux_hidden_state"),
    ("SpecForge EAGLE-3", both(config={"norm_output": "yes"}), "norm_output must be true or false"),
    ("SpecForge EAGLE-3", both(config={"rope_scaling": {"type": "odd"}}), "rope type 'odd' is not supported"),
    ("speculators EAGLE-3", both(config={"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}), "taps must differ"),
    ("speculators EAGLE-3", both(config={"eagle_aux_hidden_state_layer_ids": []}), "got 0"),
    ("speculators EAGLE-3", both(config={"speculators_model_type": "peagle"}), "P-EAGLE heads are not supported"),
    ("speculators EAGLE-3", both(config={"speculators_model_type": "new"}), "'new' is not supported"),
    ("speculators DFlash", both(config={"speculators_model_type": "dflash2"}), "DFlash2 heads are not supported"),
    ("speculators DFlash", both(config={"speculators_model_type": "xpress"}), "XPress heads are not supported"),
    ("speculators DFlash", both(config={"block_size": 0}), "block_size must be .* got 0"),
    ("speculators DFlash", both(config={"mask_token_id": 67}), "mask_token_id must be"),
    ("speculators DFlash", both(config={"mask_token_id": None}), "mask_token_id is missing"),
    ("speculators DFlash", both(config={"aux_hidden_state_layer_ids": None}), "aux_hidden_state_layer_ids is missing"),
    ("speculators DSpark", both(config={"markov_head_type": "odd"}), "markov_head_type 'odd' is not supported"),
    ("speculators DSpark", both(config={"markov_rank": 0}), "Markov"),
    ("z-lab DFlash", both(config={"num_target_layers": 9}), "another target: layers 9, not 8"),
    ("z-lab DFlash", both(config={"architectures": ["DFlash2DraftModel"]}), "DFlash2 heads are not supported"),
    ("z-lab DFlash", both(config={"architectures": ["Other"]}), "not a head of a known format"),
    ("native MTP", both(config={"model_type": "qwen3_next"}), "qwen3_next models are not supported"),
    ("native MTP", both(mtp__layers__1__x=np.ones(2, np.float32)), "several MTP layers"),
    ("native MTP", both(mtp__x=np.ones(2, np.float32)), "not known.*mtp.x"),
    ("speculators MTP", both(lm_head__bias=np.ones(2, np.float32)), "not known.*lm_head.bias"),
]


@pytest.mark.parametrize(("layout", "change", "text"), REFUSALS, ids=[f"{r[0]}: {r[2]}" for r in REFUSALS])
def test_what_does_not_fit_is_refused(layout: str, change: Any, text: str, tmp_path: Path) -> None:
    path = changed(layout, tmp_path, change)
    with pytest.raises(ModelError, match=text) as caught:
        load_head(path, TARGET)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_an_error_with_many_tensors_is_short(tmp_path: Path) -> None:
    def change(data: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays.update({f"x{i}": np.ones(1, np.float32) for i in range(500)})

    with pytest.raises(ModelError, match=r"500 not known.*and 492 more"):
        load_head(changed("z-lab DFlash", tmp_path, change), TARGET)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    folder = changed("z-lab DFlash", tmp_path, both())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickle files"):
        load_head(folder, TARGET)
    with pytest.raises(UsageError, match="no such file"):
        load_head(folder / "nothing", TARGET)


def test_shards_are_read(tmp_path: Path) -> None:
    folder = changed("z-lab DFlash", tmp_path, both())
    arrays = {name: tensor.f32() for name, tensor in read_safetensors(folder).items()}
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(arrays))}
    for shard in set(where.values()):
        write_safetensors(folder / shard, {name: arrays[name] for name in arrays if where[name] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert load_head(folder, TARGET).config.block_size == 4


def test_a_target_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    import dataclasses

    folder = changed("speculators EAGLE-3", tmp_path, both(config={"eagle_aux_hidden_state_layer_ids": None}))
    assert load_head(folder, TARGET).config.taps == (1, 3, 4)  # inputs of layers 2, 8 // 2, 8 - 3
    with pytest.raises(ModelError, match="4 layers is too small"):
        load_head(folder, dataclasses.replace(TARGET, num_hidden_layers=4))


def test_conventions_may_be_said(tmp_path: Path) -> None:
    folder = changed("SpecForge EAGLE-3", tmp_path, both(d2t=lambda _: D2T))
    with pytest.raises(ModelError, match="read as offset ids"):
        load_head(folder, TARGET)
    said = {"d2t": "absolute", "taps": [0, 2, 3], "norm_output": True}
    loaded = load_head(folder, TARGET, conventions=said)
    assert loaded.d2t is not None
    assert np.array_equal(loaded.d2t, D2T)
    assert (loaded.config.taps, loaded.config.norm_output) == ((0, 2, 3), True)
    assert {loaded.origins[name] for name in said} == {"asked for"}
    for wrong, text in (
        ({"other": 1}, "'other' is not known"),
        ({"taps": 3}, "taps must be a list"),
        ({"d2t": "x"}, "offset or absolute"),
    ):
        with pytest.raises(UsageError, match=text):
            load_head(folder, TARGET, conventions=wrong)
    with pytest.raises(ModelError, match="norm_output must be true or false"):
        load_head(folder, TARGET, conventions={"d2t": "absolute", "norm_output": "x"})


# ------------------------------------------------------------------------------------------------------------ fuzz


def attempt(path: Path) -> None:
    """Loads, and uses what was loaded."""
    try:
        loaded = load_head(path, TARGET)
        with np.errstate(all="ignore"):
            tensors = shared_tensors(loaded, WeightMap.from_tensors(TARGET_ARRAYS), TARGET)
            drafts(make_head(loaded.config, tensors, loaded.d2t), 2, 2)
    except OutpaceError:
        pass


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for layout in ("SpecForge EAGLE-3", "speculators DSpark", "speculators MTP", "GGUF EAGLE-3", "GGUF nextn"):
        name, write = LAYOUTS[layout]
        made[layout] = write(tmp_path_factory.mktemp("heads"), HEADS[name], random_head(HEADS[name]))
    return made


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_errors_only(data: st.DataObject, originals: dict[str, Path], tmp_path: Path) -> None:
    original = originals[data.draw(st.sampled_from(sorted(originals)))]
    files = [original] if original.is_file() else sorted(original.iterdir())
    hit = data.draw(st.sampled_from(files))
    for file in files:
        raw = bytearray(file.read_bytes())
        if file == hit and data.draw(st.booleans()):
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        elif file == hit:
            head = min(len(raw), 6000)  # headers and configurations
            for _ in range(data.draw(st.integers(1, 4))):
                raw[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
        (tmp_path / file.name).write_bytes(raw)
    attempt(tmp_path / original.name if original.is_file() else tmp_path)


_JSON = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.just(2**70), st.just(1e308), st.text(max_size=5),
    st.lists(st.integers(-3, 12), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_configurations_give_errors_only(data: st.DataObject, originals: dict[str, Path], tmp_path: Path) -> None:
    folders = sorted(name for name, path in originals.items() if path.is_dir())
    original = originals[data.draw(st.sampled_from(folders))]
    config = json.loads((original / "config.json").read_text())
    place = config
    key = data.draw(st.sampled_from(sorted(place)))
    if isinstance(place[key], dict) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(_JSON)
    (tmp_path / "model.safetensors").write_bytes((original / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    attempt(tmp_path)


def test_the_maker_of_layouts_covers_every_algorithm() -> None:
    assert {HEADS[name].algorithm for name, _ in LAYOUTS.values()} == {"mtp", "eagle3", "dflash"}
    assert heads_files.TARGET.num_hidden_layers == 8
