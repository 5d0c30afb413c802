"""The multi-token-prediction head: against an independent restatement, and as the draft of a real loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outpace import MtpHead, Qwen3Generator, Qwen3MtpSpeculator, Qwen3Speculator, SampleOpts, SpecDecoder, WeightMap
from outpace.backends.head import HeadRows
from outpace.types import ModelError, UsageError
from tiny import BACKENDS, random_model

Arrays = dict[str, np.ndarray]
EXACT = ["reference-f32", "native-f32"]


def mtp_arrays(config: Any, arrays: Arrays, seed: int = 5) -> Arrays:
    """Random head tensors for a tiny dense model: its layer is shaped like the model's."""
    random = np.random.default_rng(seed)
    size = config.hidden_size
    head = {
        name.replace("model.layers.0.", "mtp.layers.0."): value
        for name, value in random_model(seed=seed)[1].items()
        if name.startswith("model.layers.0.")
    }
    head["mtp.fc.weight"] = (random.standard_normal((size, 2 * size)) / np.sqrt(size)).astype(np.float32)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = (1 + 0.3 * random.standard_normal(size)).astype(np.float32)
    return head


def restated_logits(
    config: Any, arrays: Arrays, head: Arrays, tokens: list[int], hidden: np.ndarray, own: int, after: bool
) -> np.ndarray:
    """The head over tokens[1:], in torch, all slots at once; the last `own` slots continue with its own output."""
    w = {name: torch.tensor(value, dtype=torch.float64) for name, value in (arrays | head).items()}
    D, K = config.head_dim, config.num_key_value_heads  # noqa: N806

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[name], config.rms_norm_eps)

    states = [torch.tensor(row, dtype=torch.float64) for row in hidden]
    logits = torch.empty(0)
    for rounds in range(own + 1):
        n = len(tokens) - 1 - own + rounds
        e = norm(w["model.embed_tokens.weight"][tokens[1 : n + 1]], "mtp.pre_fc_norm_embedding.weight")
        h = norm(torch.stack(states[:n]), "mtp.pre_fc_norm_hidden.weight")
        x = torch.cat([e, h], dim=1) @ w["mtp.fc.weight"].T
        y = norm(x, "mtp.layers.0.input_layernorm.weight")
        q, k, v = ((y @ w[f"mtp.layers.0.self_attn.{p}_proj.weight"].T).view(n, -1, D) for p in "qkv")
        q, k = norm(q, "mtp.layers.0.self_attn.q_norm.weight"), norm(k, "mtp.layers.0.self_attn.k_norm.weight")
        angle = torch.arange(n)[:, None] * config.rope_theta ** (-torch.arange(0, D, 2) / D)[None, :]
        turn = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[:, None, :]

        def rotate(a: torch.Tensor, turn: torch.Tensor = turn) -> torch.Tensor:
            z = torch.complex(a[..., : D // 2].contiguous(), a[..., D // 2 :].contiguous()) * turn
            return torch.cat([z.real, z.imag], dim=-1)

        q, k = rotate(q).transpose(0, 1), rotate(k).transpose(0, 1)
        groups = q.shape[0] // K
        k, v = k.repeat_interleave(groups, 0), v.transpose(0, 1).repeat_interleave(groups, 0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(n, -1) @ w["mtp.layers.0.self_attn.o_proj.weight"].T
        y = norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate, up = (y @ w[f"mtp.layers.0.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mtp.layers.0.mlp.down_proj.weight"].T
        final = norm(x, "mtp.norm.weight")
        logits = final @ w["lm_head.weight"].T
        states = [*states[:n], (final if after else x)[-1]]
    return logits.numpy()


@pytest.mark.parametrize("hidden", ["after_norm", "before_norm"])
def test_logits_equal_an_independent_restatement(hidden: str) -> None:
    config, arrays = random_model()
    extra = mtp_arrays(config, arrays)
    head = MtpHead.from_loader(config, WeightMap.from_tensors(arrays | extra), hidden=hidden)  # type: ignore[arg-type]
    generator = Qwen3Generator(BACKENDS["reference-f32"](config, arrays))
    tokens, own = [3, 1, 4, 1, 5, 9, 2, 6], 3
    states = generator.hidden(head.tap, tokens[: len(tokens) - own])
    want = restated_logits(config, arrays, extra, tokens, np.stack(states), own, hidden == "after_norm")
    for running in (Qwen3MtpSpeculator(Qwen3Generator(BACKENDS[k](config, arrays)), head).head for k in EXACT):
        slot = running.new_slot() if running.capacity.slots > 1 else 0
        found = running.forward([HeadRows(slot, tokens[1 : len(states) + 1], np.stack(states))])
        rows = [found.logits]
        for token in tokens[len(states) + 1 :]:
            found = running.forward([HeadRows(slot, [token], found.hidden[-1:], own=True, append=True)])
            rows.append(found.logits)
        np.testing.assert_allclose(np.concatenate(rows), want, atol=1e-4)


def decode(draft: Any, target: Any, context: list[int], n: int, length: int, **decoder: Any) -> tuple[list[int], int]:
    spec = SpecDecoder(draft, target, n, 7, **decoder)
    rounds = 0
    text = list(context)
    while len(text) < len(context) + length:
        text += spec.step(text)
        rounds += 1
    return text[len(context) :][:length], rounds


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_random_head_never_changes_the_greedy_text(kind: str) -> None:
    config, arrays = random_model()
    weights = WeightMap.from_tensors(arrays | mtp_arrays(config, arrays))
    head = MtpHead.from_loader(config, weights)
    generator = Qwen3Generator(BACKENDS[kind](config, arrays))
    mtp = Qwen3MtpSpeculator(generator, head)
    plain = Qwen3Generator(BACKENDS[kind](config, arrays))
    plain.prefill([1, 2, 3])
    found, rounds = decode(mtp, mtp, [1, 2, 3], 3, 20, bonus=True)
    assert found == plain.generate_cached(20, SampleOpts.greedy(ignore_eos=True))
    # One pass reads the prompt for its hidden states; then a round is one pass of the target.
    assert generator.passes == 1 + rounds
    assert mtp.head_steps <= 3 + rounds * 4 + 20


def perfect() -> tuple[Any, Arrays, Arrays]:
    """A one-layer model with a narrow window, and the head that computes just what the model does: fc hands the
    embedding through, the layer is the model's own."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    config, arrays = random_model("qwen3", 2, num_hidden_layers=1, **window)
    embedding = arrays["model.embed_tokens.weight"]
    arrays["model.embed_tokens.weight"] = embedding / np.sqrt(np.mean(embedding**2, axis=1, keepdims=True))
    size = config.hidden_size
    head = {name.replace("model.layers.", "mtp.layers."): value for name, value in arrays.items() if ".layers." in name}
    head["mtp.fc.weight"] = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1).astype(np.float32)
    head["mtp.pre_fc_norm_embedding.weight"] = head["mtp.pre_fc_norm_hidden.weight"] = np.ones(size, dtype=np.float32)
    head["mtp.norm.weight"] = arrays["model.norm.weight"]
    return config, arrays, head


@pytest.mark.parametrize("kind", EXACT)
def test_a_head_that_knows_the_model_is_accepted(kind: str) -> None:
    # The head's own layer sees the whole text where the model's sees three tokens: give it the same window.
    config, arrays, extra = perfect()
    head = MtpHead.from_loader(config, WeightMap.from_tensors(arrays | extra))
    layers = replace(head.config.layers, use_sliding_window=True, max_window_layers=0)
    head = replace(head, config=replace(head.config, layers=layers))
    generator = Qwen3Generator(BACKENDS[kind](config, arrays))
    mtp = Qwen3MtpSpeculator(generator, head)
    context = [5, 1, 2, 3, 4]
    found, rounds = decode(mtp, Qwen3Speculator(generator), context, 3, 24, bonus=True)
    assert rounds == 6
    plain = Qwen3Generator(BACKENDS[kind](config, arrays))
    plain.prefill(context)
    assert found == plain.generate_cached(24, SampleOpts.greedy(ignore_eos=True))


def test_sampling_keeps_rows_that_tokens_were_drawn_from() -> None:
    config, arrays = random_model()
    head = MtpHead.from_loader(config, WeightMap.from_tensors(arrays | mtp_arrays(config, arrays)))
    opts = SampleOpts(temperature=0.8, top_k=5, seed=3)
    mtp = Qwen3MtpSpeculator(Qwen3Generator(BACKENDS["reference-f32"](config, arrays)), head, opts)
    proposal = mtp.propose([1, 2, 3], 4)
    assert proposal.drawn
    assert (np.count_nonzero(proposal.probs, axis=1) == 5).all()
    assert all(row[token] > 0 for token, row in zip(proposal.tokens, proposal.probs, strict=True))
    assert mtp.propose([1, 2, 3], 4).tokens == proposal.tokens
    assert mtp.propose([1], 2).probs.shape == (2, config.vocab_size)
    assert mtp.propose([1, 2], 0).tokens == []


@pytest.mark.parametrize("kind", EXACT)
def test_heads_that_share_a_generator_have_each_their_own_hidden_states(kind: str) -> None:
    config, arrays = random_model()
    extra = mtp_arrays(config, arrays)
    heads = [
        MtpHead.from_loader(config, WeightMap.from_tensors(arrays | extra), hidden=hidden)
        for hidden in ("after_norm", "before_norm")
    ]

    def want(head: MtpHead, context: list[int]) -> np.ndarray:
        return Qwen3MtpSpeculator(Qwen3Generator(BACKENDS[kind](config, arrays)), head).propose(context, 3).probs

    shared = Qwen3Generator(BACKENDS[kind](config, arrays))
    plain = Qwen3Speculator(shared)
    speculators = []
    context = [1, 2, 3, 4, 5]
    for head in heads:
        plain.verify(context, [6, 7])  # tokens that are read before the head is there
        speculators.append(Qwen3MtpSpeculator(shared, head))
        plain.verify([1, 2, 3, 8], [9])  # ... and that the text goes on without
        np.testing.assert_allclose(speculators[-1].propose(context, 3).probs, want(head, context), atol=1e-6)
    for length in (3, 5, 4):
        for speculator, head in zip(speculators, heads, strict=True):
            found = speculator.propose(context[:length], 3).probs
            np.testing.assert_allclose(found, want(head, context[:length]), atol=1e-6)
    passes = shared.passes
    for speculator in speculators:
        speculator.propose(context[:4], 3)
    assert shared.passes == passes  # neither takes what the other needs


def test_a_closed_speculator_gives_its_slot_back() -> None:
    config, arrays = random_model()
    head = MtpHead.from_loader(config, WeightMap.from_tensors(arrays | mtp_arrays(config, arrays)))
    generator = Qwen3Generator(BACKENDS["native-f32"](config, arrays))
    speculator = Qwen3MtpSpeculator(generator, head)
    speculator.propose([1, 2, 3], 2)
    speculator.close()
    with pytest.raises(UsageError):
        speculator.propose([1, 2, 3], 2)
    for _ in range(speculator.head.capacity.slots):
        speculator.head.new_slot()
    assert Qwen3Speculator(generator).propose([1, 2, 3], 2).tokens


def test_a_head_that_does_not_fit_is_refused_by_name() -> None:
    config, arrays = random_model()
    extra = mtp_arrays(config, arrays)
    for change, what in (
        ({"mtp.fc.weight": None}, "no multi-token-prediction head"),
        ({"mtp.norm.weight": None}, "missing: model.norm.weight"),
        ({"mtp.norm.weight": np.ones(3, dtype=np.float32)}, r"model.norm.weight \[3\] instead of \[64\]"),
        ({"mtp.other.weight": np.ones(3, dtype=np.float32)}, "mtp.other.weight"),
    ):
        tensors = {k: v for k, v in (arrays | extra | change).items() if v is not None}  # type: ignore[operator]
        with pytest.raises(ModelError, match=what):
            MtpHead.from_loader(config, WeightMap.from_tensors(tensors))
    small, small_arrays = random_model(hidden_size=32)
    generator = Qwen3Generator(BACKENDS["reference-f32"](small, small_arrays))
    head = MtpHead.from_loader(config, WeightMap.from_tensors(arrays | extra))
    with pytest.raises(UsageError, match="hidden size 64"):
        Qwen3MtpSpeculator(generator, head)
