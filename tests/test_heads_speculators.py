"""Our heads against the classes of the `speculators` package: the same files, the same logits.

Theirs are training passes: the text is given (teacher forced), and a hook on lm_head shows the logits. Their EAGLE-3
step k at row q sees the committed slots up to q and its own k steps before: that is our draft after q. Their MTP step
k reads its own outputs of step k - 1 from the start of the text: that is our `extend` over them with a new cache.
"""

# ruff: noqa: E402 (what is not installed is skipped first)

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from heads_files import (
    BLOCKS,
    EAGLE3,
    GOLDEN,
    HEADS,
    TARGET,
    TARGET_ARRAYS,
    TOKENS,
    Arrays,
    d2t,
    hf,
    random_head,
    shared_tensors,
    speculators_dflash,
    speculators_eagle3,
    speculators_mtp,
    text,
)  # fmt: skip
from heads_oracle import Slots, draft, extend
from outpace.heads.config import HeadConfig
from outpace.heads.export import export_head
from outpace.heads.loading import load_head
from outpace.heads.reference import AutoregressiveHead, BlockHead, make_head
from outpace.weights.safetensors import write_safetensors
from outpace.weights.weight_map import WeightMap


def exported(folder: Path, config: HeadConfig, arrays: Arrays) -> Path:
    """The files that `outpace export` writes."""
    config = replace(config, own_embedding=config.own_embedding or config.algorithm == "eagle3")
    if config.algorithm == "eagle3":
        arrays = {"model.embed_tokens.weight": TARGET_ARRAYS["model.embed_tokens.weight"]} | arrays
    export_head(folder, config, arrays, d2t(config), None, dtype="float32", force=True)
    return folder


Write = Callable[[Path, HeadConfig, Arrays], Path]


def ours(folder: Path) -> AutoregressiveHead | BlockHead:
    loaded = load_head(folder, TARGET)
    return make_head(loaded.config, shared_tensors(loaded, WeightMap.from_tensors(TARGET_ARRAYS), TARGET), loaded.d2t)


def theirs(kind: Any, config_kind: Any, folder: Path, attention: str = "eager") -> Any:
    """Their model of these files, with the target's embedding and head where the file has none."""
    config = config_kind.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = attention
    model = kind(config)
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    for name, source in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        state.setdefault(name, torch.tensor(TARGET_ARRAYS[source]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.startswith("verifier_") for name in missing)
    return model.float().eval()


def hooked(model: Any) -> list[np.ndarray]:
    """Filled with what lm_head gives, float32 [rows, draft vocabulary] a call."""
    seen: list[np.ndarray] = []
    model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0].detach().numpy()))
    return seen


@pytest.mark.parametrize("write", [speculators_eagle3, exported])
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_steps_equal_speculators(name: str, write: Write, tmp_path: Path) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = EAGLE3[name]
    write(tmp_path, config, random_head(config))
    model = theirs(Eagle3DraftModel, Eagle3SpeculatorConfig, tmp_path)
    features, tokens = text(config.feature_width)
    seen = hooked(model)
    document = torch.zeros(1, TOKENS, dtype=torch.long)
    steps = 4
    with torch.no_grad():
        model(torch.tensor(features)[None], torch.tensor(tokens)[None], document, ttt_steps=steps)

    np.testing.assert_allclose([list(seen[step][3][:3]) for step in range(steps)], GOLDEN[name], atol=1e-4)
    head = ours(tmp_path)
    cache = head.new_cache(64)
    slots = extend(head, features, tokens, cache)
    np.testing.assert_allclose(slots.logits, seen[0], atol=1e-4)
    for row in (0, 3, TOKENS - steps - 1):  # a draft after this slot: roll back to it and go on along the text
        cache.truncate(row)
        again = extend(head, features[row : row + 1], tokens[row : row + 1], cache)
        np.testing.assert_allclose(again.logits[0], slots.logits[row], atol=1e-6)
        forced = iter(tokens[row + 1 :])
        guesses = draft(head, again, steps, lambda _, forced=forced: next(forced), cache)
        assert cache.length == row + 1
        for step, guess in enumerate(guesses):
            np.testing.assert_allclose(guess.logits, seen[step][row], atol=1e-4)
        extend(head, features[row + 1 :], tokens[row + 1 :], cache)


def test_the_package_loads_what_we_export(tmp_path: Path) -> None:
    """By its own from_pretrained, which also looks for the target that the files name."""
    pytest.importorskip("loguru")  # what it reads the target with
    from speculators import SpeculatorModel

    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(hf(TARGET)))
    write_safetensors(tmp_path / "target" / "model.safetensors", TARGET_ARRAYS)
    for name in ("eagle3", "dflash_small", "dspark", "mtp_before"):
        config, arrays = HEADS[name], random_head(HEADS[name])
        export_head(tmp_path / name, config, arrays, d2t(config), str(tmp_path / "target"), dtype="float32")
        state = SpeculatorModel.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        fc = "mtp_layers.0.input_proj.weight" if name == "mtp_before" else "fc.weight"
        np.testing.assert_array_equal(state[fc].numpy(), arrays["fc.weight"])
        if config.own_lm_head:
            np.testing.assert_array_equal(state["lm_head.weight"].numpy(), arrays["lm_head.weight"])
            np.testing.assert_array_equal(state["d2t"].numpy() + np.arange(15), d2t(config))


def test_eagle3_in_a_sliding_window(tmp_path: Path) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    base = HEADS["eagle3_qwen3"]
    window = replace(base.layers, use_sliding_window=True, sliding_window=3, max_window_layers=0)
    config = replace(base, taps=(0, 2, 4), layers=window)
    speculators_eagle3(tmp_path, config, random_head(config))
    model = theirs(Eagle3DraftModel, Eagle3SpeculatorConfig, tmp_path)
    features, tokens = text(config.feature_width)
    seen = hooked(model)
    with torch.no_grad():
        model(
            torch.tensor(features)[None], torch.tensor(tokens)[None], torch.zeros(1, TOKENS, dtype=torch.long),
            ttt_steps=1,
        )  # fmt: skip
    head = ours(tmp_path)
    np.testing.assert_allclose(extend(head, features, tokens, head.new_cache(64)).logits, seen[0], atol=1e-4)


@pytest.mark.parametrize("write", [speculators_mtp, exported])
def test_mtp_steps_equal_speculators(write: Write, tmp_path: Path) -> None:
    from speculators.models.mtp import MTPDraftModel
    from speculators.models.mtp.config import MTPSpeculatorConfig

    config = HEADS["mtp_before"]
    write(tmp_path, config, random_head(config))
    model = theirs(MTPDraftModel, MTPSpeculatorConfig, tmp_path, "eager")
    hidden, tokens = text(config.feature_width)
    with torch.no_grad():
        steps = model(torch.tensor(tokens)[None], torch.tensor(hidden)[None])[0]
    head = ours(tmp_path)
    rows = steps[0].shape[1]
    features = hidden[:rows]
    assert len(steps) == 3
    for step, want in enumerate(steps):
        slots = extend(head, features, tokens[step + 1 : step + 1 + rows], head.new_cache(64))
        np.testing.assert_allclose(slots.logits, want[0].numpy(), atol=1e-4)
        features = slots.hidden


@pytest.mark.parametrize("write", [speculators_dflash, exported])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_speculators(name: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    config = BLOCKS[name]
    spark = config.markov != "none"
    write(tmp_path, config, random_head(config))
    kinds = (DSparkDraftModel, DSparkSpeculatorConfig) if spark else (DFlashDraftModel, DFlashSpeculatorConfig)
    model = theirs(*kinds, tmp_path)
    features, tokens = text(config.feature_width)
    caught: dict[str, Any] = {}

    def compute_metrics(logits: Any, targets: Any, *rest: Any, **_: Any) -> Any:
        caught.update(logits=logits, confidence=rest[0])
        return None, None

    monkeypatch.setattr(f"speculators.models.{'dspark' if spark else 'dflash'}.core.compute_metrics", compute_metrics)
    anchors = TOKENS - config.block_size  # their choice of that many valid ones is all of them
    with torch.no_grad():
        model(
            torch.tensor(features)[None], torch.tensor(tokens)[None], torch.ones(1, TOKENS), torch.zeros(1, TOKENS, 64),
            torch.zeros(1, TOKENS, dtype=torch.long), max_anchors=anchors,
        )  # fmt: skip
    want = caught["logits"].view(anchors, config.block_size, -1).numpy()

    skip = 0 if config.sample_from_anchor else 1
    np.testing.assert_allclose(want[4, skip:, :3], GOLDEN[name], atol=1e-4)
    head = ours(tmp_path)
    assert isinstance(head, BlockHead)
    cache = head.new_cache(64)
    none = np.zeros((0, 0), dtype=np.float32)
    # The context before an anchor is all features before it. Extended bit by bit, and rolled back to the first again.
    for anchor in (1, 4, anchors - 1, 1, 5):
        cache.truncate(min(cache.length, anchor))
        first = cache.length
        if first < anchor:
            extend(head, features[first:anchor], tokens[first + 1 : anchor + 1], cache)
        slots = Slots(tokens[anchor], none, none)
        forced = iter(tokens[anchor + 1 :])
        guesses = draft(head, slots, 99, lambda _, forced=forced: next(forced), cache)
        assert (len(guesses), cache.length) == (config.block_size - (not config.sample_from_anchor), anchor)
        for i, guess in enumerate(guesses):
            np.testing.assert_allclose(guess.logits, want[anchor, i + skip], atol=1e-4)
            if config.confidence != "none":
                logit = caught["confidence"].view(anchors, -1)[anchor, i + skip]
                np.testing.assert_allclose(guess.confidence, torch.sigmoid(logit), atol=1e-5)


def test_sizes_a_file_is_silent_about_are_transformers_defaults() -> None:
    import transformers

    from outpace.heads.formats import _SILENT

    for kind, values in _SILENT.items():
        theirs = transformers.AutoConfig.for_model(kind)
        assert {name: getattr(theirs, name) for name in values} == values
