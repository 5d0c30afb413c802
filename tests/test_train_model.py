"""Heads of every kind in PyTorch against the NumPy oracle and the core; losses against the plain formula; the score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import heads_files
import tiny
from heads_oracle import draft, extend, step
from outpace.backends.head import HeadRows
from outpace.backends.native import NativeBackend
from outpace.backends.native_head import NativeHead
from outpace.config import RopeScaling
from outpace.heads.config import HeadConfig, head_tensors
from outpace.heads.export import export_head
from outpace.heads.loading import load_head
from outpace.heads.reference import AutoregressiveHead, BlockHead, make_head
from outpace.train.batches import batch_of
from outpace.train.data import Example
from outpace.train.eagle3 import EagleHead
from outpace.train.evaluate import Score, score
from outpace.train.kinds import KINDS, kind_of
from outpace.train.losses import Labels, soft_cross_entropy
from outpace.train.module import HeadModule
from outpace.train.target import Target, default_taps, draft_vocabulary
from outpace.types import UsageError
from outpace.weights.weight_map import WeightMap

TARGET, ARRAYS, D2T = heads_files.TARGET, heads_files.TARGET_ARRAYS, heads_files.D2T
EMBEDDING, LM_HEAD = ARRAYS["model.embed_tokens.weight"], ARRAYS["lm_head.weight"]
_BASE = replace(heads_files.HEADS["eagle3"], own_lm_head=False)
CONFIGS = {
    "eagle3": replace(
        _BASE,
        norm_before_residual=True,
        feature_norm="each",
        layers=replace(_BASE.layers, num_key_value_heads=_BASE.layers.num_attention_heads),
    ),
    "eagle3 grouped": replace(_BASE, norm_output=True, feature_norm="whole"),
    "eagle3 plain": _BASE,
    "eagle3 of two layers": replace(_BASE, layers=replace(_BASE.layers, num_hidden_layers=2)),
    "eagle3 with biases": replace(
        _BASE, layers=replace(_BASE.layers, attention_bias=True, attention_out_bias=True, mlp_bias=True)
    ),
    "mtp": heads_files.HEADS["mtp_before"],
    "mtp, hidden first": replace(heads_files.HEADS["mtp_mimo"], draft_vocab_size=len(D2T)),
    "mtp of a llama": replace(heads_files.HEADS["mtp"], layers=_BASE.layers, norm_output=False),
    "mtp, scaled": replace(heads_files.HEADS["mtp"], layers=replace(_BASE.layers, rope_scaling=heads_files.LLAMA3)),
    "dflash": replace(heads_files.HEADS["dflash"], sample_from_anchor=True),
    "dflash from the second row": replace(heads_files.HEADS["dflash"], draft_vocab_size=len(D2T)),
}


def weights_of(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in head_tensors(config).items():
        noise = random.standard_normal(shape)
        found[name] = (1 + 0.3 * noise if len(shape) == 1 else 1.5 / np.sqrt(shape[1]) * noise).astype(np.float32)
    return found


def examples(config: HeadConfig, *sizes: tuple[int, int]) -> list[Example]:
    random = np.random.default_rng(5)
    return [
        Example(
            random.integers(0, 67, n).astype(np.int32),
            random.standard_normal((n, len(config.taps), 64)).astype(np.float16),
            answer,
        )
        for n, answer in sizes
    ]


def module(config: HeadConfig, weights: dict[str, np.ndarray]) -> HeadModule:
    return KINDS[config.algorithm].module(config, weights, EMBEDDING)


def ids_of(config: HeadConfig) -> np.ndarray | None:
    return D2T if config.draft_vocab_size == len(D2T) else None


def rows_of(config: HeadConfig) -> np.ndarray:
    """The target's head as the draft vocabulary sees it."""
    return LM_HEAD[D2T] if config.draft_vocab_size == len(D2T) else LM_HEAD


def oracle(config: HeadConfig, weights: dict[str, np.ndarray]) -> AutoregressiveHead | BlockHead:
    shared = {"lm_head.weight": LM_HEAD, "model.embed_tokens.weight": EMBEDDING}
    return make_head(config, weights | shared, ids_of(config))


def guesses_of(reference: AutoregressiveHead | BlockHead, example: Example, slot: int, count: int) -> list[np.ndarray]:
    """Logits of the oracle's draft from an anchor, along the text's own tokens."""
    features = example.states.astype(np.float32).reshape(len(example.tokens), -1)
    cache = reference.new_cache(64)
    slots = extend(reference, features[: slot + 1], example.tokens[1 : slot + 2].tolist(), cache)
    if isinstance(reference, BlockHead):
        return [guess.logits for guess in draft(reference, slots, count, lambda logits: 0, cache)]
    found, hidden = [slots.logits[-1]], slots.hidden[-1]
    for j in range(1, min(count, len(example.tokens) - 1 - slot)):
        logits, hidden = step(reference, int(example.tokens[slot + 1 + j]), hidden, cache)
        found.append(logits)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_guess_from_every_anchor_is_the_oracles(name: str) -> None:
    config = CONFIGS[name]
    weights = weights_of(config)
    count = 3 if name == "dflash from the second row" else 4
    sequences = examples(config, (13, 7), (12, 3), (9, 8))
    with torch.no_grad():
        finals = module(config, weights).steps(batch_of(sequences), count)
        ours = [final.numpy() @ rows_of(config).T for final in finals]
    reference = oracle(config, weights)
    compared = 0
    for row, example in enumerate(sequences):
        for anchor in range(len(example.tokens) - example.answer):
            wanted = guesses_of(reference, example, example.answer - 1 + anchor, count)
            for j, logits in enumerate(wanted):
                np.testing.assert_allclose(ours[j][row, anchor], logits, atol=1e-4)
            compared += len(wanted)
    assert compared > 40


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_learns_and_the_future_teaches_nothing(name: str) -> None:
    """Gradients are finite and reach every weight; what comes after a draft does not change it."""
    config = CONFIGS[name]
    head = module(config, weights_of(config))
    sequences = examples(config, (14, 5), (9, 3))
    count = 3 if name == "dflash from the second row" else 4
    finals = list(head.steps(batch_of(sequences), count))
    torch.stack([final[0, :6].square() for final in finals]).sum().backward()
    for parameter, weight in head.named_parameters():
        assert weight.grad is not None, parameter
        assert bool(weight.grad.isfinite().all()), parameter
        assert float(weight.grad.abs().sum()) > 0, parameter
    first = sequences[0]
    changed = replace(first, tokens=first.tokens.copy(), states=first.states.copy())
    slot = first.answer - 1 + 2  # anchor 2 sees features up to its slot, tokens up to the next and those it drafted
    changed.states[slot + 1 :] += 1
    changed.tokens[slot + 2 + (0 if config.algorithm == "dflash" else count - 1) :] = 1
    with torch.no_grad():
        again = list(head.steps(batch_of([changed]), count))
    for before, after in zip(finals, again, strict=True):
        torch.testing.assert_close(before[0, 2], after[0, 2], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(before[0, 4], after[0, 4], atol=1e-2)


def test_a_head_reads_its_taps_among_those_that_were_recorded() -> None:
    config = replace(heads_files.HEADS["dflash"], taps=(4, 1))
    weights = weights_of(config)
    example = examples(replace(config, taps=(1, 3, 4, 7)), (12, 5))[0]
    few = replace(example, states=np.ascontiguousarray(example.states[:, [2, 0]]))
    make = kind_of("dflash").module
    with torch.no_grad():
        ours = next(iter(make(config, weights, EMBEDDING, (1, 3, 4, 7)).steps(batch_of([example]), 1)))
        wanted = next(iter(make(config, weights, EMBEDDING).steps(batch_of([few]), 1)))
    assert torch.equal(ours, wanted)
    with pytest.raises(UsageError, match="the data lack the output of layer 4"):
        make(config, weights, EMBEDDING, (1, 3))


def test_a_block_has_no_more_guesses_than_rows() -> None:
    head = module(heads_files.HEADS["dflash"], weights_of(heads_files.HEADS["dflash"]))
    with pytest.raises(UsageError, match="has 3 guesses, not 4"):
        list(head.steps(batch_of(examples(heads_files.HEADS["dflash"], (9, 4))), 4))


def test_the_loss_and_its_gradient_are_those_of_the_plain_formula() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 16, requires_grad=True)
    head, states = torch.randn(40, 16), torch.randn(300, 16)
    labels = Labels.of(states, head)
    total, best = soft_cross_entropy(hidden, head, labels.means)
    total.backward()
    gradient, hidden.grad = hidden.grad, None
    p = (states @ head.T).softmax(-1)
    plain = torch.nn.functional.cross_entropy(hidden @ head.T, p, reduction="sum")
    plain.backward()
    torch.testing.assert_close(total, plain, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(labels.entropies, -(p * p.log()).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.equal(best, (hidden @ head.T).argmax(-1))
    assert torch.equal(labels.best, p.argmax(-1))


@pytest.mark.parametrize(("kind", "scaled"), [(kind, scaled) for kind in KINDS for scaled in (False, True)])
def test_an_exported_head_is_the_same_head_to_loader_oracle_and_core(kind: str, scaled: bool, tmp_path: Path) -> None:
    parts = KINDS[kind]
    model = replace(TARGET, rope_scaling=heads_files.LLAMA3) if scaled else TARGET
    taps = default_taps(model)
    config = parts.config(model, taps, len(D2T))
    assert config.layers.rope_scaling == model.rope_scaling
    target = Target(model, EMBEDDING, LM_HEAD, ARRAYS["model.norm.weight"])
    weights = parts.first(config, target, 1)
    weights["hidden_norm.weight"] *= 1.25
    export_head(tmp_path / "head", config, weights, D2T, "tiny")
    loaded = load_head(tmp_path / "head", model)
    layers = replace(loaded.config.layers, max_window_layers=config.layers.max_window_layers)  # says nothing here
    assert replace(loaded.config, layers=layers) == config
    assert loaded.d2t is not None
    np.testing.assert_array_equal(loaded.d2t, D2T)
    rounded = {name: loaded.weights.take(name)[0] for name in weights}
    for name, array in weights.items():
        np.testing.assert_allclose(rounded[name], array, rtol=2**-8)

    example = examples(KINDS["eagle3"].config(TARGET, taps, len(D2T)), (10, 4))[0]
    head = parts.module(config, rounded, EMBEDDING, taps)
    with torch.no_grad():
        ours = np.stack([final[0].numpy() @ LM_HEAD[D2T].T for final in head.steps(batch_of([example]), 3)])
    seen = replace(example, states=example.states[:, [taps.index(tap) for tap in config.taps]])
    features = seen.states.astype(np.float32).reshape(10, -1)
    beside = NativeBackend(model, WeightMap.from_tensors(ARRAYS), precision="f32", threads=1)
    own = WeightMap.from_tensors(rounded | {"lm_head.weight": LM_HEAD[D2T]})
    core = NativeHead(beside, replace(config, own_lm_head=True), own, D2T, precision="f32")
    for anchor in range(5):
        at = example.answer - 1 + anchor
        wanted = guesses_of(oracle(config, rounded), seen, at, 3)
        slot = core.new_slot()
        if config.algorithm == "dflash":
            core.read(slot, features[: at + 1])
            found = core.block([slot], [int(example.tokens[at + 1])], config.block_size).logits[:3]
        else:
            found = core.forward([HeadRows(slot, example.tokens[1 : at + 2].tolist(), features[: at + 1])]).logits[-1:]
        core.free_slot(slot)
        np.testing.assert_allclose(ours[: len(wanted), anchor], wanted, atol=1e-4)
        np.testing.assert_allclose(found, ours[: len(found), anchor], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "says"), [("mtp", "models of experts"), ("eagle2", "kind must be one of eagle3, mtp")]
)
def test_what_cannot_be_trained_is_refused(kind: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        kind_of(kind).config(tiny.random_config("moe", num_hidden_layers=8), (1, 3, 4, 7), 9)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_a_gguf_file_have_no_place_in_a_heads_files(kind: str) -> None:
    factors = RopeScaling(kind="factors", factors=(1.0,) * (TARGET.head_dim // 2))
    with pytest.raises(UsageError, match="safetensors folder"):
        kind_of(kind).config(replace(TARGET, rope_scaling=factors), (1, 3, 4, 7), 9)


def test_the_score_is_what_decoding_round_by_round_keeps() -> None:
    """A chain of the oracle's guesses, with the answer as the judge."""
    config, drafts = CONFIGS["eagle3"], 3
    weights = weights_of(config)
    sequences = examples(config, (20, 3), (14, 6))
    reference = oracle(config, weights)
    assert isinstance(reference, AutoregressiveHead)
    rng = np.random.default_rng(2)
    for example in sequences:  # let a part of the guesses be right
        features = example.states.astype(np.float32).reshape(len(example.tokens), -1)
        for at in range(example.answer + 1, len(example.tokens)):
            cache = reference.new_cache(64)
            slots = extend(reference, features[: at - 1], example.tokens[1:at].tolist(), cache)
            if rng.random() < 0.6:
                example.tokens[at] = D2T[int(slots.logits[-1].argmax())]
    rounds = tokens = 0
    kept = [0] * drafts
    for example in sequences:
        features = example.states.astype(np.float32).reshape(len(example.tokens), -1)
        at = example.answer  # the newest token
        while at < len(example.tokens) - 1:
            cache = reference.new_cache(64)
            slots = extend(reference, features[:at], example.tokens[1 : at + 1].tolist(), cache)
            guesses = draft(reference, slots, drafts, lambda logits: int(D2T[int(logits.argmax())]), cache)
            right = 0
            while right < drafts and at + 1 + right < len(example.tokens):
                if guesses[right].token != example.tokens[at + 1 + right]:
                    break
                kept[right] += 1
                right += 1
            gained = min(right + 1, len(example.tokens) - 1 - at)
            rounds, tokens, at = rounds + 1, tokens + gained, at + gained
    found = score(EagleHead(config, weights, EMBEDDING), torch.tensor(LM_HEAD[D2T]), D2T, sequences, drafts)
    assert (found.rounds, found.tokens, found.kept) == (rounds, tokens, kept)
    assert sum(kept) > 3
    assert found.tokens_per_round == tokens / rounds
    assert Score([0], [0]).tokens_per_round == 0.0


def test_the_draft_vocabulary_is_the_most_frequent_and_the_ends() -> None:
    counts = np.array([5, 0, 9, 9, 1, 0, 7, 0])
    assert draft_vocabulary(counts, 4, (7,)).tolist() == [2, 3, 6, 7]
    assert draft_vocabulary(counts, 1, (1, 5)).tolist() == [1, 5]
    assert draft_vocabulary(counts, 100, (0,)).tolist() == list(range(8))


def test_small_targets_have_no_room_for_the_taps() -> None:
    with pytest.raises(UsageError, match="too small"):
        default_taps(replace(TARGET, num_hidden_layers=3))
