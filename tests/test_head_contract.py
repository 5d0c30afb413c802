"""What backends/head.py promises, asked of every backend of heads. Equality means equality of bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heads_files
from heads_files import D2T, EAGLE3, TARGET, TARGET_ARRAYS, d2t, random_head
from heads_oracle import draft, extend, first_state
from outpace.backends.head import HeadBackend, HeadPass, HeadRows
from outpace.backends.native import NativeBackend
from outpace.backends.native_head import NativeHead
from outpace.backends.reference_head import ReferenceHead
from outpace.heads.config import HeadConfig
from outpace.heads.reference import BlockHead, make_head
from outpace.types import CapacityError, OutpaceError, RewindError, UsageError
from outpace.weights.weight_map import WeightMap

HEADS = heads_files.HEADS | EAGLE3 | heads_files.BLOCKS
STEPS = [name for name, config in HEADS.items() if config.algorithm != "dflash"]
BLOCKS = [name for name, config in HEADS.items() if config.algorithm == "dflash"]
TOKENS = [3, 17, 66, 5, 5, 41, 0, 22, 9]


def tensors(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    shared = {name: TARGET_ARRAYS[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return shared | random_head(config, seed)


def _reference(config: HeadConfig, **more: Any) -> HeadBackend:
    return ReferenceHead(config, tensors(config), d2t(config), **more)


def _native(config: HeadConfig, *, precision: Any = "f32", threads: int = 2, **more: Any) -> NativeHead:
    target = NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision=precision, threads=threads)
    own = WeightMap.from_tensors(random_head(config))
    return NativeHead(target, config, own, d2t(config), precision=precision, **more)


BACKENDS: dict[str, Callable[..., HeadBackend]] = {"reference": _reference, "native": _native}


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Callable[..., HeadBackend]:
    return BACKENDS[request.param]


def features(config: HeadConfig, count: int = len(TOKENS), seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, config.feature_width)).astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def feed(head: HeadBackend, slot: int, count: int = len(TOKENS), start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Commits the text's slots from `start` up to `count`; logits and hidden states of them."""
    rows = HeadRows(slot, TOKENS[start:count], features(head.config)[start:count])
    out = head.forward([rows])
    head.commit(slot, range(count - start))
    return out.logits, out.hidden


# ------------------------------------------------------------------------------------------------------- mtp and eagle3


@pytest.mark.parametrize("name", STEPS)
def test_rows_are_those_of_the_oracle(make: Callable[..., HeadBackend], name: str) -> None:
    config = HEADS[name]
    head, oracle = make(config), make_head(config, tensors(config), d2t(config))
    cache = oracle.new_cache(32)
    want = extend(oracle, features(config), TOKENS, cache)
    slot = head.new_slot()
    logits, hidden = feed(head, slot)
    np.testing.assert_allclose(logits, want.logits, atol=1e-4)
    np.testing.assert_allclose(hidden, want.hidden, atol=1e-4)
    # Its own hidden state in place of the feature.
    drafted = iter([7, 11, 3])
    guesses = draft(oracle, want, 3, lambda _: next(drafted), cache)
    one = head.forward([HeadRows(slot, [7], hidden[-1:], own=True)])
    two = head.forward([HeadRows(slot, [11], one.hidden, own=True, append=True)])
    np.testing.assert_allclose(one.logits[0], guesses[1].logits, atol=1e-4)
    np.testing.assert_allclose(two.logits[0], guesses[2].logits, atol=1e-4)
    assert head.length(slot) == len(TOKENS)


@pytest.mark.parametrize("name", STEPS)
def test_tree_rows_equal_the_chains_they_spell(make: Callable[..., HeadBackend], name: str) -> None:
    head = make(HEADS[name])
    slot, alone = head.new_slot(), head.new_slot()
    tree, parents = [4, 9, 4, 30, 30, 61], [-1, -1, 0, 0, 1, 3]
    _, last = feed(head, slot)
    feed(head, alone)
    # Level by level, as a tree grows, beside a slot that does something else.
    levels, hidden, logits = [[0, 1], [2, 3, 4], [5]], {}, {}
    other = head.new_slot()
    for level in levels:
        states = np.stack([last[-1] if parents[i] < 0 else hidden[parents[i]] for i in level])
        rows = HeadRows(slot, [tree[i] for i in level], states, own=True, append=level != levels[0],
                        parents=[parents[i] for i in level])  # fmt: skip
        out = head.forward([HeadRows(other, [1], features(head.config, 1)), rows])
        for i, node in enumerate(level):
            logits[node], hidden[node] = out.logits[1 + i], out.hidden[1 + i]
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        state = last[-1:]
        for depth, i in enumerate(path):
            out = head.forward([HeadRows(alone, [tree[i]], state, own=True, append=depth > 0)])
            state = out.hidden
        same(out.logits[0], logits[node])
        same(out.hidden[0], hidden[node])


@pytest.mark.parametrize("name", STEPS)
def test_chunks_and_passes_that_append_equal_one(make: Callable[..., HeadBackend], name: str) -> None:
    head = make(HEADS[name])
    a, b, c = (head.new_slot() for _ in range(3))
    logits, hidden = feed(head, a)
    for start in range(len(TOKENS)):
        part = feed(head, b, start + 1, start)
        same(part[0][0], logits[start])
        same(part[1][0], hidden[start])
    states = features(head.config)
    head.forward([HeadRows(c, TOKENS[:2], states[:2])])
    head.forward([HeadRows(c, TOKENS[:4], states[:4])])  # without append: those before are gone
    out = head.forward([HeadRows(c, TOKENS[4:], states[4:], append=True, logits=[1, 4])])
    assert (head.length(c), out.logits.shape, out.hidden.shape) == (
        0, (2, head.config.draft_vocab_size), (2, head.config.layers.hidden_size)
    )  # fmt: skip
    same(out.logits, logits[[5, 8]])
    same(out.hidden, hidden[[5, 8]])
    head.commit(c, range(len(TOKENS)))
    again = [HeadRows(slot, [8], hidden[-1:], own=True) for slot in (a, b, c)]
    out = head.forward(again)
    same(out.logits[0], out.logits[1])
    same(out.logits[0], out.logits[2])


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_commit_keeps_a_path_and_truncate_goes_back(make: Callable[..., HeadBackend], name: str) -> None:
    head = make(HEADS[name])
    states = features(head.config)
    slot, want = head.new_slot(), head.new_slot()
    feed(head, slot, 3)
    head.forward([HeadRows(slot, [1, TOKENS[3], 2], states[[0, 3, 0]], parents=[-1, -1, 0])])
    head.forward([HeadRows(slot, [TOKENS[4]], states[4:5], append=True, parents=[1])])
    with pytest.raises(UsageError, match="path"):
        head.commit(slot, [0, 3])
    head.commit(slot, [1, 3])
    assert head.length(slot) == 5
    same(feed(head, slot, start=5)[0], feed(head, want)[0][5:])
    fork = head.fork_slot(slot)
    head.truncate(slot, 5)
    same(feed(head, slot, start=5)[0], _tail(head))
    head.truncate(fork, 2)
    assert (head.length(slot), head.length(fork)) == (9, 2)
    same(feed(head, fork, start=2)[0], _tail(head, 2))
    with pytest.raises(RewindError):
        head.truncate(slot, 10)


def _tail(head: HeadBackend, start: int = 5) -> np.ndarray:
    """Logits of the text's slots from `start`, in a slot of their own."""
    slot = head.new_slot()
    logits = feed(head, slot)[0][start:]
    head.free_slot(slot)
    return logits


def test_what_does_not_fit_is_refused_before_anything_changes(make: Callable[..., HeadBackend]) -> None:
    head = make(HEADS["eagle3"], slots=2, positions=6, rows=4)
    states, hidden = features(head.config), np.zeros((4, 64), np.float32)
    slot, other = head.new_slot(), head.new_slot()
    with pytest.raises(CapacityError):
        head.new_slot()
    head.forward([HeadRows(slot, TOKENS[:3], states[:3])])
    wrong: list[tuple[type[OutpaceError], list[HeadRows]]] = [
        (UsageError, []),
        (UsageError, [HeadRows(9, [1], states[:1])]),
        (UsageError, [HeadRows(other, [], states[:0])]),
        (UsageError, [HeadRows(other, [67], states[:1])]),
        (UsageError, [HeadRows(other, [-1], states[:1])]),
        (UsageError, [HeadRows(other, [1], hidden[:1])]),
        (UsageError, [HeadRows(other, [1], states[:1], own=True)]),
        (UsageError, [HeadRows(other, [1, 2], states[:1])]),
        (UsageError, [HeadRows(other, [1, 2], states[:2], parents=[-1])]),
        (UsageError, [HeadRows(other, [1, 2], states[:2], parents=[-1, 1])]),
        (UsageError, [HeadRows(other, [1], states[:1], parents=[0])]),  # nothing is pending there
        (UsageError, [HeadRows(other, [1], states[:1], logits=[1])]),
        (UsageError, [HeadRows(other, [1], states[:1]), HeadRows(other, [1], states[:1])]),
        (CapacityError, [HeadRows(slot, [1] * 4, hidden, own=True, append=True)]),
        (CapacityError, [HeadRows(other, [1] * 5, states[:5])]),
        (CapacityError, [HeadRows(slot, [1] * 2, states[:2]), HeadRows(other, [1] * 3, states[:3])]),
    ]
    for error, batch in wrong:
        with pytest.raises(error):
            head.forward(batch)
    for call in (lambda: head.read(slot, states[:1]), lambda: head.block([slot], [1])):
        with pytest.raises(UsageError):
            call()
    head.commit(slot, [0, 1, 2])
    assert head.length(slot) == 3


# --------------------------------------------------------------------------------------------------------------- dflash


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rows", [None, 2])
def test_blocks_are_those_of_the_oracle(make: Callable[..., HeadBackend], name: str, rows: int | None) -> None:
    config = HEADS[name]
    head, oracle = make(config), make_head(config, tensors(config), d2t(config))
    assert isinstance(oracle, BlockHead)
    cache = oracle.new_cache(32)
    extend(oracle, features(config)[:6], TOKENS[:6], cache)
    want = oracle.block(8, cache, rows)
    slot, other = head.new_slot(), head.new_slot()
    head.read(other, features(config)[:2])
    for start in range(0, 6, 2):
        head.read(slot, features(config)[start : start + 2])
    out = head.block([other, slot], [3, 8], rows)
    n = config.block_size if rows is None else rows
    assert out.logits.shape == (2 * n, config.draft_vocab_size)
    np.testing.assert_allclose(out.hidden[n:], want, atol=1e-4)
    np.testing.assert_allclose(out.logits[n:], [oracle.layers.logits(row) for row in want], atol=1e-4)
    same(head.block([slot], [8], rows).logits, out.logits[n:])  # nothing was left behind
    assert head.length(slot) == 6
    state = first_state(oracle)
    for row in want:
        bias, next_state = head.markov(5, row, state)
        wanted = oracle.markov(5, row, state)
        np.testing.assert_allclose(bias, wanted[0], atol=1e-4)
        np.testing.assert_allclose(next_state, wanted[1], atol=1e-4)
        state = next_state
        sure, its = head.confidence(5, row), oracle.confidence(5, row)
        assert (sure is None) == (its is None) == (config.confidence == "none")
        assert sure is None or its is None or abs(sure - its) < 1e-5


def test_blocks_that_do_not_fit_are_refused(make: Callable[..., HeadBackend]) -> None:
    head = make(HEADS["dflash"], slots=2, positions=6, rows=6)
    slot, other = head.new_slot(), head.new_slot()
    head.read(slot, features(head.config, 3))
    for call, error in (
        (lambda: head.block([slot], [1]), CapacityError),
        (lambda: head.block([other, slot], [1, 1], 4), CapacityError),
        (lambda: head.read(slot, features(head.config, 4)), CapacityError),
        (lambda: head.read(other, features(head.config, 7)), CapacityError),
        (lambda: head.block([slot], [67]), UsageError),
        (lambda: head.block([], []), UsageError),
        (lambda: head.block([slot, slot], [1, 1], 1), UsageError),
        (lambda: head.block([slot], [1], 5), UsageError),
        (lambda: head.block([slot], [1], 0), UsageError),
        (lambda: head.read(slot, np.zeros((1, 5), np.float32)), UsageError),
        (lambda: head.forward([HeadRows(slot, [1], np.zeros((1, 64), np.float32))]), UsageError),
        (lambda: head.markov(67, np.zeros(64, np.float32), np.zeros(0, np.float32)), UsageError),
        (lambda: head.confidence(-1, np.zeros(64, np.float32)), UsageError),
    ):
        with pytest.raises(error):
            call()
    assert head.length(slot) == 3
    assert head.block([slot], [1], 3).hidden.shape == (3, 64)
    fork = (head.free_slot(other), head.fork_slot(slot))[1]
    head.read(fork, features(head.config, 1))
    head.truncate(slot, 1)
    assert (head.length(slot), head.length(fork)) == (1, 4)


def test_the_draft_vocabulary_is_told(make: Callable[..., HeadBackend]) -> None:
    small = make(HEADS["eagle3"])
    assert small.d2t is not None
    assert np.array_equal(small.d2t, D2T)
    assert make(HEADS["mtp"]).d2t is None


# ------------------------------------------------------------------------------------------------ the native head alone


@pytest.mark.parametrize("name", [*STEPS, *BLOCKS])
@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_rounded_weights_give_nearly_the_same(name: str, precision: Any) -> None:
    exact, rounded = _native(HEADS[name]), _native(HEADS[name], precision=precision)
    states = features(HEADS[name])
    results = []
    for head in (exact, rounded):
        slot = head.new_slot()
        if name in BLOCKS:
            head.read(slot, states)
            results.append(head.block([slot], [9]))
        else:
            results.append(head.forward([HeadRows(slot, TOKENS, states)]))
    far = {"int8": 0.1, "int4": 0.7, "bf16": 0.05}[precision]
    for a, b in ((results[0].logits, results[1].logits), (results[0].hidden, results[1].hidden)):
        assert 0 < np.linalg.norm(a - b) < far * np.linalg.norm(a)


@pytest.mark.parametrize("precision", ["f32", "int8"])
@pytest.mark.parametrize("name", ["eagle3", "mtp", "dspark", "causal window"])
def test_company_threads_and_chunks_change_no_bit(name: str, precision: Any) -> None:
    config, found = HEADS[name], []
    states = features(config, 300, 4)
    tokens = np.random.default_rng(5).integers(0, 67, 300).tolist()
    for threads, chunks in ((1, [300]), (3, [1, 250, 49]), (2, [97, 203])):
        head = _native(config, precision=precision, threads=threads, rows=512, positions=400)
        slot, other = head.new_slot(), head.new_slot()
        start = 0
        for count in chunks:
            part = slice(start, start + count)
            if config.algorithm == "dflash":
                head.read(slot, states[part])
            else:
                head.forward([HeadRows(other, tokens[:3], states[:3]), HeadRows(slot, tokens[part], states[part])])
                head.commit(slot, range(count))
            start += count
        if config.algorithm == "dflash":
            head.read(other, states[:7])
            results = [head.block([slot], [3]), head.block([other, slot], [5, 3])]
            results[1] = HeadPass(*(a[len(a) // 2 :] for a in (results[1].logits, results[1].hidden)))
            same(results[0].logits, results[1].logits)
        else:
            results = [head.forward([HeadRows(slot, tokens[:2], states[:2])])]
        found.append(results[0])
    for result in found[1:]:
        same(result.logits, found[0].logits)
        same(result.hidden, found[0].hidden)


def test_a_head_reads_a_small_part_of_what_its_target_reads() -> None:
    head = _native(HEADS["eagle3"], precision="int8")
    assert 0 < head.pass_bytes < head.memory[0]


def test_what_a_head_lacks_is_named() -> None:
    config = HEADS["eagle3"]
    target = NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision="f32", threads=1)
    arrays = random_head(config)
    del arrays["fc.weight"]
    with pytest.raises(OutpaceError, match=r"fc\.weight is missing"):
        NativeHead(target, config, WeightMap.from_tensors(arrays), d2t(config))
    with pytest.raises(UsageError, match="d2t"):
        NativeHead(target, config, WeightMap.from_tensors(random_head(config)), None)


@pytest.mark.parametrize("name", STEPS)
def test_rows_whose_results_nobody_wants_keep_the_same_keys_and_values(
    make: Callable[..., HeadBackend], name: str
) -> None:
    head, states = make(HEADS[name]), features(HEADS[name])
    seen = []
    for wanted in ([], None, [2]):
        slot = head.new_slot()
        result = head.forward([HeadRows(slot, TOKENS[:-1], states[:-1], logits=wanted)])
        assert len(result.logits) == (len(TOKENS) - 1 if wanted is None else len(wanted))
        head.commit(slot, range(len(TOKENS) - 1))
        seen.append(head.forward([HeadRows(slot, TOKENS[-1:], states[-1:])]))
    for other in seen[1:]:
        same(seen[0].logits, other.logits)
        same(seen[0].hidden, other.hidden)
