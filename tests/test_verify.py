"""Exactness of verification, by enumeration: the joint law of several rounds equals the target's own to 1e-12.

Every random choice of the real code (draft tokens, accept or reject, corrections, bonus tokens) is followed down all
its branches; nothing is sampled. The expected law is restated here independently, with dense rows.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fakes import Branches, table_logits
from outpace import decode, sampling, verify
from outpace.types import Distribution, Draft, SampleOpts, UsageError

V = 3
PROMPT = (1, 0)
Law = dict[tuple[int, ...], float]


# -------------------------------------------------------------------------------------- the expected law, restated


def expected_row(logits: np.ndarray, prompt: tuple[int, ...], output: tuple[int, ...], o: SampleOpts) -> np.ndarray:
    """The documented order and scope: steps 1 to 3 in float32, the row in float64, dense."""
    f32 = np.float32
    x = logits.copy()
    for token, bias in (o.logit_bias or {}).items():
        x[token] += f32(bias)
    counts = Counter(output)
    for token in range(V):
        r = f32(o.repetition_penalty or 1)
        if token in prompt or token in counts:
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        if counts[token]:
            x[token] -= f32(o.frequency_penalty or 0) * f32(counts[token]) + f32(o.presence_penalty or 0)
    for token in o.banned_tokens or ():
        x[token] = -np.inf
    for word in o.bad_words or ():
        if (*((9,) * len(word)), *output)[-(len(word) - 1) or len(output) + 99 :] == word[:-1] or len(word) == 1:
            x[word[-1]] = -np.inf
    if o.allowed_tokens is not None:
        x[[t for t in range(V) if t not in o.allowed_tokens]] = -np.inf
    if len(output) < (o.min_tokens or 0):
        x[list(o.stop_tokens)] = -np.inf
    if not o.temperature:
        return np.eye(V)[int(np.argmax(x))]
    x = x.astype(np.float64)
    p = np.exp((x - x.max()) / o.temperature)
    p /= p.sum()
    if o.min_p:
        p = _keep(p, p >= o.min_p * p.max())
    if o.top_k and o.top_k > 0:
        p = _keep(p, np.argsort(np.argsort(-p, kind="stable"), kind="stable") < o.top_k)
    if o.top_p:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p = _keep(p, np.isin(np.arange(V), order[before < o.top_p]))
    if o.typical_p:
        logp = np.log(np.where(p > 0, p, 1.0))
        distance = np.where(p > 0, np.abs(-logp + np.sum(p * logp)), np.inf)
        order = np.argsort(distance, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p = _keep(p, np.isin(np.arange(V), order[before < o.typical_p]) & (p > 0))
    return p


def _keep(p: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = np.where(mask, p, 0.0)
    return kept / kept.sum()


@cache
def target_logits(output: tuple[int, ...]) -> np.ndarray:
    return table_logits((*PROMPT, *output), V)


@cache
def draft_logits(output: tuple[int, ...]) -> np.ndarray:
    # Half target, half noise: drafts are accepted now and then.
    return (target_logits(output) + table_logits((*PROMPT, *output), V, salt=7)) / 2


def expected_law(opts: SampleOpts, length: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*output, t): chance * p
            for output, chance in law.items()
            for t, p in enumerate(expected_row(target_logits(output), PROMPT, output, opts))
            if p > 0
        }
    return law


# ------------------------------------------------------------------------------------------- the law of the real code


def round_law(opts: SampleOpts, output: tuple[int, ...], n: int, kind: str) -> Law:
    """What one round emits after `output`, by enumeration. kind: how the draft is chosen."""
    branches = Branches()

    def program() -> tuple[int, ...]:
        sampler = sampling.Sampler(opts, V, PROMPT)
        sampler.extend(output)
        sampler.accept = lambda depth: branches.uniform()  # type: ignore[method-assign,assignment,return-value]
        sampler.residual = lambda row, depth: branches.draw(row)  # type: ignore[method-assign]
        draft = choose_draft(sampler, output, n, kind, branches)
        logits = np.stack([target_logits((*output, *draft.path(i))) for i in range(-1, len(draft))])
        verdict = decode.decide(sampler, draft, logits)
        return (*(draft.tokens[i] for i in verdict.kept), verdict.next_token)

    law: Law = defaultdict(float)
    for result, chance in branches.run(program):
        law[result] += chance  # type: ignore[index]
    return law


def choose_draft(sampler: Any, output: tuple[int, ...], n: int, kind: str, branches: Branches) -> Draft:
    if kind == "one-hot":
        return Draft(tuple((2 * i + len(output)) % V for i in range(n)))
    if kind == "tree":
        return tree_draft(sampler, output, branches)
    tokens: list[int] = []
    q: list[Distribution | None] = []
    for _ in range(n):
        row = sampler.row(draft_logits((*output, *tokens)), tokens)
        tokens.append(branches.draw(row))
        q.append(row)
    return Draft(tuple(tokens), tuple(q))


def tree_draft(sampler: Any, output: tuple[int, ...], branches: Branches) -> Draft:
    """Two siblings drawn without replacement, then one child under each."""
    tokens: list[int] = []
    q: list[Distribution] = []
    first = sampler.row(draft_logits(output))
    rest = first
    for _ in range(min(2, len(first.tokens))):
        tokens.append(branches.draw(rest))
        q.append(rest)
        left = rest.tokens != tokens[-1]
        if left.any():
            rest = Distribution(rest.tokens[left], rest.probs[left] / rest.probs[left].sum())
    parents = [-1] * len(tokens)
    for parent in range(len(tokens)):
        row = sampler.row(draft_logits((*output, tokens[parent])), (tokens[parent],))
        tokens.append(branches.draw(row))
        q.append(row)
        parents.append(parent)
    return Draft(tuple(tokens), tuple(q), tuple(parents))


def joint_law(opts: SampleOpts, length: int, n: int, kind: str) -> Law:
    """The first `length` tokens over as many rounds as it takes."""

    @cache
    def one_round(output: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], float], ...]:
        return tuple(round_law(opts, output, n, kind).items())

    law: Law = defaultdict(float)
    work: Law = {(): 1.0}
    while work:
        ahead: Law = defaultdict(float)
        for output, chance in work.items():
            for emitted, p in one_round(output):
                longer = (*output, *emitted)
                (law if len(longer) >= length else ahead)[longer[:length]] += chance * p
        work = ahead
    return law


def assert_equal_laws(found: Law, expected: Law) -> None:
    assert abs(sum(found.values()) - 1.0) < 1e-12
    for output in found.keys() | expected.keys():
        assert abs(found.get(output, 0.0) - expected.get(output, 0.0)) < 1e-12, output


PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.0},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.6},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {0: 1.1, 2: -0.7}},
    "banned": {"banned_tokens": (1,)},
    "bad_words": {"bad_words": ((0, 2), (1, 1))},
    "allowed": {"allowed_tokens": (0, 2)},
    "min_tokens": {"min_tokens": 2, "stop_tokens": (2,)},
    "all": {"temperature": 0.8, "top_k": 2, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2,
            "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {1: 0.5}},
}  # fmt: skip


def options(name: str, rule: str) -> SampleOpts:
    return replace(SampleOpts(temperature=1.0, seed=5), rule=rule, **PARAMETERS[name])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_joint_law_of_rounds_is_the_targets(rule: str, parameters: str) -> None:
    opts = options(parameters, rule)
    expected = expected_law(opts, 3)
    for kind, n in itertools.product(("one-hot", "drawn"), range(4)):
        assert_equal_laws(joint_law(opts, 3, n, kind), expected)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["one-hot", "drawn"])
def test_joint_law_with_long_drafts(rule: str, kind: str) -> None:
    opts = options("plain", rule)
    assert_equal_laws(joint_law(opts, 2, 4, kind), expected_law(opts, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_joint_law_with_four_drafts(rule: str, parameters: str) -> None:
    opts = options(parameters, rule)
    for kind in ("one-hot", "drawn"):
        assert_equal_laws(joint_law(opts, 2, 4, kind), expected_law(opts, 2))


@pytest.mark.parametrize("parameters", ["plain", "top_k", "all"])
def test_joint_law_of_a_tree_is_the_targets(parameters: str) -> None:
    opts = options(parameters, "rejection")
    assert_equal_laws(joint_law(opts, 3, 2, "tree"), expected_law(opts, 3))


def test_block_accepts_at_least_as_many_tokens_as_rejection() -> None:
    def accepted(rule: str) -> float:
        law = round_law(options("plain", rule), (), 4, "drawn")
        return sum(chance * (len(emitted) - 1) for emitted, chance in law.items())

    assert accepted("block") > accepted("rejection") + 1e-3


# ----------------------------------------------------------------------------------------------------- single verdicts


def row(*probs: float) -> Distribution:
    p = np.array(probs, dtype=np.float64)
    return Distribution(np.flatnonzero(p), p[p > 0])


def never(depth: int) -> float:
    raise AssertionError("no random number is needed")


def first(row: Distribution, depth: int) -> int:
    return int(row.tokens[0])


def test_match_keeps_the_draft_while_it_is_the_targets_token() -> None:
    assert verify.match(Draft((4, 5, 6)), [4, 5, 9, 0].__getitem__) == verify.Verdict((0, 1), 9)
    assert verify.match(Draft((4, 5, 6)), [4, 5, 6, 7].__getitem__) == verify.Verdict((0, 1, 2), 7)
    assert verify.match(Draft(), [3].__getitem__) == verify.Verdict((), 3)


def test_match_asks_for_no_row_beyond_the_first_mismatch() -> None:
    asked = []

    def token(i: int) -> int:
        asked.append(i)
        return [4, 9][i]

    verify.match(Draft((4, 5, 6)), token)
    assert asked == [0, 1]


def test_match_follows_the_branch_that_holds_the_targets_token() -> None:
    draft = Draft((1, 2, 3, 4), parents=(-1, -1, 0, 1))
    answers = {0: 2, 2: 4, 4: 8}
    assert verify.match(draft, answers.__getitem__) == verify.Verdict((1, 3), 8)


def test_a_token_the_target_cannot_emit_is_never_accepted() -> None:
    for law in (verify.rejection, verify.block):
        verdict = law(Draft((0,), (row(0.5, 0.5),)), lambda i: row(0.0, 1.0), lambda i: 0.0, first)
        assert verdict == verify.Verdict((), 1)


def test_equal_rows_up_to_round_off_leave_the_target_as_residual() -> None:
    p = row(0.25, 0.75)
    assert verify.residual(p, p) is p


def test_residual_is_renormalised() -> None:
    rest = verify.residual(row(0.5, 0.3, 0.2), row(0.1, 0.6, 0.3))
    assert rest.tokens.tolist() == [0]
    assert rest.probs.tolist() == [1.0]
    rest = verify.residual(row(0.5, 0.4, 0.1), row(0.1, 0.1, 0.8))
    np.testing.assert_allclose(rest.dense(3), np.array([4, 3, 0]) / 7)


def test_greedy_rules_agree_without_random_numbers() -> None:
    rows = [row(0, 1, 0), row(0, 0, 1), row(1, 0, 0)]
    for draft, kept, token in (((1, 2), (0, 1), 0), ((1, 0), (0,), 2), ((0, 2), (), 1)):
        always = lambda i: 0.999999  # noqa: E731
        for law in (verify.rejection, verify.block):
            assert law(Draft(draft), rows.__getitem__, always, first) == verify.Verdict(kept, token)


def test_block_refuses_a_tree() -> None:
    with pytest.raises(UsageError, match="chains"):
        verify.block(Draft((1, 2), parents=(-1, -1)), lambda i: row(1.0), never, first)


def test_a_token_outside_its_own_q_is_refused() -> None:
    for law in (verify.rejection, verify.block):
        with pytest.raises(UsageError, match="probability 0"):
            law(Draft((1,), (row(1.0, 0.0),)), lambda i: row(0.5, 0.5), lambda i: 0.5, first)
