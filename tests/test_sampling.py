"""Sampling: the noise's quality, the filters, the history, logprobs, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outpace.sampling import Noise, Sampler, Stream, distribution, exponentials, generation_defaults
from outpace.types import Distribution, Draft, ModelError, NumericalError, SampleOpts, UsageError

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 3.0, 0.5], dtype=np.float32)


def sampler(prompt: tuple[int, ...] = (0,), **opts: object) -> Sampler:
    return Sampler(SampleOpts(**{"temperature": 1.0, "seed": 1, **opts}), 6, prompt)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- the noise


def test_drawn_tokens_follow_the_row() -> None:
    p = np.array([0.5, 0.05, 0.25, 0.2])
    row = Distribution(np.array([3, 10, 500, 40_000]), p)
    for stream in (Stream.TOKEN, Stream.DRAFT, Stream.RESIDUAL):
        drawn = [Noise(seed).draw(row, stream, position) for seed in range(40) for position in range(250)]
        counts = [drawn.count(int(token)) for token in row.tokens]
        assert sum(counts) == 10_000
        assert stats.chisquare(counts, 10_000 * p).pvalue > 1e-4


def test_neighbouring_places_are_independent() -> None:
    row = Distribution(np.arange(3), np.array([0.2, 0.3, 0.5]))
    for step in ("seed", "position", "choice"):
        pairs = np.zeros((3, 3))
        for i in range(6000):
            places = {
                "seed": ((i, 0, 7), (i + 1, 0, 7)),
                "position": ((3, 0, i), (3, 0, i + 1)),
                "choice": ((3, i, 7), (3, i + 1, 7)),
            }[step]
            a, b = (Noise(seed, choice).draw(row, Stream.TOKEN, at) for seed, choice, at in places)
            pairs[a, b] += 1
        # Overlapping pairs: each number is used twice, so that the statistic is only roughly chi-square.
        expected = 6000 * np.outer(row.probs, row.probs)
        assert ((pairs - expected) ** 2 / expected).sum() < 40, step


def test_uniform_numbers_are_even_and_inside_the_open_interval() -> None:
    u = [Noise(9).uniform(Stream.ACCEPT, start, depth) for start in range(400) for depth in range(10)]
    assert 0.0 < min(u) < max(u) < 1.0
    assert stats.kstest(u, "uniform").pvalue > 1e-4


def test_exponential_noise_is_exponential_and_depends_on_the_token_only() -> None:
    tokens = np.arange(20_000)
    noise = exponentials(12345, tokens)
    assert stats.kstest(noise, "expon").pvalue > 1e-4
    assert np.array_equal(exponentials(12345, tokens[777:779]), noise[777:779])


def test_keys_differ_in_every_part() -> None:
    places = itertools.product((0, 1, 2**63, 2**64 + 5), (0, 1), Stream, range(5))
    keys = [Noise(seed, choice).key(stream, at) for seed, choice, stream, at in places]
    keys += [Noise(0).key(stream, a, b) for stream in Stream for a in range(5) for b in range(5)]
    assert len(set(keys)) == len(keys)


def test_a_missing_seed_is_drawn_and_reported() -> None:
    a, b = (Sampler(SampleOpts(temperature=1.0), 6) for _ in range(2))
    assert a.noise.seed != b.noise.seed
    again = Sampler(SampleOpts(temperature=1.0, seed=a.noise.seed), 6)
    assert [a.token(LOGITS, (0,) * i) for i in range(20)] == [again.token(LOGITS, (0,) * i) for i in range(20)]


def test_every_round_uses_fresh_numbers_for_accept_and_residual() -> None:
    s = sampler()
    before = [s.accept(depth) for depth in range(5)]
    s.extend((1, 2))
    after = [s.accept(depth) for depth in range(5)]
    assert not set(before) & set(after)


# --------------------------------------------------------------------------------------------------------- the filters


def kept(logits: np.ndarray = LOGITS, **opts: object) -> list[int]:
    return distribution(logits, SampleOpts(**{"temperature": 1.0, **opts})).tokens.tolist()  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    assert kept(temperature=0.0) == [1]
    assert sampler(temperature=0.0).token(LOGITS) == 1


def test_ties_at_the_edge_of_a_filter_go_to_the_lowest_id() -> None:
    flat = np.zeros(6, dtype=np.float32)
    assert kept(flat, top_k=2) == [0, 1]
    assert kept(np.array([2, 3, 2, 2], dtype=np.float32), top_k=2) == [0, 1]
    assert kept(flat, top_p=0.5) == [0, 1, 2]
    assert kept(LOGITS, top_k=1) == [1]


def test_filters_see_what_the_one_before_left() -> None:
    # Among the two that top_k leaves, the better one holds 0.5 of the mass: top_p 0.4 keeps it alone.
    assert kept(top_k=2, top_p=0.4) == [1]
    # Of the whole row it holds 0.39: alone, top_p 0.45 takes both.
    assert kept(top_p=0.45) == [1, 4]
    assert kept(top_k=2, top_p=0.45) == [1]


def test_top_p_never_keeps_nothing_and_one_keeps_all() -> None:
    assert kept(top_p=1e-9) == [1]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=0) == kept(top_k=-1) == kept(top_k=6) == kept(top_k=99) == [0, 1, 2, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.integers(130, 3000), st.booleans())
def test_top_p_of_a_large_vocabulary_equals_the_full_sort(seed: int, mass: float, size: int, ties: bool) -> None:
    logits = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    if ties:
        logits = np.round(logits, 1)
    p = distribution(logits, SampleOpts(temperature=1.0)).probs
    order = np.argsort(-p, kind="stable")
    expected = np.sort(order[: int(np.searchsorted(np.cumsum(p[order]), mass)) + 1])
    assert kept(logits, top_p=mass) == expected.tolist()


def test_masked_tokens_have_no_chance_and_all_masked_is_an_error() -> None:
    s = sampler(banned_tokens=(1, 4))
    assert s.row(LOGITS).tokens.tolist() == [0, 2, 3, 5]
    with pytest.raises(NumericalError, match="no token"):
        sampler(banned_tokens=tuple(range(6))).token(LOGITS)


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    s = Sampler(SampleOpts(temperature=1.0, seed=0), 6, known_tokens=4)
    assert s.row(LOGITS).tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_an_error(temperature: float, value: float) -> None:
    logits = LOGITS.copy()
    logits[3] = value
    with pytest.raises(NumericalError, match="logits hold"):
        sampler(temperature=temperature).token(logits)


def test_a_very_low_temperature_is_the_arg_max() -> None:
    logits = np.array([0.0, 1.0, 0.5], dtype=np.float32)
    row = distribution(logits, SampleOpts(temperature=1e-300))
    assert row.tokens.tolist() == [1]


# ----------------------------------------------------------------------------------------------------- the native path


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_native_path_gives_the_reference_tokens(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 7, 16, 130, 1000, 5003, 50_001]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (random.standard_normal(size) * data.draw(st.sampled_from([0.1, 1.0, 5.0, 30.0]))).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many ties
    logits[random.random(size) < data.draw(st.sampled_from([0.0, 0.5]))] = -np.inf
    logits[int(random.integers(size))] = 1.0
    opts = SampleOpts(
        temperature=data.draw(st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0, 3.0, 1e4])),
        top_k=data.draw(st.sampled_from([None, 1, 2, 40, 10_000])),
        top_p=data.draw(st.sampled_from([None, 1e-9, 0.3, 0.9, 0.999, 1.0])),
        min_p=data.draw(st.sampled_from([None, 0.05, 0.9, 1.0])),
        seed=data.draw(st.integers(0, 2**70)),
    )
    native, reference = Sampler(opts, size), Sampler(opts, size, native=False)
    for position in range(5):
        assert native.token(logits, (0,) * position) == reference.token(logits, (0,) * position)


def test_the_native_path_draws_from_a_whole_vocabulary_by_its_law() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125] + [1e-30] * 50_000)).astype(np.float32)
    s = Sampler(SampleOpts(temperature=1.0, seed=3), len(logits))
    counts = np.bincount([s.token(logits, (0,) * position) for position in range(3000)], minlength=4)
    assert stats.chisquare(counts[:4], 3000 * np.array([0.5, 0.25, 0.125, 0.125])).pvalue > 1e-4


# --------------------------------------------------------------------------------------------------------- the history


def test_repetition_sees_prompt_and_output_presence_and_frequency_the_output() -> None:
    s = sampler((2,), repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    s.extend((0, 0))
    x = s.processed(LOGITS, (3,))
    assert x.tolist() == [1.0 / 2 - 2 * 0.5 - 0.25, 3.0, 2.0 / 2, -1.0 * 2 - 0.5 - 0.25, 3.0, 0.5]
    assert LOGITS.tolist() == [1.0, 3.0, 2.0, -1.0, 3.0, 0.5]


def test_logits_are_handed_through_when_nothing_applies() -> None:
    assert sampler().processed(LOGITS) is LOGITS


def test_bad_words_ban_their_last_token_after_their_beginning() -> None:
    s = sampler(bad_words=((5, 1), (4,)))
    assert s.processed(LOGITS)[[1, 4]].tolist() == [3.0, -math.inf]
    assert s.processed(LOGITS, (5,))[[1, 4]].tolist() == [-math.inf, -math.inf]
    s.extend((5,))
    assert s.processed(LOGITS)[1] == -math.inf
    assert s.processed(LOGITS, (2,))[1] == 3.0


def test_end_tokens_wait_for_min_tokens() -> None:
    s = Sampler(SampleOpts.greedy(min_tokens=2, stop_tokens=(4,)), 6, (0,), end_tokens=(1,))
    assert s.token(LOGITS) == s.token(LOGITS, (0,)) == 2
    assert s.token(LOGITS, (0, 0)) == 1


class OnlyEven:
    """A constraint: even tokens, and after a 4 everything."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def mask(self, ahead: tuple[int, ...]) -> np.ndarray | None:
        return None if 4 in (*self.seen, *ahead) else np.arange(6) % 2 == 0

    def cut(self, draft: tuple[int, ...]) -> int:
        return next((i for i, token in enumerate(draft) if token % 2), len(draft))

    def advance(self, tokens: tuple[int, ...]) -> None:
        self.seen.extend(tokens)

    def fork(self) -> OnlyEven:
        return OnlyEven()


def test_a_constraint_masks_each_row_with_its_own_path() -> None:
    s = sampler(constraint=OnlyEven())
    assert s.row(LOGITS).tokens.tolist() == [0, 2, 4]
    assert s.row(LOGITS, (4,)).tokens.tolist() == [0, 1, 2, 3, 4, 5]
    s.extend((4,))
    assert s.row(LOGITS).tokens.tolist() == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------------ logprobs


def test_logprobs_are_of_the_raw_target() -> None:
    s = sampler(logprobs=3, temperature=0.3, top_k=1, logit_bias={0: 50.0})
    found = s.logprobs(LOGITS, 0)
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert found.logprob == pytest.approx(expected[0], abs=1e-12)
    assert [token for token, _ in found.top] == [1, 4, 2]
    assert [value for _, value in found.top] == pytest.approx(expected[[1, 4, 2]], abs=1e-12)


def test_processed_logprobs_are_of_the_row_that_was_drawn_from() -> None:
    found = sampler(logprobs=5, processed_logprobs=True, top_k=2).logprobs(LOGITS, 4)
    assert found.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in found.top] == [1, 4]


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": "hot"}, {"top_k": 1.5}, {"top_k": -2},
        {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"typical_p": 0.0}, {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf}, {"frequency_penalty": math.nan}, {"seed": -1}, {"max_tokens": 0},
        {"min_tokens": -1}, {"logprobs": -1}, {"rule": "guess"}, {"stop": "text"}, {"stop": ("",)},
        {"logit_bias": {1: math.nan}}, {"logit_bias": {1: math.inf}}, {"bad_words": ((),)}, {"temperature": True},
    ],
)  # fmt: skip
def test_an_impossible_option_is_refused_by_name(field: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(field))):
        SampleOpts(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", [{"logit_bias": {6: 1.0}}, {"banned_tokens": (-1,)}, {"allowed_tokens": (6,)}, {"bad_words": ((1, 6),)}]
)
def test_a_token_id_outside_the_vocabulary_is_refused_by_name(field: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(field))):
        sampler(**field)


def test_the_callers_options_override_the_models() -> None:
    defaults = generation_defaults({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "other": 1})
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    opts = SampleOpts(temperature=0.1, top_k=0).with_defaults(defaults)
    assert (opts.temperature, opts.top_k, opts.top_p) == (0.1, 0, 0.95)
    greedy = {"temperature": 0.0}
    assert (
        generation_defaults({}) == generation_defaults({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    )
    assert generation_defaults({"repetition_penalty": 1.1, "top_k": 9}) == {"repetition_penalty": 1.1, **greedy}
    with pytest.raises(ModelError, match="top_p"):
        generation_defaults({"do_sample": True, "top_p": 7})


def test_rows_of_the_sampler_are_not_looked_through_again() -> None:
    """... and those of others are, unless they say that they vouch for them."""
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for opts in (
        SampleOpts(temperature=0.7),
        SampleOpts.greedy(),
        SampleOpts(temperature=2.0, top_p=0.5, typical_p=0.9),
    ):
        row = distribution(logits, opts)
        assert row.sound
        assert Distribution(row.tokens, row.probs).is_sound()
    tokens, probs = np.array([1, 2]), np.array([0.5, 0.6])
    assert not Distribution(tokens, probs).is_sound()
    with pytest.raises(UsageError, match="cannot have been drawn from"):
        Draft((1,), (Distribution(tokens, probs),)).checked(5)
    with pytest.raises(UsageError, match="cannot have been drawn from"):
        Draft((3,), (Distribution(tokens, np.array([0.5, 0.5]), sound=True),)).checked(5)


# ---------------------------------------------------------------------------------------------------------- candidates


CANDIDATE_OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0}, "plain": {}, "cold": {"temperature": 1e-30}, "hot": {"temperature": 5.0},
    "too hot": {"temperature": 1e300, "banned_tokens": (2,)}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.6},
    "typical_p": {"typical_p": 0.5}, "min_p": {"min_p": 0.4}, "repetition": {"repetition_penalty": 1.9},
    "presence": {"presence_penalty": 1.5}, "banned": {"banned_tokens": (1,)}, "allowed": {"allowed_tokens": (2, 3)},
    "bias": {"logit_bias": {5: 6.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", CANDIDATE_OPTIONS)
def test_candidates_begin_with_the_drafts_own_token(name: str) -> None:
    random = np.random.default_rng(0)
    for seed in range(40):
        s = sampler(seed=seed, **CANDIDATE_OPTIONS[name])
        s.extend((1, 4))
        logits = (2 * random.standard_normal(6)).astype(np.float32)
        found = s.candidates(logits, 4, (2,))
        assert found[0][0] == s.candidates(logits, 1, (2,))[0][0] == s.draft(logits, (2,))[0] == s.token(logits, (2,))
        assert len(s.candidates(logits, 1, (2,))) == 1
        tokens, sure = zip(*found, strict=True)
        assert len(set(tokens)) == len(tokens) <= 4
        assert set(tokens) <= set(s.row(logits, (2,)).tokens.tolist()) or not s.opts.temperature
        assert all(0.0 < chance <= 1.0 for chance in sure)
        assert list(sure) == sorted(sure, reverse=True)
        assert sum(sure) <= 1.0 + 1e-9


def test_greedy_candidates_are_the_most_probable_tokens_as_probable_as_they_are() -> None:
    found = sampler(temperature=0.0, logit_bias={3: 5.0}).candidates(LOGITS, 3)
    biased = LOGITS.astype(np.float64) + np.array([0, 0, 0, 5, 0, 0])
    p = np.exp(biased) / np.exp(biased).sum()
    assert [token for token, _ in found] == [3, 1, 4]  # ties go to the lowest id
    np.testing.assert_allclose([sure for _, sure in found], p[[3, 1, 4]], rtol=1e-6)


def test_sampled_candidates_are_those_that_the_race_ends_with() -> None:
    for seed in range(50):
        s = sampler(seed=seed, temperature=1.3)
        p = s.row(LOGITS).probs
        race = exponentials(s.noise.key(Stream.TOKEN, s.position), np.arange(6)) / p
        found = s.candidates(LOGITS, 6)
        assert [token for token, _ in found] == np.argsort(race).tolist()
        np.testing.assert_allclose([sure for _, sure in found], np.sort(1 / race)[::-1] / (1 / race).sum(), rtol=1e-5)


def test_a_target_much_like_the_draft_chooses_one_of_few_candidates() -> None:
    """The second to fourth hold more of the target's choices than the next most probable tokens would."""
    random = np.random.default_rng(3)
    raced = probable = 0
    for seed in range(400):
        s = Sampler(SampleOpts(temperature=1.0, seed=seed), 300)
        logits = random.standard_normal(300).astype(np.float32) * 2
        target = logits + 0.5 * random.standard_normal(300).astype(np.float32)
        choice = s.token(target)
        found = [token for token, _ in s.candidates(logits, 4)]
        raced += choice in found
        probable += choice in [found[0], *np.argsort(-logits)[:3].tolist()]
    assert raced > 380 > probable + 40


def test_candidates_of_broken_logits_are_errors() -> None:
    for logits in (np.full(6, np.nan), np.full(6, -np.inf), np.array([0, 1, np.inf, 0, 0, 0])):
        with pytest.raises(NumericalError):
            sampler().candidates(logits.astype(np.float32), 3)


@pytest.mark.parametrize(
    "opts",
    [
        (("temperature", 0.0),),
        (("temperature", 1.0),),
        (("temperature", 0.6), ("top_k", 20), ("top_p", 0.95)),
        (("temperature", 1.3), ("min_p", 0.02)),
        (("temperature", 2.0), ("top_k", 3)),
        (("temperature", 1.0), ("top_p", 0.8), ("min_p", 0.01)),
    ],
)
@pytest.mark.parametrize("some", [None, 5, 40, 700])
def test_native_candidates_are_the_references(opts: tuple[tuple[str, Any], ...], some: int | None) -> None:
    vocab, rng = 900, np.random.default_rng(some or 1)
    for seed in range(12):
        native, reference = (Sampler(SampleOpts(seed=seed, **dict(opts)), vocab, native=fast) for fast in (True, False))
        logits = (4 * rng.standard_normal(some or vocab)).astype(np.float32)
        ids, row = None, logits
        if some is not None:
            ids = np.sort(rng.choice(vocab, some, replace=False)).astype(np.int64)
            row = np.full(vocab, -np.inf, np.float32)
            row[ids] = logits
            assert native.as_they_are(ids)
        a, b = native.candidates(logits, 6, (seed,), ids), reference.candidates(row, 6, (seed,))
        assert [token for token, _ in a] == [token for token, _ in b]
        np.testing.assert_allclose([share for _, share in a], [share for _, share in b], rtol=2e-3)


def test_candidates_of_some_tokens_alone_are_only_for_logits_that_stay_as_they_are() -> None:
    ids = np.array([1, 3, 5], dtype=np.int64)
    for more in (
        {"logit_bias": {2: 1.0}}, {"banned_tokens": (3,)}, {"presence_penalty": 0.5}, {"allowed_tokens": (1, 2)},
        {"bad_words": ((1, 2),)}, {"min_tokens": 2},
    ):  # fmt: skip
        assert not Sampler(SampleOpts(temperature=0.0, **more), 8).as_they_are(ids)
    assert Sampler(SampleOpts(temperature=0.0, banned_tokens=(2,)), 8, known_tokens=6).as_they_are(ids)
    assert not Sampler(SampleOpts(temperature=0.0), 8, known_tokens=5).as_they_are(ids)
    assert Sampler(SampleOpts(temperature=0.0, min_tokens=2), 8).as_they_are(ids, (1, 1))
    broken = Sampler(SampleOpts(temperature=0.0), 8)
    with pytest.raises(NumericalError):
        broken.candidates(np.array([0, np.nan, 1], np.float32), 2, (), ids)
