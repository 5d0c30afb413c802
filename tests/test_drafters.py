"""Drafters against brute force, and their bookkeeping."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import TableBackend, table_logits
from outpace.drafters import DraftModelDrafter, NgramDrafter, State, SuffixDrafter, Want
from outpace.drafters.suffix import SuffixAutomaton
from outpace.sampling import Sampler
from outpace.types import SampleOpts, UsageError

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def state(tokens: list[int], vocab_size: int = 5, **opts: object) -> State:
    sampler = Sampler(SampleOpts(**{"temperature": 0.0, "seed": 3, **opts}), vocab_size, tokens)  # type: ignore[arg-type]
    return State(tokens, sampler)


def goes_on(tokens: list[int], start: int, n: int) -> tuple[int, ...]:
    """n tokens from `start`; what is copied may be copied again."""
    text = list(tokens)
    for i in range(n):
        text.append(text[start + i])
    return tuple(text[len(tokens) :])


@settings(max_examples=200, deadline=None)
@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_ngram_is_the_latest_occurrence_of_the_longest_match(tokens: list[int], low: int, more: int, n: int) -> None:
    drafter, grown = NgramDrafter(low + more, low), state([])
    for token in tokens:  # grows as a text does
        grown.tokens.append(token)
        drafter.propose([Want(grown, n)])
    (draft,) = drafter.propose([Want(grown, n)])
    for size in range(low + more, low - 1, -1):
        ends = [e for e in range(size, len(tokens)) if size <= len(tokens) and tokens[e - size : e] == tokens[-size:]]
        if ends:
            assert draft.tokens == goes_on(tokens, ends[-1], n)
            return
    assert draft.tokens == ()


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 6))
def test_suffix_automaton_finds_the_longest_earlier_occurrence(tokens: list[int], n: int) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(tokens, 1):
        automaton.extend(token)
        text = tokens[:i]
        longest = max(
            (size for size in range(1, i) if any(text[e - size : e] == text[-size:] for e in range(size, i))), default=0
        )
        assert automaton.match_length == longest
        if longest:
            starts = [e for e in range(longest, i) if text[e - longest : e] == text[-longest:]]
            assert automaton.continuation(n) in [goes_on(text, e, n) for e in starts]
        else:
            assert automaton.continuation(n) == ()


def test_suffix_automaton_is_linear_in_the_text() -> None:
    automaton = SuffixAutomaton()
    tokens = np.random.default_rng(0).integers(0, 3, 20_000).tolist()
    start = time.perf_counter()
    for token in tokens[:10_000]:
        automaton.extend(token)
    half = time.perf_counter() - start
    for token in tokens[10_000:]:
        automaton.extend(token)
    # Quadratic growth would make the second half three times as long as the first; the bound leaves room for noise.
    assert time.perf_counter() - start < 2.9 * half + 0.5
    assert len(automaton.length) <= 2 * len(tokens)


def test_suffix_draft_grows_with_the_match() -> None:
    drafter = SuffixDrafter(shortest=2, reach=1.0)
    assert drafter.propose([Want(state([1, 2, 3, 4, 9, 2]), 8)])[0].tokens == ()
    assert drafter.propose([Want(state([1, 2, 3, 4, 9, 1, 2]), 8)])[0].tokens == (3, 4)
    assert drafter.propose([Want(state([1, 2, 3, 4, 9, 1, 2, 3]), 8)])[0].tokens == (4, 9, 1)
    assert drafter.propose([Want(state([1, 2, 3, 4, 9, 1, 2, 3]), 2)])[0].tokens == (4, 9)


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_requests_are_kept_apart_and_forgotten(make: type) -> None:
    drafter = make()
    a, b = state([1, 2, 3, 1, 2]), state([1, 2, 4, 1, 2])
    assert [d.tokens[:1] for d in drafter.propose([Want(a, 3), Want(b, 3)])] == [(3,), (4,)]
    drafter.forget(a)
    drafter.forget(a)
    assert drafter.propose([Want(a, 1)])[0].tokens == (3,)


@pytest.mark.parametrize("wrong", [lambda: NgramDrafter(2, 3), lambda: NgramDrafter(2, 0), lambda: SuffixDrafter(0)])
def test_impossible_settings_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError):
        wrong()  # type: ignore[operator]


def test_draft_model_follows_the_text_by_common_prefix() -> None:
    model = TableBackend()
    drafter, s = DraftModelDrafter(model), state([1, 2, 3])
    (draft,) = drafter.propose([Want(s, 3)])
    assert model.rows == [3, 1, 1]
    greedy = [1, 2, 3]
    for _ in range(3):
        greedy.append(int(np.argmax(table_logits(greedy, 5))))
    assert draft.tokens == tuple(greedy[3:])
    # Everything accepted and a bonus token: two tokens to read.
    s.tokens += [*draft.tokens, 0]
    drafter.propose([Want(s, 2)])
    assert model.rows[3:] == [2, 1]
    # Nothing of the next draft accepted: the stale rows are cut off, one token to read.
    s.tokens.append(4)
    (draft,) = drafter.propose([Want(s, 1)])
    assert model.rows[5:] == [1]
    assert draft.tokens == (int(np.argmax(table_logits(s.tokens, 5))),)
    assert model.length(0) == len(s.tokens)
    # Two tokens that are not the draft's.
    (draft,) = drafter.propose([Want(s, 4)])
    s.tokens += [(token + 1) % 5 for token in draft.tokens[:2]]
    model.rows.clear()
    (draft,) = drafter.propose([Want(s, 1)])
    assert model.rows == [2]
    assert draft.tokens == (int(np.argmax(table_logits(s.tokens, 5))),)
    # The text has ended; one that goes on from it finds its tokens.
    drafter.forget(s)
    model.rows.clear()
    (again,) = drafter.propose([Want(state([*s.tokens, 1, 0]), 1)])
    assert model.rows == [2]
    assert again.tokens == (int(np.argmax(table_logits([*s.tokens, 1, 0], 5))),)
    drafter.close()
    assert not model._held


def test_draft_model_reads_long_prompts_of_many_requests_in_passes_that_fit() -> None:
    model = TableBackend(rows=7)
    states = [state([i % 5 for i in range(n)]) for n in (20, 1, 9)]
    drafts = DraftModelDrafter(model).propose([Want(s, 2) for s in states])
    assert max(model.rows) <= 7
    for s, draft in zip(states, drafts, strict=True):
        text = list(s.tokens)
        for _ in range(2):
            text.append(int(np.argmax(table_logits(text, 5))))
        assert draft.tokens == tuple(text[-2:])


def test_draft_model_stops_at_the_end_of_its_own_context() -> None:
    model = TableBackend(positions=8)
    drafter = DraftModelDrafter(model)
    assert len(drafter.propose([Want(state([1] * 6), 9)])[0]) == 3
    assert len(drafter.propose([Want(state([1] * 8), 9)])[0]) == 1
    assert len(drafter.propose([Want(state([1] * 9), 9)])[0]) == 0


@pytest.mark.parametrize("size", [3, 9])
def test_draft_model_may_pad_its_vocabulary_differently(size: int) -> None:
    model = TableBackend(size, logits=lambda prefix: np.arange(size, dtype=np.float32))
    (draft,) = DraftModelDrafter(model).propose([Want(state([1, 2]), 1)])
    assert draft.tokens == (min(size, 5) - 1,)


def test_draft_tokens_are_coupled_to_the_targets_noise_or_carry_their_q() -> None:
    drafter = DraftModelDrafter(TableBackend())
    s = state([1, 2, 3], temperature=1.0)
    (draft,) = drafter.propose([Want(s, 4)])
    assert draft.q == (None,) * 4
    text = [1, 2, 3]
    for token in draft.tokens:
        assert token == s.sampler.token(table_logits(text, 5), text[3:])
        text.append(token)
    s = state([1, 2, 3], temperature=1.0, rule="rejection")
    (draft,) = drafter.propose([Want(s, 2)])
    assert draft.q is not None
    for i, q in enumerate(draft.q):
        assert q is not None
        p = np.exp(table_logits([1, 2, 3, *draft.tokens[:i]], 5).astype(np.float64))
        np.testing.assert_allclose(q.dense(5), p / p.sum())
