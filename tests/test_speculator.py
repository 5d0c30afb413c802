"""The seed contract: its three tests on its exact tiny model, on every backend, and what a round costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

import outpace
from fakes import TableBackend, table_logits
from outpace import (
    Device,
    DraftProposal,
    Qwen3Config,
    Qwen3Generator,
    Qwen3Speculator,
    SampleOpts,
    SpecDecoder,
    UsageError,
    VerifyResult,
    WeightMap,
)
from outpace.types import CapacityError
from tiny import BACKENDS, VARIANTS, random_model, seed_model

SEED = 0xC0FFEE


def generator(kind: str, variant: str | None = None, seed: int = 0) -> Qwen3Generator:
    config, arrays = seed_model() if variant is None else random_model(variant, seed)
    return Qwen3Generator(BACKENDS[kind](config, arrays))


def speculator(kind: str, variant: str | None = None, seed: int = 0, opts: SampleOpts | None = None) -> Qwen3Speculator:
    return Qwen3Speculator(generator(kind, variant, seed), opts)


MODELS = [None, *VARIANTS]


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_self_speculation_equals_plain_greedy(kind: str, variant: str | None) -> None:
    plain = generator(kind, variant)
    plain.prefill([1, 2, 3, 5])
    want = plain.generate_cached(6, SampleOpts.greedy(ignore_eos=True))
    decoder = SpecDecoder(speculator(kind, variant), speculator(kind, variant), n=3, seed=SEED)
    context = [1, 2, 3, 5]
    for _ in range(2):
        new = decoder.step(context)
        assert len(new) == 3
        context += new
    assert context[4:] == want


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_propose(kind: str, variant: str | None) -> None:
    proposal = speculator(kind, variant).propose([1, 2, 3], 4)
    assert len(proposal.tokens) == 4
    assert proposal.probs.shape == (4, 16 if variant is None else 67)
    np.testing.assert_allclose(proposal.probs.sum(axis=1), 1, atol=1e-4)
    assert proposal.probs.argmax(axis=1).tolist() == proposal.tokens


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_verify(kind: str, variant: str | None) -> None:
    result = speculator(kind, variant).verify([1, 2, 3], [5, 7, 2])
    assert result.probs.shape == (3, 16 if variant is None else 67)
    np.testing.assert_allclose(result.probs.sum(axis=1), 1, atol=1e-4)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_different_draft_still_gives_the_targets_greedy_text(kind: str) -> None:
    plain = generator(kind, "qwen3")
    plain.prefill([1, 2, 3])
    want = plain.generate_cached(20)
    for bonus in (False, True):
        decoder = SpecDecoder(speculator(kind, "qwen3", seed=9), speculator(kind, "qwen3"), 3, SEED, bonus=bonus)
        context = [1, 2, 3]
        while len(context) < 23:
            context += decoder.step(context)
        assert context[3:23] == want


# ---------------------------------------------------------------------------------------------------- what it computes


def table(salt: int = 0, **backend: int) -> Qwen3Speculator:
    return Qwen3Speculator(Qwen3Generator(TableBackend(5, salt=salt, positions=400, rows=64, **backend)))


@pytest.mark.parametrize("salts", [(0, 0), (3, 0)])
@pytest.mark.parametrize("bonus", [False, True])
def test_a_round_costs_at_most_n_plus_one_draft_rows_and_one_target_pass(salts: tuple[int, int], bonus: bool) -> None:
    n = 4
    draft, target = table(salts[0]), table(salts[1])
    decoder = SpecDecoder(draft, target, n, SEED, bonus=bonus)
    context = [1, 2, 3, 4]
    for i in range(40):
        draft.generator.rows_computed = target.generator.passes = target.generator.rows_computed = 0
        new = decoder.step(context)
        assert 1 <= len(new) <= n + bonus
        context += new
        assert target.generator.passes == 1
        if i:
            assert draft.generator.rows_computed <= n + 1
            assert target.generator.rows_computed <= n + 2


def test_one_generator_can_play_both_sides() -> None:
    both = table()
    decoder = SpecDecoder(both, both, 3, SEED)
    context = [1, 2]
    for _ in range(4):
        context += decoder.step(context)
    want = Qwen3Generator(TableBackend(5, positions=400))
    want.prefill([1, 2])
    assert context[2:] == want.generate_cached(12)


def test_an_unrelated_context_starts_over() -> None:
    s = table()
    s.verify([1, 2, 3, 4], [0, 1])
    s.propose([1, 2, 3, 4, 0, 1], 2)
    s.generator.rows_computed = 6
    found = s.verify([1, 4, 4], [2]).probs[0]
    logits = table_logits([1, 4, 4], 5).astype(np.float64)
    np.testing.assert_allclose(found, np.exp(logits) / np.exp(logits).sum())
    assert s.generator.rows_computed == 6 + 3


def test_prefill_decode_and_generate_share_one_cache() -> None:
    g = Qwen3Generator(TableBackend(5))
    assert np.array_equal(g.prefill_get_last_logits([1, 2, 3]), table_logits([1, 2, 3], 5))
    assert np.array_equal(g.decode_get_logits(4), table_logits([1, 2, 3, 4], 5))
    assert g.rows_computed == 4
    a = g.generate_cached(3)
    b = g.generate_cached(3)
    fresh = Qwen3Generator(TableBackend(5))
    fresh.prefill([1, 2, 3, 4])
    assert a + b == fresh.generate_cached(6)
    assert g.rows_computed == 10
    assert g.generate_cached(0) == []
    assert g.config().vocab_size == 5


def test_a_prompt_longer_than_a_pass_is_read_in_chunks() -> None:
    prompt = [i % 5 for i in range(50)]
    g = Qwen3Generator(TableBackend(5, rows=8))
    assert np.array_equal(g.prefill_get_last_logits(prompt), table_logits(prompt, 5))
    s = Qwen3Speculator(g)
    assert s.verify([4, *prompt], [1, 2]).probs.shape == (2, 5)


def test_the_end_of_the_context() -> None:
    g = Qwen3Generator(TableBackend(5, positions=8))
    g.prefill([1, 2, 3])
    assert len(g.generate_cached(100)) == 6  # the last one needs no place
    s = Qwen3Speculator(Qwen3Generator(TableBackend(5, positions=8)))
    assert s.verify([1, 2, 3, 4], [1, 2, 3, 4, 0]).probs.shape == (5, 5)
    assert s.verify([1, 2, 3, 4], [1, 2, 3, 4, 0]).bonus is None
    with pytest.raises(CapacityError, match="do not fit"):
        s.verify([1] * 8, [1, 2])


# ------------------------------------------------------------------------------------------------------------ sampling


def sampled_law(rule: str, draft_opts: SampleOpts, trials: int = 4000) -> np.ndarray:
    """Counts of the first token over many seeds, prompt [1, 2]; sampling at temperature 1."""
    opts = SampleOpts(temperature=1.0)
    counts = np.zeros(5)
    draft_model, target_model = Qwen3Generator(TableBackend(5, salt=3)), Qwen3Generator(TableBackend(5))
    for seed in range(trials):
        draft = Qwen3Speculator(draft_model, SampleOpts(**{"temperature": draft_opts.temperature, "seed": seed}))
        target = Qwen3Speculator(target_model, opts)
        counts[SpecDecoder(draft, target, 2, seed, opts, rule=rule).step([1, 2])[0]] += 1  # type: ignore[arg-type]
    return counts


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits.astype(np.float64))
    return p / p.sum()


@pytest.mark.parametrize("drawn", [True, False])
def test_sampling_keeps_the_targets_law_for_drawn_and_greedy_drafts(drawn: bool) -> None:
    counts = sampled_law("rejection", SampleOpts(temperature=1.0) if drawn else SampleOpts.greedy())
    p = softmax(table_logits([1, 2], 5))
    assert stats.chisquare(counts, counts.sum() * p).pvalue > 1e-4


def test_argmax_softmax_reproduces_the_known_bias() -> None:
    counts = sampled_law("argmax-softmax", SampleOpts.greedy())
    p, q = softmax(table_logits([1, 2], 5)), softmax(table_logits([1, 2], 5, salt=3))
    x = int(q.argmax())
    accept = min(1.0, p[x] / q[x])
    rest = np.maximum(0, p - q)
    biased = (1 - accept) * rest / rest.sum()
    biased[x] += accept
    expected = counts.sum() * biased
    assert stats.chisquare(counts[biased > 0], expected[biased > 0]).pvalue > 1e-4
    assert counts[biased == 0].sum() == 0
    assert np.abs(biased - p).max() > 0.05


def test_sampling_rows_are_the_processed_distribution() -> None:
    opts = SampleOpts(temperature=0.5, top_k=2, seed=1)
    s = Qwen3Speculator(Qwen3Generator(TableBackend(5)), opts)
    proposal = s.propose([1, 2], 3)
    assert (np.count_nonzero(proposal.probs, axis=1) == 2).all()
    assert all(row[token] > 0 for token, row in zip(proposal.tokens, proposal.probs, strict=True))
    verified = s.verify([1, 2], proposal.tokens)
    assert np.array_equal(verified.probs, proposal.probs)
    assert s.propose([1, 2], 3).tokens == proposal.tokens


# ----------------------------------------------------------------------------------------------------------- the edges


def test_nothing_proposed_is_nothing_computed() -> None:
    s = table()
    assert s.propose([1], 0).tokens == []
    assert s.propose([1], 0).probs.shape == (0, 5)
    assert s.verify([1], []).probs.shape == (0, 5)
    assert SpecDecoder(s, s, 0, SEED).step([1]) == []
    assert s.generator.passes == 0


def test_bad_input_is_an_error_and_leaves_the_generator_usable() -> None:
    s = table()
    for call in (
        lambda: s.propose([1], -1),
        lambda: s.propose([], 2),
        lambda: s.verify([], [1]),
        lambda: s.verify([1], [5]),
        lambda: s.verify([-1], [1]),
        lambda: SpecDecoder(s, s, -1, SEED),
        lambda: SpecDecoder(s, s, 1, SEED, rule="other"),  # type: ignore[arg-type]
        lambda: Qwen3Generator(TableBackend(5)).decode_get_logits(1),
        lambda: Qwen3Generator(TableBackend(5)).generate_cached(1),
        lambda: s.generator.generate_cached(-1),
    ):
        with pytest.raises(UsageError):
            call()
    assert s.propose([1, 2], 2).tokens == table().propose([1, 2], 2).tokens


def test_a_speculator_with_too_few_rows_is_refused() -> None:
    class Short:
        def propose(self, context: Sequence[int], n: int) -> DraftProposal:
            return DraftProposal([1, 2], np.ones((1, 5)))

        def verify(self, context: Sequence[int], proposed: Sequence[int]) -> VerifyResult:
            return VerifyResult(np.ones((2, 5)))

    with pytest.raises(UsageError, match="2 rows"):
        SpecDecoder(Short(), Short(), 2, SEED).step([1])


def test_every_name_of_the_contract_is_importable() -> None:
    for name in outpace.__all__:
        assert getattr(outpace, name) is not None
    names = "Qwen3Config WeightMap Device SampleOpts Qwen3Generator DraftProposal VerifyResult Speculator"
    for name in [*names.split(), "Qwen3Speculator", "SpecDecoder", "Qwen3MtpSpeculator"]:
        assert name in outpace.__all__
    config, arrays = seed_model()
    assert isinstance(config, Qwen3Config)
    weights = WeightMap.from_tensors(arrays)
    assert Device.CPU in Device
    made = Qwen3Generator.from_loader(config, weights, Device.CPU, backend="reference")
    assert len(weights) == 0
    made.prefill([1, 2, 3, 5])
    assert len(made.generate_cached(6)) == 6
    with pytest.raises(UsageError, match="device"):
        Qwen3Generator.from_loader(config, weights, "tpu")  # type: ignore[arg-type]
