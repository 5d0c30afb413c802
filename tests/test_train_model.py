"""The head in PyTorch against the NumPy oracle; its loss against the plain formula; its files against the loader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import heads_files
from heads_oracle import draft, extend, step
from outpace.heads.config import HeadConfig, head_tensors
from outpace.heads.export import export_head
from outpace.heads.loading import load_head
from outpace.heads.reference import AutoregressiveHead, make_head
from outpace.train.batches import batch_of
from outpace.train.data import Example
from outpace.train.eagle3 import EagleHead
from outpace.train.evaluate import Score, score
from outpace.train.losses import Labels, soft_cross_entropy
from outpace.train.target import Target, default_taps, draft_vocabulary, eagle_config, first_weights
from outpace.types import UsageError

TARGET, ARRAYS, D2T = heads_files.TARGET, heads_files.TARGET_ARRAYS, heads_files.D2T
EMBEDDING, LM_HEAD = ARRAYS["model.embed_tokens.weight"], ARRAYS["lm_head.weight"]
_BASE = replace(heads_files.HEADS["eagle3"], own_lm_head=False)
CONFIGS = {
    "as trained": replace(
        _BASE,
        norm_before_residual=True,
        feature_norm="each",
        layers=replace(_BASE.layers, num_key_value_heads=_BASE.layers.num_attention_heads),
    ),
    "grouped": replace(_BASE, norm_output=True, feature_norm="whole"),
    "plain": _BASE,
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


def oracle(config: HeadConfig, weights: dict[str, np.ndarray]) -> AutoregressiveHead:
    head = make_head(config, {**weights, "lm_head.weight": LM_HEAD, "model.embed_tokens.weight": EMBEDDING}, D2T)
    assert isinstance(head, AutoregressiveHead)
    return head


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_from_every_anchor_is_the_oracles(name: str) -> None:
    config = CONFIGS[name]
    weights = weights_of(config)
    head = EagleHead(config, weights, EMBEDDING)
    sequences = examples(config, (16, 7), (12, 3), (9, 8))
    with torch.no_grad():
        ours = [final.numpy() @ LM_HEAD[D2T].T for final in head.steps(batch_of(sequences), 4)]
    reference = oracle(config, weights)
    compared = 0
    for row, example in enumerate(sequences):
        features = example.states.astype(np.float32).reshape(len(example.tokens), -1)
        cache = reference.new_cache(64)
        extend(reference, features[: example.answer - 1], example.tokens[1 : example.answer].tolist(), cache)
        for anchor in range(len(example.tokens) - example.answer):
            slot = example.answer - 1 + anchor
            slots = extend(reference, features[slot : slot + 1], [int(example.tokens[slot + 1])], cache)
            logits, hidden = slots.logits[-1], slots.hidden[-1]
            for j in range(min(4, len(example.tokens) - 1 - slot)):
                if j:
                    logits, hidden = step(reference, int(example.tokens[slot + 1 + j]), hidden, cache)
                np.testing.assert_allclose(ours[j][row, anchor], logits, atol=1e-4)
                compared += 1
            cache.truncate(slot + 1)
    assert compared > 50


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


def test_an_exported_head_loads_and_gives_the_same_logits(tmp_path: Path) -> None:
    config = eagle_config(TARGET, default_taps(TARGET), len(D2T))
    target = Target(TARGET, EMBEDDING, LM_HEAD, ARRAYS["model.norm.weight"])
    weights = first_weights(config, target, seed=1)
    weights["hidden_norm.weight"] *= 1.25
    export_head(tmp_path, config, weights, D2T, "tiny")
    loaded = load_head(tmp_path, TARGET)
    layers = replace(loaded.config.layers, max_window_layers=0)  # a default that says nothing without windows
    assert (replace(loaded.config, layers=layers), loaded.format) == (config, "speculators EAGLE-3")
    assert loaded.d2t is not None
    np.testing.assert_array_equal(loaded.d2t, D2T)
    rounded = {name: loaded.weights.take(name)[0] for name in weights}
    for name, array in weights.items():
        np.testing.assert_allclose(rounded[name], array, rtol=2**-8)
    example = examples(config, (10, 4))[0]
    features = example.states.astype(np.float32).reshape(10, -1)[:9]
    head = EagleHead(config, rounded, EMBEDDING)
    reference = oracle(config, rounded)
    slots = extend(reference, features, example.tokens[1:].tolist(), reference.new_cache(16))
    with torch.no_grad():
        final = next(iter(head.steps(batch_of([example]), 1)))[0].numpy()
    np.testing.assert_allclose(final @ LM_HEAD[D2T].T, slots.logits[3:], atol=1e-4)


def test_the_score_is_what_decoding_round_by_round_keeps() -> None:
    """A chain of the oracle's guesses, with the answer as the judge."""
    config, drafts = CONFIGS["as trained"], 3
    weights = weights_of(config)
    sequences = examples(config, (20, 3), (14, 6))
    reference = oracle(config, weights)
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
