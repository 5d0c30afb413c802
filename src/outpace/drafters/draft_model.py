"""A smaller model with the same vocabulary drafts: one pass per draft token, for all requests together.

Its KV cache follows each request's text by longest common prefix: what verification refused is cut off, what is new is
filled in with the next round's first pass. Source: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..backends.base import Backend, Rows
from ..slots import SlotPool, common_prefix
from ..types import F32, Draft, UsageError
from .base import Failed, State, Want, apart
from .chain import Chain


@dataclass(slots=True)
class _Cached:
    """A request's slot in the draft model and the tokens that it holds; the first `agreed` are the request's text."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


class DraftModelDrafter:
    """Drafts a chain with another backend, drawing as the request's sampler does (coupled noise, or from q)."""

    free = False

    def __init__(self, model: Backend, name: str = "draft_model") -> None:
        """The caller has checked that the two models' vocabularies hold the same tokens (padding may differ). name:
        "self" for a target's own weights, rounded further."""
        self.model, self.name = model, name
        self._pool = SlotPool(model)
        self._cached: dict[State, _Cached] = {}

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        chains = [Chain(want, self._room(want)) for want in wanted]
        pending: dict[State, list[int]] = {}
        failed: Failed = {}
        for chain in chains:
            if chain.goes_on:
                with apart(failed, chain.state):
                    pending[chain.state] = self._sync(chain.state)
        active = [chain for chain in chains if chain.state in pending]
        while active:
            logits = self._advance([(chain.state, pending[chain.state]) for chain in active])
            for chain, row in zip(active, logits, strict=True):
                with apart(failed, chain.state):
                    chain.extend(_fit(row, chain.state.sampler.vocab_size))
            active = [chain for chain in active if chain.goes_on and chain.state not in failed]
            pending = {chain.state: chain.tokens[-1:] for chain in active}
        return [failed[chain.state] if chain.state in failed else chain.draft(self.name) for chain in chains]

    def _room(self, want: Want) -> int:
        """Draft tokens that still fit the draft model's context (the last one is never fed to it)."""
        return max(0, min(max(want.most, want.stretch), self.model.capacity.positions - len(want.state.tokens) + 1))

    def _sync(self, state: State) -> list[int]:
        """Cuts the slot back to the common prefix with the request's text; returns the tokens it still has to read.

        Raises UsageError for a text that the draft model has no token for.
        """
        cached = self._cached.get(state)
        if cached is None:
            slot, held = self._pool.open(state, state.tokens[:-1])
            cached = self._cached[state] = _Cached(slot, state.tokens[:held], held)
        # At least the last token is read again: its logits are the first draft. A text only grows, so what agreed once
        # is not looked at again.
        same = min(common_prefix(cached.tokens, state.tokens, cached.agreed), len(state.tokens) - 1)
        if same < self.model.length(cached.slot):
            self.model.truncate(cached.slot, same)
        del cached.tokens[same:]
        cached.agreed = same
        unread = state.tokens[same:]
        if max(unread) >= self.model.config.vocab_size:
            raise UsageError(f"it has no token {max(unread)}: its vocabulary holds {self.model.config.vocab_size}")
        return unread

    def _advance(self, work: Sequence[tuple[State, list[int]]]) -> list[F32]:
        """Reads each request's pending tokens (a prompt in as many passes as it takes); the last row's logits each."""
        last: dict[int, F32] = {}
        left = {i: pending for i, (_, pending) in enumerate(work)}
        while left:
            budget = self.model.capacity.rows
            batch, chunks = [], []
            for i, pending in left.items():
                chunk = pending[: max(0, budget)]
                if not chunk:
                    break
                budget -= len(chunk)
                done = len(chunk) == len(pending)
                slot = self._cached[work[i][0]].slot
                batch.append(Rows(slot, chunk, logits=[len(chunk) - 1] if done else []))
                chunks.append((i, chunk, done))
            logits = iter(self._pool.with_room(partial(self.model.forward, batch)).logits)
            for i, chunk, done in chunks:
                cached = self._cached[work[i][0]]
                self.model.commit(cached.slot, range(len(chunk)))
                cached.tokens.extend(chunk)
                if done:
                    last[i] = next(logits)
                    del left[i]
                else:
                    left[i] = left[i][len(chunk) :]
        return [last[i] for i in range(len(work))]

    def forget(self, state: State) -> None:
        cached = self._cached.get(state)
        if cached is not None:
            self._pool.close(state, cached.tokens)
            del self._cached[state]
        else:  # none, or interrupted while it was opened
            self._pool.drop(state)

    def close(self) -> None:
        for state in list(self._cached):
            self.forget(state)
        self._pool.clear()


def _fit(logits: F32, vocab_size: int) -> F32:
    """The draft's logits at the target's length: padding of the vocabulary is cut off, or filled with -inf."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return np.concatenate([logits, np.full(vocab_size - len(logits), -np.inf, dtype=np.float32)])
