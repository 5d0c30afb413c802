"""The contract of a running head on the NumPy oracle: slow, short, and what the native head is compared with.

Neighbours: head.py is the contract, heads/reference.py computes a row or a block, reference.py has the slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..cache import KVCache
from ..heads.config import HeadConfig
from ..heads.reference import AutoregressiveHead, BlockHead, make_head
from ..types import F32, I64, CapacityError, UsageError
from .base import Capacity
from .head import HeadPass, HeadRows
from .reference import CacheSlots, places


class ReferenceHead(CacheSlots):
    """A head on the oracle. tensors, d2t: as heads/reference.py's `Head`; positions, rows: as `Capacity`."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, F32],
        d2t: I64 | None = None,
        *,
        slots: int = 8,
        positions: int | None = None,
        rows: int = 4096,
    ) -> None:
        if positions is not None and positions < 1:
            raise UsageError(f"positions must be at least 1, got {positions}")
        self.config, self.d2t = config, d2t
        self.capacity = Capacity(slots, positions or config.layers.max_position_embeddings, rows)
        self._head = make_head(config, tensors, d2t)
        super().__init__(lambda: self._head.new_cache(self.capacity.positions))

    @np.errstate(over="ignore", invalid="ignore")  # damaged weights give NaN, which the drafter reports
    def forward(self, batch: Sequence[HeadRows]) -> HeadPass:
        head = self._steps()
        self._check_rows(batch)
        logits: list[F32] = []
        hidden: list[F32] = []
        for share in batch:
            cache, first = self._slots[share.slot], self._first(share)
            parents = [*self._parents.get(share.slot, [])[:first], *_parents(share, first)]
            cache.append(first + len(share.tokens))
            wanted = range(len(share.tokens)) if share.logits is None else set(share.logits)
            for i, (token, state) in enumerate(zip(share.tokens, share.states, strict=True)):
                row, feature = first + i, state if share.own else head.fuse(state)
                result = head.row(int(token), feature, row, places(cache.length, parents, row), cache)
                if i in wanted:
                    logits.append(result[0])
                    hidden.append(result[1])
            self._parents[share.slot] = parents
        return self._pass(logits, hidden)

    @np.errstate(over="ignore", invalid="ignore")
    def read(self, slot: int, features: F32) -> None:
        head, cache, n = self._blocks(), self._slot(slot), len(features)
        self._check_states(features, n, self.config.feature_width)
        self._check_room(n, n, cache)
        head.read(features, cache)

    @np.errstate(over="ignore", invalid="ignore")
    def block(self, slots: Sequence[int], anchors: Sequence[int], rows: int | None = None) -> HeadPass:
        head = self._blocks()
        rows = self.config.block_size if rows is None else rows
        if not slots or len(set(slots)) != len(slots) or len(anchors) != len(slots):
            raise UsageError("a pass of blocks needs at least one slot, each once, and an anchor for each")
        if not 1 <= rows <= self.config.block_size:
            raise UsageError(f"a block has 1 .. {self.config.block_size} rows, got {rows}")
        self._check_tokens(anchors)
        for slot in slots:
            self._check_room(rows, rows * len(slots), self._slot(slot))
        blocks = [head.block(int(anchor), self._slots[slot], rows) for slot, anchor in zip(slots, anchors, strict=True)]
        hidden = [row for block in blocks for row in block]
        return self._pass([head.layers.logits(row) for row in hidden], hidden)

    def markov(self, before: int, hidden: F32, state: F32) -> tuple[F32, F32]:
        self._check_tokens([before])
        return self._blocks().markov(int(before), hidden, state)

    def confidence(self, before: int, hidden: F32) -> float | None:
        self._check_tokens([before])
        return self._blocks().confidence(int(before), hidden)

    # -- what can be wrong with a pass, found before anything changes

    def _steps(self) -> AutoregressiveHead:
        if not isinstance(self._head, AutoregressiveHead):
            raise UsageError("a dflash head reads features and computes blocks: it has no rows to pass")
        return self._head

    def _blocks(self) -> BlockHead:
        if not isinstance(self._head, BlockHead):
            raise UsageError(f"an {self.config.algorithm} head computes rows, not blocks")
        return self._head

    def _first(self, share: HeadRows) -> int:
        """Pending rows of the slot that stay before this share's."""
        return self._slots[share.slot].pending if share.append else 0

    def _check_rows(self, batch: Sequence[HeadRows]) -> None:
        if not batch:
            raise UsageError("a pass needs at least one slot")
        if len({share.slot for share in batch}) != len(batch):
            raise UsageError("a slot may appear only once in a pass")
        total = sum(len(share.tokens) for share in batch)
        for share in batch:
            cache, count = self._slot(share.slot), len(share.tokens)
            first = self._first(share)
            self._check_tokens(share.tokens)
            width = self.config.layers.hidden_size if share.own else self.config.feature_width
            self._check_states(share.states, count, width)
            parents = _parents(share, first)
            if len(parents) != count or any(not -1 <= p < first + i for i, p in enumerate(parents)):
                raise UsageError("parents must name an earlier row, or -1, for each row")
            wanted = list(share.logits or ())
            if any(not 0 <= row < count for row in wanted) or wanted != sorted(set(wanted)):
                raise UsageError(f"logits rows must be ascending and in 0 .. {count - 1}")
            self._check_room(first + count, total, cache)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self.config.layers.vocab_size
        for token in tokens:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
                raise UsageError(f"token id {token!r} is not in 0 .. {vocab - 1}")

    def _check_states(self, states: F32, count: int, width: int) -> None:
        if states.shape != (count, width) or not count:
            raise UsageError(f"states must be [{count} rows, {width}] and at least one, got {list(states.shape)}")

    def _check_room(self, pending: int, total: int, cache: KVCache) -> None:
        """pending: rows behind the cache's committed ones; total: rows of the whole pass."""
        positions, rows = self.capacity.positions, self.capacity.rows
        if cache.length + pending > positions:
            raise CapacityError(f"{cache.length} + {pending} rows do not fit the {positions} positions of a slot")
        if total > rows:
            raise CapacityError(f"a pass takes at most {rows} rows, got {total}")

    def _pass(self, logits: list[F32], hidden: list[F32]) -> HeadPass:
        def stack(rows: list[F32], width: int) -> F32:
            return np.stack(rows) if rows else np.zeros((0, width), np.float32)

        return HeadPass(stack(logits, self.config.draft_vocab_size), stack(hidden, self.config.layers.hidden_size))


def _parents(share: HeadRows, first: int) -> list[int]:
    return list(range(first - 1, first + len(share.tokens) - 1)) if share.parents is None else list(share.parents)
