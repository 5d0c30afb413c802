"""Verification: which draft tokens stay, and which token follows. No model, no cache, no clock.

Letters as in the papers: x the draft's tokens, q the distribution each was drawn from, p the target's rows. Row 0 is
the target's distribution after the context, row i + 1 the one after draft token i; a chain of n tokens has n + 1 rows.
q = None means one-hot. Rows are asked for one by one, so that what is never reached is never computed.

- match: the target chooses its own token at every row (with noise that depends on the position alone); a draft token
  stays while it is that token. The output is the target's own, token for token.
- rejection: Leviathan et al. 2022 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318); with siblings the
  residual goes on to the next one (SpecInfer, arXiv 2305.09781).
- block: Sun et al. 2024 (arXiv 2403.10444), algorithm 2: the longest prefix is decided jointly; a chain only.

The latter two leave the target's distribution as it is, not the single tokens. At temperature 0 all three agree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .types import Distribution, Draft, UsageError, Verdict

Row = Callable[[int], Distribution]
ROOT = -1


def match(draft: Draft, token: Callable[[int], int]) -> Verdict:
    """Keeps the draft while it is what the target says. token(row): the target's own token at that row."""
    node = ROOT
    kept: list[int] = []
    while True:
        x = token(node + 1)
        follow = [child for child in draft.children(node) if draft.tokens[child] == x]
        if not follow:
            return Verdict(tuple(kept), x)
        node = follow[0]
        kept.append(node)


def rejection(
    draft: Draft, p: Row, uniform: Callable[[int], float], draw: Callable[[Distribution, int], int]
) -> Verdict:
    """Accepts x with probability min(1, p(x) / q(x)); after a rejection the target is norm(max(0, p - q)).

    uniform(i): an independent number in (0, 1) for draft token i. draw(row, depth): a token from the row, the
    correction or the bonus token after `depth` accepted ones.
    """
    node = ROOT
    kept: list[int] = []
    while True:
        target = p(node + 1)
        for child in draft.children(node):
            x, q = draft.tokens[child], _q(draft, child)
            # Strictly less: a token that the target cannot emit (p = 0) is never accepted.
            if uniform(child) * q.prob(x) < target.prob(x):
                break
            target = residual(target, q)
        else:
            return Verdict(tuple(kept), draw(target, len(kept)))
        node = child
        kept.append(node)


def block(draft: Draft, p: Row, uniform: Callable[[int], float], draw: Callable[[Distribution, int], int]) -> Verdict:
    """Block verification: in expectation never fewer accepted tokens than `rejection`, in the same arguments.

    w_i = min(1, w_(i-1) * p(x_i) / q(x_i)), w_0 = 1: how much of the joint target is covered by the draft's prefix i.
    Prefix i < n is accepted with probability h_i = r_i / (r_i + 1 - w_i), r_i = sum(max(0, w_i * p - q)) over the
    next token; the whole draft with h_n = w_n. The longest accepted prefix wins; the correction comes from
    norm(max(0, w * p - q)). Raises UsageError for a tree: the rule is not defined there.
    """
    n = len(draft)
    if draft.parents is not None and any(parent != i - 1 for i, parent in enumerate(draft.parents)):
        raise UsageError("block verification is defined for chains; use rule='match' or 'rejection' with a tree draft")
    accepted, weight = 0, 1.0
    weights = [1.0]
    for i in range(n):
        x, q = draft.tokens[i], _q(draft, i)
        weight = min(1.0, weight * p(i).prob(x) / q.prob(x))
        if weight == 0.0:
            break
        weights.append(weight)
        if i + 1 < n:
            r = float(_excess(p(i + 1), weight, _q(draft, i + 1))[1].sum())
            # r = 0 and weight = 1: p and q are the same next, and a longer prefix is accepted for certain.
            h = r / (r + 1.0 - weight) if r > 0.0 else float(weight == 1.0)
        else:
            h = weight
        if uniform(i) < h:
            accepted = i + 1
    if accepted == n:
        return Verdict(tuple(range(n)), draw(p(n), n))
    target = residual(p(accepted), _q(draft, accepted), weights[accepted])
    return Verdict(tuple(range(accepted)), draw(target, accepted))


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """norm(max(0, weight * p - q)); p itself when nothing is left (p and q equal up to round-off)."""
    tokens, rest = _excess(p, weight, q)
    keep = rest > 0.0
    if not keep.any():
        return p
    return Distribution(tokens[keep], rest[keep] / rest[keep].sum())


def _excess(p: Distribution, weight: float, q: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """max(0, weight * p - q) on p's tokens (elsewhere it is 0)."""
    rest = weight * p.probs
    at = np.searchsorted(q.tokens, p.tokens)
    at[at == len(q.tokens)] = 0
    shared = q.tokens[at] == p.tokens
    rest[shared] -= q.probs[at[shared]]
    return p.tokens, np.maximum(rest, 0.0)


def _q(draft: Draft, i: int) -> Distribution:
    """What draft token i was drawn from. Raises UsageError when the draft says that it could not have been drawn."""
    q = draft.q[i] if draft.q is not None else None
    if q is None:
        return Distribution(np.array([draft.tokens[i]]), np.ones(1))
    if not q.prob(draft.tokens[i]) > 0.0:
        raise UsageError(f"draft token {i} has probability 0 in its own q: q must be what the token was drawn from")
    return q
