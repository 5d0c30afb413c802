"""Stand-ins with exactly known behaviour: a target whose logits are a table, drafters right, wrong or random."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from outpace import decode
from outpace.backends.base import Capacity, Pass, Rows
from outpace.backends.head import HeadPass, HeadRows
from outpace.config import ModelConfig
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters.base import State, Want
from outpace.engine import Engine
from outpace.heads.config import HeadConfig
from outpace.types import CapacityError, Distribution, Draft, SampleOpts, UsageError


def table_config(vocab_size: int, positions: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=positions,
    )


def table_logits(prefix: Sequence[int], vocab_size: int, salt: int = 0, scale: float = 1.5) -> np.ndarray:
    """Logits after a prefix: independent normal numbers that depend on the whole prefix."""
    seed = zlib.crc32(np.array([salt, *prefix], dtype=np.int64).tobytes())
    return (scale * np.random.default_rng(seed).standard_normal(vocab_size)).astype(np.float32)


class TableBackend:
    """Keeps the backend contract; a row's logits are a function of the tokens it can see. Counts passes and rows."""

    def __init__(
        self,
        vocab_size: int = 5,
        *,
        salt: int = 0,
        scale: float = 1.5,
        slots: int = 8,
        positions: int = 64,
        rows: int = 64,
        logits: Callable[[Sequence[int]], np.ndarray] | None = None,
    ) -> None:
        self.config = table_config(vocab_size, positions)
        self.capacity = Capacity(slots, positions, rows)
        self._logits = logits or (lambda prefix: table_logits(prefix, vocab_size, salt, scale))
        self._held: dict[int, list[int]] = {}
        self._paths: dict[int, list[list[int]]] = {}
        self._parents: dict[int, list[int]] = {}
        self._ids = itertools.count()
        self.passes = 0
        self.rows: list[int] = []

    def new_slot(self) -> int:
        if len(self._held) >= self.capacity.slots:
            raise CapacityError("all slots are taken")
        slot = next(self._ids)
        self._held[slot] = []
        return slot

    def free_slot(self, slot: int) -> None:
        if slot not in self._held:
            raise UsageError(f"slot {slot} is not open")
        del self._held[slot]

    def fork_slot(self, slot: int) -> int:
        new = self.new_slot()
        self._held[new] = list(self._held[slot])
        return new

    def length(self, slot: int) -> int:
        return len(self._held[slot])

    def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Pass:
        total = sum(len(share.tokens) for share in batch)
        if total > self.capacity.rows:
            raise CapacityError(f"{total} rows")
        self.passes += 1
        self.rows.append(total)
        logits, hidden = [], []
        for share in batch:
            held = self._held[share.slot]
            parents = list(share.parents) if share.parents is not None else list(range(-1, len(share.tokens) - 1))
            paths: list[list[int]] = []
            for token, parent in zip(share.tokens, parents, strict=True):
                if not 0 <= token < self.config.vocab_size:
                    raise UsageError(f"token {token}")
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            if max(map(len, paths)) + len(held) > self.capacity.positions:
                raise CapacityError("positions")
            wanted = range(len(paths)) if share.logits is None else share.logits
            logits += [self._logits([*held, *paths[row]]) for row in wanted]
            hidden += [np.full(4, len(held) + len(path), dtype=np.float32) for path in paths]
            self._paths[share.slot], self._parents[share.slot] = paths, parents
        rows = np.stack(logits) if logits else np.zeros((0, self.config.vocab_size), dtype=np.float32)
        return Pass(rows, {tap: np.stack(hidden) for tap in taps})

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        last = -1
        for row in rows:
            if self._parents[slot][row] != last:
                raise UsageError(f"rows {list(rows)} are not a path")
            last = row
        if last >= 0:
            self._held[slot] += self._paths[slot][last]
        self._paths[slot] = []

    def truncate(self, slot: int, length: int) -> None:
        del self._held[slot][length:]


class TableHead:
    """Keeps the contract of a running head, beside a TableBackend; a row's logits are a function of the tokens that it
    can see, which are those of the text from its second one on. Checks that every row gets the state it should."""

    def __init__(
        self,
        logits: Callable[[Sequence[int]], np.ndarray],
        vocab_size: int = 5,
        *,
        d2t: Sequence[int] | None = None,
        slots: int = 8,
        positions: int = 64,
        rows: int = 64,
        **config: Any,
    ) -> None:
        """config: fields of HeadConfig, an mtp head's by default. dflash: logits of (length, anchor, row), and of
        (token before, -1) for the Markov bias."""
        self.config = HeadConfig(**{
            "algorithm": "mtp", "layers": table_config(vocab_size, positions), "taps": (1,), "target_layers": 1,
            "target_hidden_size": 4, "draft_vocab_size": vocab_size if d2t is None else len(d2t), **config,
        })  # fmt: skip
        self.d2t = None if d2t is None else np.array(d2t, dtype=np.int64)
        self.capacity = Capacity(slots, positions, rows)
        self.sure: Callable[[int], float | None] = lambda before: None
        self._logits = logits
        self._held: dict[int, list[int]] = {}
        self._paths: dict[int, list[list[int]]] = {}
        self._ids = itertools.count()
        self.rows: list[int] = []  # of each pass

    def new_slot(self) -> int:
        if len(self._held) >= self.capacity.slots:
            raise CapacityError("all slots are taken")
        slot = next(self._ids)
        self._held[slot], self._paths[slot] = [], []
        return slot

    def free_slot(self, slot: int) -> None:
        if slot not in self._held:
            raise UsageError(f"slot {slot} is not open")
        del self._held[slot]

    def fork_slot(self, slot: int) -> int:
        new = self.new_slot()
        self._held[new] = list(self._held[slot])
        return new

    def length(self, slot: int) -> int:
        return len(self._held[slot])

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        if rows:
            self._held[slot] += self._paths[slot][rows[-1]]
        self._paths[slot] = []

    def truncate(self, slot: int, length: int) -> None:
        assert length <= len(self._held[slot])
        del self._held[slot][length:]
        self._paths[slot] = []

    def forward(self, batch: Sequence[HeadRows]) -> HeadPass:
        self.rows.append(sum(len(share.tokens) for share in batch))
        assert self.rows[-1] <= self.capacity.rows
        logits, hidden = [], []
        for share in batch:
            held, paths = self._held[share.slot], self._paths[share.slot] if share.append else []
            self._paths[share.slot] = paths
            first = len(paths)
            parents = share.parents or range(first - 1, first + len(share.tokens) - 1)
            wanted = range(len(share.tokens)) if share.logits is None else share.logits
            for i, (token, state, parent) in enumerate(zip(share.tokens, share.states, parents, strict=True)):
                before = paths[parent] if parent >= 0 else []
                path = [*before, token]
                paths.append(path)
                length = len(held) + len(path)
                # The target's state at a position is its number, from 1 on; the head's own is minus the row's.
                assert (state == (-(length - 1) if share.own else length)).all()
                if i in wanted:
                    logits.append(self._logits([*held, *path]))
                    hidden.append(np.full(4, -length, dtype=np.float32))
            assert len(held) + len(paths) <= self.capacity.positions
        width = self.config.draft_vocab_size
        return HeadPass(np.array(logits, np.float32).reshape(len(logits), -1 if logits else width), np.array(hidden))

    def read(self, slot: int, features: np.ndarray) -> None:
        for row in features:
            self._held[slot].append(0)
            assert (row == len(self._held[slot])).all()
        assert len(self._held[slot]) <= self.capacity.positions

    def block(self, slots: Sequence[int], anchors: Sequence[int], rows: int | None = None) -> HeadPass:
        rows = rows or self.config.block_size
        self.rows.append(rows * len(slots))
        logits = []
        for slot, anchor in zip(slots, anchors, strict=True):
            assert self.length(slot) + rows <= self.capacity.positions
            logits += [self._logits((self.length(slot), anchor, row)) for row in range(rows)]
        return HeadPass(np.array(logits, np.float32), np.zeros((len(logits), 4), np.float32))

    def markov(self, before: int, hidden: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._logits((before, -1)), state + 1

    def confidence(self, before: int, hidden: np.ndarray) -> float | None:
        return self.sure(before)


class FunctionDrafter:
    """Drafts what a function of (tokens, n) says."""

    def __init__(self, draft: Callable[[State, int], Draft], name: str = "function", free: bool = False) -> None:
        self.name, self.free = name, free
        self._draft = draft
        self.forgotten = 0

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        return [self._draft(want.state, want.most) for want in wanted]

    def forget(self, state: State) -> None:
        self.forgotten += 1

    def close(self) -> None:
        pass


def oracle_drafter(answers: dict[tuple[int, ...], list[int]]) -> FunctionDrafter:
    """Always right: knows each prompt's answer."""

    def draft(state: State, n: int) -> Draft:
        start = state.sampler.start
        answer = answers[tuple(state.tokens[:start])]
        return Draft(tuple(answer[len(state.tokens) - start :][:n]), source="perfect")

    return FunctionDrafter(draft, "perfect")


def wrong_drafter(answers: dict[tuple[int, ...], list[int]], vocab_size: int) -> FunctionDrafter:
    """Never right."""

    def draft(state: State, n: int) -> Draft:
        start = state.sampler.start
        answer = answers[tuple(state.tokens[:start])]
        right = answer[len(state.tokens) - start :][:n]
        return Draft(tuple((token + 1) % vocab_size for token in right), source="wrong")

    return FunctionDrafter(draft, "wrong")


def random_drafter(vocab_size: int, seed: int = 0) -> FunctionDrafter:
    random = np.random.default_rng(seed)
    return FunctionDrafter(lambda state, n: Draft(tuple(random.integers(0, vocab_size, n).tolist())), "random")


# ------------------------------------------------------------------------------------------------------ virtual clock


class Machine:
    """A virtual clock: passes, drafts and nothing else take time. cost: rows of a pass -> seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float], draft_cost: float = 0.0) -> None:
        self.now, self.cost, self.draft_cost = 0.0, cost, draft_cost
        self.slow_drafts = 0
        monkeypatch.setattr(decode.time, "perf_counter", lambda: self.now)

    def target(self) -> TableBackend:
        machine = self

        class Target(TableBackend):
            def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Any:
                machine.now += machine.cost(sum(len(share.tokens) for share in batch))
                return super().forward(batch, taps)

        # The text is one token for ever, so that a right draft is known.
        flat = np.array([9.0, 0, 0, 0, 0], dtype=np.float32)
        return Target(5, positions=5000, logits=lambda prefix: flat)

    def drafter(self, chance: float, name: str = "function", *, free: bool = False, sure: bool = False) -> Any:
        """Drafts that are right with this chance, token by token. sure: it knows which ones, nearly."""
        random = np.random.default_rng(1)

        def draft(state: State, n: int) -> Draft:
            self.now += 0.0 if free else n * self.draft_cost * (50 if self.slow_drafts > 0 else 1)
            self.slow_drafts -= 1
            right = random.random(n) < chance
            confidence = tuple(np.where(right, 0.9, 0.15).tolist()) if sure else None
            return Draft(tuple(np.where(right, 0, 1).tolist()), source=name, confidence=confidence)

        return FunctionDrafter(draft, name, free)

    def seconds(self, *drafters: Any, fixed: int | None = None, tokens: int = 2000) -> float:
        """Time of an answer, the first pass over the prompt included."""
        start = self.now
        # As it is measured when a model is loaded.
        shape = {rows: self.cost(rows) / self.cost(1) for rows in (1, 2, 4, 8, 12, 16)}
        e = Engine(Decoder(self.target(), drafters, Controller(fixed, shape)))
        e.run([e.submit((1, 2, 3), SampleOpts.greedy(max_tokens=tokens))])
        return self.now - start


# ---------------------------------------------------------------------------------------- enumeration of random choices


class Branches:
    """Runs a program once for every outcome of its random choices and adds up the outcomes' exact probabilities.

    The program asks `choose(probabilities)` for an index, or compares a `Uniform` with numbers; each run follows one
    path through the tree of choices.
    """

    def __init__(self) -> None:
        self._path: list[int] = []
        self._widths: list[list[float]] = []
        self._depth = 0

    def choose(self, probabilities: Sequence[float]) -> int:
        probabilities = [float(p) for p in probabilities]
        if self._depth == len(self._path):
            self._path.append(0)
            self._widths.append(probabilities)
        index = self._path[self._depth]
        self._depth += 1
        return index

    def uniform(self) -> Uniform:
        return Uniform(self)

    def draw(self, row: Distribution) -> int:
        return int(row.tokens[self.choose(row.probs)])

    def run(self, program: Callable[[], object]) -> Iterator[tuple[object, float]]:
        """(result, probability) of every path with a probability above 0."""
        self._path, self._widths = [], []
        while True:
            self._depth = 0
            result = program()
            probability = float(np.prod([w[i] for w, i in zip(self._widths, self._path, strict=True)]))
            if probability > 0.0:
                yield result, probability
            while self._path and self._path[-1] + 1 == len(self._widths[-1]):
                self._path.pop()
                self._widths.pop()
            if not self._path:
                return
            self._path[-1] += 1


class Uniform:
    """A number drawn evenly from (0, 1), known only by its comparisons: u < x and u * q < p branch."""

    def __init__(self, branches: Branches, factor: float = 1.0) -> None:
        self._branches, self._factor = branches, factor

    def __mul__(self, factor: float) -> Uniform:
        return Uniform(self._branches, self._factor * float(factor))

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        chance = 1.0 if self._factor == 0.0 and bound > 0.0 else min(1.0, max(0.0, float(bound)) / self._factor)
        return self._branches.choose([chance, 1.0 - chance]) == 0

    def __le__(self, bound: float) -> bool:
        return self < bound
