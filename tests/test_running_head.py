"""What a head beside a model in the core is held as, and what is decoded for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heads_files import D2T, HEADS, TARGET, TARGET_ARRAYS, random_head
from outpace.backends.head import HeadRows
from outpace.backends.native import NativeBackend
from outpace.backends.native_head import NativeHead
from outpace.backends.running_head import run_head
from outpace.heads.config import HeadConfig
from outpace.models.names import HEAD
from outpace.models.quantise import Precision, head_precision
from outpace.types import F32
from outpace.weights.relaid import Relaid
from outpace.weights.tensor import Tensor
from outpace.weights.weight_map import WeightMap

EAGLE3 = replace(HEADS["eagle3"], own_lm_head=False)


def target(precision: Precision) -> NativeBackend:
    return NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision=precision)


def tensors(config: HeadConfig) -> dict[str, Tensor]:
    return {name: Tensor.from_array(array) for name, array in random_head(config).items()}


def logits(head: Any, config: HeadConfig) -> F32:
    features = np.random.default_rng(5).standard_normal((4, config.feature_width)).astype(np.float32)
    found: F32 = head.forward([HeadRows(head.new_slot(), [1, 2, 3, 4], features)]).logits
    return found


@pytest.mark.parametrize("beside", ["int4", "int8", "bf16", "f32"])
def test_a_head_is_held_in_its_targets_bits(beside: Precision) -> None:
    config, holds = HEADS["eagle3"], beside
    ids = np.array(D2T) if config.draft_vocab_size < TARGET.vocab_size else None
    model = target(beside)
    running = run_head(model, config, tensors(config), dict, ids)
    wanted = NativeHead(model, config, WeightMap(tensors(config)), ids, precision=holds)
    assert np.array_equal(logits(running, config), logits(wanted, config))
    assert running.memory == wanted.memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_the_draft_vocabularys_rows_are_taken_as_the_file_has_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but these rows may be decoded, and not even these where the core holds the file's own blocks."""
    random = np.random.default_rng(3)
    shape = (TARGET.vocab_size, TARGET.hidden_size)
    values = random.standard_normal(shape).astype(np.float16)
    data = {
        "F32": values.astype(np.float32),
        "F16": values,
        "BF16": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "Q8_0": np.concatenate(  # a block: the scale, then 32 weights
            [
                np.full((shape[0] * shape[1] // 32, 1), 0.01, np.float16).view(np.uint8),
                random.integers(-127, 128, (shape[0] * shape[1] // 32, 32), dtype=np.int8).view(np.uint8),
            ],
            axis=1,
        ),
    }[kind]
    whole = Tensor(shape, kind, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    config = replace(EAGLE3, draft_vocab_size=len(D2T))
    own = tensors(config)
    model, ids = target("int8"), np.array(D2T)
    right = own | {HEAD: Tensor.from_array(whole.f32()[ids])}
    wanted = NativeHead(model, replace(config, own_lm_head=True), WeightMap(right), ids)
    decoded: list[tuple[int, ...]] = []
    f32 = Tensor.f32

    def counted(tensor: Tensor) -> F32:
        decoded.append(tensor.shape)
        return f32(tensor)

    monkeypatch.setattr(Tensor, "f32", counted)
    running = run_head(model, config, own, lambda: {HEAD: whole}, ids)
    assert shape not in decoded
    assert ((len(D2T), TARGET.hidden_size) in decoded) == (kind != "Q8_0")
    # Blocks of 8 bits stay what they are; decoded, they would be rounded once more.
    apart = np.abs(logits(running, config) - logits(wanted, config)).max()
    assert 0 < apart < 0.1 if kind == "Q8_0" else apart == 0


def test_layers_and_lm_head_follow_those_of_the_target() -> None:
    """As in files of 4 bits whose embedding and head have 8."""
    layers = ["Q4_1"] * 5 + ["Q8_0"]
    assert head_precision("int8", layers, "Q8_0") == ("int4", "int8")
    assert head_precision("int8", layers, "Q4_0") == ("int4", "int4")
    assert head_precision("int8", ["Q4_0", "Q8_0"], "Q6_K") == ("int8", "int8")
    assert head_precision("int4", ["BF16", "Q8_0"], "Q8_0") == ("int4", "int4")
    assert head_precision("bf16", ["BF16"], "BF16") == ("bf16", "bf16")
    config, ids = HEADS["eagle3"], np.array(D2T)
    model = target("int8")
    mixed = NativeHead(model, config, WeightMap(tensors(config)), ids, precision=("int4", "int8"))
    four = NativeHead(model, config, WeightMap(tensors(config)), ids, precision="int4")
    eight = NativeHead(model, config, WeightMap(tensors(config)), ids, precision="int8")
    assert four.pass_bytes < mixed.pass_bytes < eight.pass_bytes
    assert not np.array_equal(logits(mixed, config), logits(four, config))


def test_what_is_laid_out_is_kept_for_the_next_start(tmp_path: Path) -> None:
    """The same bits, and nothing is decoded; another head, target or reading of d2t is another one."""
    config, ids, model = HEADS["eagle3"], np.array(D2T), target("int8")
    sources = [tmp_path / "head.safetensors", tmp_path / "model.gguf"]
    for source in sources:
        source.write_bytes(b"x" * 100)
    asked = 0

    def weights() -> WeightMap:
        nonlocal asked
        asked += 1
        return WeightMap(tensors(config))

    def made(ids: Any = ids) -> F32:
        relaid = Relaid(tmp_path / "kept" / "a", sources[0], beside=sources[1], least=1)
        return logits(NativeHead(model, config, weights, ids, relaid=relaid), config)

    first = made()
    assert np.array_equal(made(), first)
    assert asked == 1
    made(np.array([*D2T[:-1], D2T[-1] - 1]))
    assert asked == 2
    for i, source in enumerate(sources):
        source.write_bytes(b"y" * 101)
        assert np.array_equal(made(), first)
        assert asked == 3 + i
