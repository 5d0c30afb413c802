"""Stand-ins with exactly known behaviour: a target whose logits are a table, drafters right, wrong or random."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outpace import decode
from outpace.backends.base import Capacity, Pass, Rows
from outpace.backends.head import HeadPass, HeadRows
from outpace.config import ModelConfig
from outpace.controller import Controller
from outpace.decode import Decoder, Request
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
    """A virtual clock: passes, drafts and nothing else take time. cost: rows of a pass -> seconds.

    Its drafters know the chance that each of their tokens is accepted. What a run yields is counted by these chances
    instead of by what came of them: the same in expectation, with much less noise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float], draft_cost: float = 0.0) -> None:
        """draft_cost: seconds of a drafter's pass: a chain's token, a tree's level."""
        self.now, self.cost, self.draft_cost = 0.0, cost, draft_cost
        self.slow_drafts = 0
        self.chances: dict[tuple[str, int, int], list[float]] = {}  # source, first prompt token, position -> by token
        monkeypatch.setattr(decode.time, "perf_counter", lambda: self.now)

    def target(self, rows: int = 64) -> TableBackend:
        machine = self

        class Target(TableBackend):
            def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Any:
                machine.now += machine.cost(sum(len(share.tokens) for share in batch))
                return super().forward(batch, taps)

        # The text is one token for ever, so that a right draft is known.
        flat = np.array([9.0, 0, 0, 0, 0], dtype=np.float32)
        return Target(5, positions=8000, rows=rows, logits=lambda prefix: flat)

    def drafter(
        self,
        chance: float | Callable[[int], float],
        name: str = "function",
        *,
        free: bool = False,
        sure: bool = False,
        block: bool = False,
        catch_up: float = 0.0,
    ) -> Any:
        """Chains that are right with this chance (of the position), token by token. sure: it knows which ones, nearly.
        block: any number of tokens takes one pass. catch_up: seconds for each token that it has not read yet."""
        random = np.random.default_rng(1)
        read: dict[State, int] = {}
        law = chance if callable(chance) else lambda position: chance

        def draft(want: Want) -> Draft:
            state, room = want.state, max(want.most, want.stretch if sure else 0)
            right = random.random(room) < law(len(state.tokens))
            confidence = np.where(right, 0.9, 0.15)
            if sure and want.worth > 0.0:
                chances = confidence if want.chances is None else want.chances(confidence.tolist())
                reach = np.cumprod(chances)
                stop = np.flatnonzero(reach < want.worth + want.step)
                room = min(room, int(stop[0]) + 1) if len(stop) else room
            passes = min(room, 1) if block else room
            self.now += catch_up * (len(state.tokens) - read.get(state, 0))
            read[state] = len(state.tokens)
            self.now += 0.0 if free else passes * self.draft_cost * (50 if self.slow_drafts > 0 else 1)
            self.slow_drafts -= 1
            by_token = right * 1.0 if sure else np.full(room, law(len(state.tokens)))
            self._note(name, state, np.cumprod(by_token[:room]).tolist())
            tokens = tuple(np.where(right, 0, 1).tolist()[:room])
            return Draft(tokens, source=name, confidence=tuple(confidence.tolist()[:room]) if sure else None)

        return WantDrafter(draft, name, free)

    def tree(self, law: TreeLaw, name: str = "tree") -> Any:
        """Trees, see TreeLaw: grown level by level while they promise enough."""
        random = np.random.default_rng(1)

        def draft(want: Want) -> Draft:
            p = law.chances(len(want.state.tokens), random)
            tree = law.grow(p, want)
            self.now += self.draft_cost * tree.levels
            self._note(name, want.state, tree.reach)
            return tree.draft(p, random)

        return WantDrafter(draft, name)

    def _note(self, name: str, state: State, chances: list[float]) -> None:
        self.chances[name, state.tokens[0], len(state.tokens)] = chances

    def run(
        self,
        *drafters: Any,
        fixed: int | None = None,
        tokens: int = 1000,
        requests: int = 1,
        controller: Controller | None = None,
    ) -> float:
        """Seconds a token of answers that run side by side, the first passes over the prompts included."""
        start = self.now
        controller = controller or Controller(fixed, self.shape())
        e = Engine(Decoder(self.target(), drafters, controller))
        found = [e.submit((1 + i,), SampleOpts.greedy(max_tokens=tokens)) for i in range(requests)]
        e.run(found)
        return (self.now - start) / sum(self.expected(request) for request in found)

    def shape(self) -> dict[int, float]:
        """As it is measured when a model is loaded."""
        return {rows: self.cost(rows) / self.cost(1) for rows in (1, 2, 4, 8, 12, 16)}

    def expected(self, request: Request) -> float:
        """The tokens that the request's rounds yield in expectation."""
        total, position = 0.0, len(request.prompt)
        for each in request.rounds:
            total += 1.0
            if each.drafted:
                total += sum(self.chances[each.source, request.prompt[0], position][: each.drafted])
            position += each.tokens
        return total

    def chain_s(self, chance: float, length: int, *, free: bool = False, block: bool = False) -> float:
        """Seconds a token with drafts of a fixed length."""
        passes = 0 if free else min(length, 1) if block else length
        return (self.cost(1 + length) + passes * self.draft_cost) / sum(chance**i for i in range(length + 1))

    def tree_s(self, law: TreeLaw, position: int, size: int) -> float:
        """Seconds a token with trees of a fixed size, the best of all shapes for the kind of text at this position."""
        tokens = seconds = 0.0
        for p in law.kinds(position):
            tree = law.grow(p, Want(None, size)) if size else Tree([], [], [], 0)  # type: ignore[arg-type]
            tokens += 1.0 + sum(tree.reach)
            seconds += self.cost(1 + size) + self.draft_cost * tree.levels
        return seconds / tokens


class WantDrafter(FunctionDrafter):
    """Drafts what a function of a Want says."""

    def __init__(self, draft: Callable[[Want], Draft], name: str, free: bool = False) -> None:
        super().__init__(lambda state, n: Draft(), name, free)
        self._of = draft

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        return [self._of(want) for want in wanted]


@dataclass
class Tree:
    """Nodes in the order of falling chance. reach: each one's chance to be accepted; rank: among its siblings."""

    parents: list[int]
    ranks: list[int]
    reach: list[float]
    levels: int
    confidence: list[float] = field(default_factory=list)

    def draft(self, p: Sequence[float], random: np.random.Generator) -> Draft:
        """The draft, right where chance wants it: token 0 on the one path that is accepted, others elsewhere."""
        right, tokens = -1, []
        alive, choice = True, random.choice(len(p) + 1, p=[*p, 1.0 - sum(p)])
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if alive and parent == right and rank == choice:
                right, choice = node, random.choice(len(p) + 1, p=[*p, 1.0 - sum(p)])
                tokens.append(0)
            else:
                tokens.append(1 + rank)
        return Draft(tuple(tokens), parents=tuple(self.parents), confidence=tuple(self.confidence))


class TreeLaw:
    """A source whose guesses of one level are right with chances p, the same after each of its tokens.

    kinds: of a position: the kinds of text that may come there, each with its p, as likely as one another; the source
    knows which it has before it, and says how sure it is as `says` makes of the chance.
    """

    def __init__(
        self,
        *kinds: Sequence[float],
        says: Callable[[float], float] = lambda chance: chance,
        later: Callable[[int], Sequence[Sequence[float]]] | None = None,
    ) -> None:
        self.kinds = later or (lambda position: kinds)
        self.says = says

    def chances(self, position: int, random: np.random.Generator) -> Sequence[float]:
        kinds = self.kinds(position)
        return kinds[int(random.integers(len(kinds)))]

    def grow(self, p: Sequence[float], want: Want) -> Tree:
        """As a learned head grows it, see Want."""
        said = [self.says(chance) for chance in p]
        chances = said if want.chances is None or not want.worth else want.chances(said)
        room = max(want.most, want.stretch if want.worth else 0)
        # (chance as the source sees it, its true chance, parent, rank)
        nodes: list[tuple[float, float, int, int]] = []
        frontier, levels = [-1], 0
        while frontier:
            levels += 1
            newest = len(nodes)
            for at in frontier:
                seen, true = nodes[at][:2] if at >= 0 else (1.0, 1.0)
                nodes += [(seen * c, true * q, at, rank) for rank, (c, q) in enumerate(zip(chances, p, strict=True))]
            best = sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))[: room - 1]
            frontier = [node for node in best if node >= newest and nodes[node][0] >= want.worth]
            after = [max(0.0, nodes[node][0] * chance - want.worth) for node in frontier for chance in chances]
            if sum(after) <= want.step:
                break
        kept = sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))[:room]
        end = next((i + 1 for i, node in enumerate(kept) if nodes[node][0] < want.worth), len(kept))
        place = {-1: -1} | {node: i for i, node in enumerate(kept[:end])}
        rows = [nodes[node] for node in kept[:end]]
        return Tree(
            [place[row[2]] for row in rows],
            [row[3] for row in rows],
            [row[1] for row in rows],
            levels,
            [said[row[3]] for row in rows],
        )


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
