"""How heads compute, against restatements of their own, and what their caches promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from heads_files import (
    BLOCKS,
    D2T,
    EAGLE3,
    GOLDEN,
    HEADS,
    TARGET,
    TARGET_ARRAYS,
    d2t,
    gguf_eagle3,
    random_head,
    shared_tensors,
    text,
)
from heads_oracle import Slots, draft, extend, target_id
from outpace.heads.config import HeadConfig
from outpace.heads.loading import load_head, open_target
from outpace.heads.reference import BlockHead, Head, make_head
from outpace.types import CapacityError
from outpace.weights.gguf import GGUFFile
from outpace.weights.weight_map import WeightMap


def made(config: HeadConfig, seed: int = 0) -> Head:
    shared = {name: TARGET_ARRAYS[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return make_head(config, shared | random_head(config, seed), d2t(config))


def words(config: HeadConfig, count: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(1)
    features = random.standard_normal((count, config.feature_width)).astype(np.float32)
    return features, [int(token) for token in random.integers(0, 66, count)]


@pytest.mark.parametrize("name", [*EAGLE3, *BLOCKS])
def test_drafts_are_those_of_the_speculators_package(name: str) -> None:
    """Recorded: after four (eagle3) or before the fourth (blocks) of the words, which are also what is chosen."""
    head = made((EAGLE3 | BLOCKS)[name])
    features, tokens = text(head.config.feature_width)
    cache = head.new_cache(16)
    slots = extend(head, features[:4], tokens[:4] if name in EAGLE3 else tokens[1:5], cache)
    forced = iter(tokens[4 if name in EAGLE3 else 5 :])
    guesses = draft(head, slots, 4, lambda _: next(forced), cache)
    np.testing.assert_allclose([guess.logits[:3] for guess in guesses], GOLDEN[name], atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_chunks_rollback_and_drafts_leave_the_same_bits(name: str) -> None:
    head = made(HEADS[name])
    features, tokens = words(head.config, 9)

    def greedy(slots: Slots, cache: object) -> list[np.ndarray]:
        choose = lambda logits: target_id(head, int(np.argmax(logits)))  # noqa: E731
        guesses = draft(head, slots, 3, choose, cache)  # type: ignore[arg-type]
        return [guess.logits for guess in guesses]

    whole = head.new_cache(32)
    slots = extend(head, features, tokens, whole)
    want = greedy(slots, whole)
    assert len(want) == 3
    assert all(np.array_equal(a, b) for a, b in zip(want, greedy(slots, whole), strict=True))

    other = head.new_cache(32)
    extend(head, features[:4], tokens[:4], other)
    wrong = extend(head, features[:3], tokens[5:8], other)  # a branch of the text that was not taken
    greedy(wrong, other)
    other.truncate(4)
    for row in range(4, 9):
        again = extend(head, features[row : row + 1], tokens[row : row + 1], other)
        if len(slots.logits):
            assert np.array_equal(again.logits[0], slots.logits[row])
            assert np.array_equal(again.hidden[0], slots.hidden[row])
    assert all(np.array_equal(a, b) for a, b in zip(want, greedy(again, other), strict=True))


def test_the_order_of_the_pair_only_swaps_the_halves_of_fc() -> None:
    """MiMo's order, stated by the other one."""
    arrays = random_head(HEADS["mtp"])
    shared = {name: TARGET_ARRAYS[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    features, tokens = words(HEADS["mtp"], 4)
    first = make_head(HEADS["mtp"], shared | arrays)
    swapped = arrays | {"fc.weight": np.roll(arrays["fc.weight"], 64, axis=1)}
    second = make_head(HEADS["mtp_mimo"], shared | swapped)
    a = extend(first, features, tokens, first.new_cache(8)).logits
    np.testing.assert_allclose(a, extend(second, features, tokens, second.new_cache(8)).logits, atol=1e-4)
    third = make_head(HEADS["mtp_mimo"], shared | arrays)
    assert np.abs(a - extend(third, features, tokens, third.new_cache(8)).logits).max() > 0.1


def test_a_gguf_head_equals_a_restatement_of_its_graph(tmp_path: Path) -> None:
    """llama.cpp's eagle3 graph in torch, on the file's own rows: it turns neighbouring elements of a head."""
    config = HEADS["eagle3"]
    path = gguf_eagle3(tmp_path, config, random_head(config))
    w = {name: torch.tensor(t.f32()).double() for name, t in GGUFFile.open(path).tensors.items() if t.kind == "F32"}
    features, tokens = words(config, 7)
    n, kv, dim = 7, 2, 16

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[name + ".weight"], 1e-6)

    g = torch.tensor(features).double() @ w["fc.weight"].T
    e = torch.tensor(TARGET_ARRAYS["model.embed_tokens.weight"]).double()[tokens]
    x = torch.cat([norm(e, "blk.0.attn_norm"), norm(g, "blk.0.attn_norm_2")], dim=1)
    q, k, v = ((x @ w[f"blk.0.attn_{part}.weight"].T).view(n, -1, dim) for part in "qkv")
    angle = torch.arange(n)[:, None] * 1e4 ** (-torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    q, k = (torch.view_as_real(torch.view_as_complex(a.reshape(n, -1, dim // 2, 2)) * turn).flatten(2) for a in (q, k))
    k, v = (a.repeat_interleave(q.shape[1] // kv, 1).transpose(0, 1) for a in (k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
    x = g + mixed.transpose(0, 1).reshape(n, -1) @ w["blk.0.attn_output.weight"].T
    y = norm(x, "blk.0.ffn_norm")
    gate, up = y @ w["blk.0.ffn_gate.weight"].T, y @ w["blk.0.ffn_up.weight"].T
    x = x + (torch.nn.functional.silu(gate) * up) @ w["blk.0.ffn_down.weight"].T
    want = norm(x, "output_norm") @ w["output.weight"].T

    loaded = load_head(path, TARGET)
    assert loaded.d2t is not None
    assert np.array_equal(loaded.d2t, D2T)
    head = make_head(loaded.config, shared_tensors(loaded, WeightMap.from_tensors(TARGET_ARRAYS), TARGET), loaded.d2t)
    slots = extend(head, features, tokens, head.new_cache(8))
    np.testing.assert_allclose(slots.logits, want.numpy(), atol=1e-4)
    np.testing.assert_allclose(slots.hidden, x.numpy(), atol=1e-4)


def test_a_small_draft_vocabulary_may_use_the_targets_head() -> None:
    import dataclasses

    config = dataclasses.replace(HEADS["eagle3"], own_lm_head=False)
    arrays = random_head(config)
    shared = {name: TARGET_ARRAYS[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    features, tokens = words(config, 3)
    head = make_head(config, shared | arrays, D2T)
    rows = {"lm_head.weight": TARGET_ARRAYS["lm_head.weight"][D2T]}
    own = make_head(HEADS["eagle3"], shared | arrays | rows, D2T)
    a, b = (extend(each, features, tokens, each.new_cache(8)).logits for each in (head, own))
    assert np.array_equal(a, b)
    assert target_id(head, 4) == 11


def test_the_rows_of_a_block_see_those_after_them() -> None:
    config = HEADS["dflash"]
    head = made(config)
    assert isinstance(head, BlockHead)
    features, tokens = words(config, 5)
    cache = head.new_cache(9)
    extend(head, features, tokens, cache)
    whole, part = head.block(3, cache), head.block(3, cache, rows=2)
    assert np.abs(whole[:2] - part).max() > 1e-3
    extend(head, features[:1], [1], cache)
    with pytest.raises(CapacityError, match=r"6 \+ 4 rows do not fit"):
        head.block(3, cache)
    assert cache.length == 6


def test_a_target_is_opened_without_its_head(tmp_path: Path) -> None:
    from heads_files import gguf_nextn, native_mtp

    arrays = random_head(HEADS["mtp"])
    config, tensors = open_target(native_mtp(tmp_path, HEADS["mtp"], arrays))
    assert (config.num_hidden_layers, set(tensors)) == (8, set(TARGET_ARRAYS))
    config, tensors = open_target(gguf_nextn(tmp_path, HEADS["mtp"], arrays))
    assert (config.num_hidden_layers, set(tensors)) == (8, {"token_embd.weight"})
