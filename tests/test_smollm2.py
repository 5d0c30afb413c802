"""The real model, real text: the same words with and without speculation, and the same as transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from fakes import oracle_drafter, random_drafter, wrong_drafter
from outpace import LanguageModel, SampleOpts
from outpace.backends.native import NativeBackend
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters import Drafter, DraftModelDrafter, NgramDrafter, SuffixDrafter
from outpace.models.loading import load_model

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers, then write it again with type hints.",
    "Repeat this list three times: apple, pear, plum, fig.",
    "Summarise: The cat sat on the mat. The mat was red. The cat was black. The cat slept on the mat all day.",
    "What is 12 + 30? Show your steps.",
]
TOKENS = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.1},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"temperature": 0.5, "logit_bias": {28: 2.0, 30: -5.0}},
}


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[LanguageModel]:
    with outpace.load(smollm2, draft="none") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def small(smollm2: Path) -> NativeBackend:
    """A draft model with the same vocabulary: the same file with every second layer left out."""
    loaded = load_model(smollm2)
    config, weights = loaded.config, loaded.weights
    kept = [i for i in range(config.num_hidden_layers) if i % 2 == 0 or i < 4 or i > 25]
    layers = {name: weights.take_tensor(name) for name in weights.keys() if ".layers." in name}  # noqa: SIM118
    for name, tensor in layers.items():
        layer = int(name.split(".")[2])
        if layer in kept:
            weights.put(name.replace(f".layers.{layer}.", f".layers.{kept.index(layer)}."), tensor)
    fields = {name: getattr(config, name) for name in config.__slots__}
    config = type(config)(**fields | {"num_hidden_layers": len(kept), "layer_types": None})
    return NativeBackend(config, weights, slots=8)


def ids(model: LanguageModel) -> list[list[int]]:
    return [model.chat_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def options(setting: str) -> list[SampleOpts]:
    return [SampleOpts(seed=100 + i, max_tokens=TOKENS, **SETTINGS[setting]) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(model: LanguageModel) -> dict[str, list[list[int]]]:
    """Plain decoding, one prompt at a time."""
    return {
        setting: [
            model.generate(prompt, opts, speculate=False).token_ids
            for prompt, opts in zip(ids(model), options(setting), strict=True)
        ]
        for setting in SETTINGS
    }


@pytest.mark.parametrize("k", [pytest.param(k, marks=[] if k in (1, 5) else [pytest.mark.slow]) for k in range(1, 9)])
@pytest.mark.parametrize("kind", ["ngram", "suffix", "draft_model"])
def test_the_same_tokens_with_speculation(
    model: LanguageModel, small: NativeBackend, plain: dict[str, list[list[int]]], kind: str, k: int
) -> None:
    """Every setting with every draft length, five prompts in one batch, each against itself decoded alone."""
    drafter: Drafter = {
        "ngram": lambda: NgramDrafter(shortest=1),
        "suffix": lambda: SuffixDrafter(shortest=1, reach=8),
        "draft_model": lambda: DraftModelDrafter(small),
    }[kind]()
    before = model.engine.decoder
    model.engine.decoder = Decoder(model.target, (drafter,), Controller(k))
    try:
        for setting in SETTINGS:
            results = model.generate_many(ids(model), options(setting))
            assert [r.token_ids for r in results] == plain[setting], setting
            drafted = sum(r.stats.drafted for r in results)
            accepted = sum(r.stats.accepted for r in results)
            assert 0 < accepted < drafted, (setting, accepted, drafted)
    finally:
        drafter.close()
        model.engine.decoder = before


@pytest.mark.parametrize("k", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "random"])
def test_the_same_tokens_with_scripted_drafters(
    model: LanguageModel, plain: dict[str, list[list[int]]], kind: str, k: int
) -> None:
    before = model.engine.decoder
    try:
        for setting in SETTINGS:
            answers = {tuple(p): [*a, *([0] * 16)] for p, a in zip(ids(model), plain[setting], strict=True)}
            drafter = {
                "perfect": lambda answers=answers: oracle_drafter(answers),
                "wrong": lambda answers=answers: wrong_drafter(answers, model.config.vocab_size),
                "random": lambda: random_drafter(model.config.vocab_size),
            }[kind]()
            model.engine.decoder = Decoder(model.target, (drafter,), Controller(k))
            results = model.generate_many(ids(model), options(setting))
            assert [r.token_ids for r in results] == plain[setting], setting
            drafted = sum(r.stats.drafted for r in results)
            accepted = sum(r.stats.accepted for r in results)
            assert drafted > 0
            if kind == "perfect":
                # Only guesses beyond the end of an answer are wrong.
                assert accepted >= drafted - k * len(results) > 0
            if kind == "wrong":
                assert accepted == 0
    finally:
        model.engine.decoder = before


def test_the_answer_is_sensible(model: LanguageModel) -> None:
    result = model.chat([{"role": "user", "content": "Name the capital of France."}], max_tokens=40)
    assert "Paris" in result.text
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in model.config.eos_token_ids
    assert "<|im_end|>" not in result.text


def test_threads_and_load_settings_change_nothing(smollm2: Path, plain: dict[str, list[list[int]]]) -> None:
    with outpace.load(smollm2, threads=1, context=512, slots=2) as other:
        for setting in ("greedy", "warm"):
            results = other.generate_many(ids(other), options(setting))
            assert [r.token_ids for r in results] == plain[setting]


def test_streams_add_up_to_the_answer_and_can_be_left(model: LanguageModel) -> None:
    messages = [{"role": "user", "content": PROMPTS[2]}]
    whole = model.chat(messages, max_tokens=30)
    deltas = list(model.chat_stream(messages, max_tokens=30))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].result is not None
    assert deltas[-1].result.finish_reason == whole.finish_reason
    stream = model.chat_stream(messages, max_tokens=30)
    next(stream)
    stream.close()
    assert not model.engine.running
    assert model.chat(messages, max_tokens=30).token_ids == whole.token_ids


def test_taps_are_the_same_with_drafts(model: LanguageModel) -> None:
    prompt = ids(model)[2]
    results = []
    for drafters in ((), (NgramDrafter(shortest=1),)):
        before, model.engine.decoder = model.engine.decoder, Decoder(model.target, drafters, Controller(4))
        results.append(model.generate(prompt, max_tokens=24, taps=(2, 30)))
        model.engine.decoder = before
    assert results[0].token_ids == results[1].token_ids
    for tap in (2, 30):
        assert results[0].taps[tap].shape == (len(prompt) + len(results[0].token_ids) - 1, 576)
        assert np.array_equal(results[0].taps[tap], results[1].taps[tap])


def test_f32_greedy_tokens_equal_transformers(smollm2: Path) -> None:
    """The first 64 greedy tokens of five prompts, our float32 mode against LlamaForCausalLM on the same weights."""
    import torch
    import transformers

    loaded = load_model(smollm2)
    c = loaded.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    state = {name: torch.from_numpy(loaded.weights.take(name)[0].copy()) for name in loaded.weights.keys()}  # noqa: SIM118
    theirs.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    theirs.eval()
    with outpace.load(smollm2, precision="f32", draft="none") as ours:
        prompts = ids(ours)
        found = ours.generate_many(prompts, SampleOpts.greedy(max_tokens=64, ignore_eos=True))
        for prompt, result in zip(prompts, found, strict=True):
            # One pass over prompt and answer: if each token is their arg-max after those before it, theirs is the same.
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
            assert len(result.token_ids) == 64
            assert result.token_ids == logits.argmax(dim=-1).tolist()
