"""Drafters with learned heads: drafts that are the head's own, answers that are the target's own.

Heads are random, so that they are seldom right; at a high temperature the shared noise decides, and they often are.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import test_verify
from fakes import Branches, FunctionDrafter, TableBackend, TableHead, table_logits
from heads_files import HEADS, TARGET, TARGET_ARRAYS, d2t, random_head
from outpace import LanguageModel, Result, SampleOpts, WeightMap
from outpace.backends.head import HeadBackend, HeadPass, HeadRows
from outpace.backends.native import NativeBackend
from outpace.backends.native_head import NativeHead
from outpace.backends.reference_head import ReferenceHead
from outpace.controller import Ask, Choice, Controller
from outpace.decode import Decoder
from outpace.drafters import BlockDrafter, DraftModelDrafter, HeadDrafter, NgramDrafter, State, SuffixDrafter, Want
from outpace.drafters.base import Failed, drafts_of
from outpace.drafters.head import FeatureReader
from outpace.engine import Engine
from outpace.sampling import Sampler
from outpace.types import CapacityError, Draft, NumericalError, UsageError
from test_head_contract import tensors

VOCAB, CONTEXT = 67, 128


def target(**more: Any) -> NativeBackend:
    return NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision="f32", **more)


def drafter(name: str, beside: NativeBackend | None = None, **more: Any) -> FeatureReader:
    """beside: the target of a native head; without it the oracle's."""
    config = HEADS[name]
    more = {"positions": CONTEXT, "slots": 16} | more
    head: HeadBackend
    if beside is None:
        head = ReferenceHead(config, tensors(config), d2t(config), **more)
    else:
        head = NativeHead(beside, config, WeightMap.from_tensors(random_head(config)), d2t(config), **more)
    return BlockDrafter(head) if config.algorithm == "dflash" else HeadDrafter(head)


# ------------------------------------------------------------------------------------------------------------- lossless


def some_options(rng: random.Random, room: int) -> SampleOpts:
    some: dict[str, Any] = {"seed": rng.randrange(5), "temperature": rng.choice([0, 0, 0.7, 2.0, 8.0])}
    choices: dict[str, Any] = {
        "top_k": rng.randint(1, VOCAB + 5), "top_p": rng.uniform(0.05, 1), "min_p": rng.uniform(0, 0.5),
        "repetition_penalty": rng.choice([0.8, 1.2]), "frequency_penalty": rng.choice([-0.5, 0.5]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([3.0, -float("inf")])},
        "allowed_tokens": tuple(rng.sample(range(VOCAB), rng.randint(1, 6))), "stop_tokens": (rng.randrange(VOCAB),),
    }  # fmt: skip
    some |= {name: value for name, value in choices.items() if rng.random() < 0.15}
    if "allowed_tokens" in some:
        some = {name: value for name, value in some.items() if name not in ("logit_bias", "stop_tokens")}
    return SampleOpts(**some, max_tokens=rng.choice([room, rng.randint(1, room)]))


def some_prompts(rng: random.Random) -> list[list[int]]:
    prompts: list[list[int]] = []
    for _ in range(rng.randint(1, 5)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 40, CONTEXT - 9]))]
        if prompts and rng.random() < 0.5:  # a beginning that is known already
            prompt = [*prompts[0][: rng.randint(1, len(prompts[0]))], *prompt[:5]][: CONTEXT - 2]
        prompts.append(prompt)
    return prompts


def scenario(rng: random.Random, name: str) -> int:
    """Prompts together with drafts, on a used engine, and each alone without; how many drafted tokens were kept."""
    slots = rng.choice([2, 16])
    prompts = some_prompts(rng)
    opts = [some_options(rng, min(40, CONTEXT - len(prompt))) for prompt in prompts]
    with LanguageModel(target(threads=1), None) as fresh:
        want = [fresh.generate(p, o, speculate=False) for p, o in zip(prompts, opts, strict=True)]
    backend = target(threads=1, rows=rng.choice([24, 64, 512]), slots=slots)
    native = rng.random() < 0.5
    own = drafter(
        name,
        backend if native else None,
        rows=rng.choice([16, 256]),
        slots=slots,
        positions=rng.choice([CONTEXT, CONTEXT, 50]),
    )
    with LanguageModel(backend, None) as used:
        drafters = [own, *([SuffixDrafter()] if rng.random() < 0.4 else [])]
        used.engine.decoder = Decoder(backend, drafters, Controller(rng.choice([None, 2, 8, 8])))
        used.drafters = tuple(drafters)
        for _ in range(rng.randint(0, 3)):  # streams that are left half read, and texts without drafts
            i = rng.randrange(len(prompts))
            stream = used.stream(prompts[i], opts[i], speculate=rng.random() < 0.8)
            for _ in range(rng.randint(0, 4)):
                next(stream, None)
            if rng.random() < 0.5:
                stream.close()
        found = used.generate_many(prompts, opts)

    def what(result: Result) -> tuple[Any, ...]:
        return result.token_ids, result.finish_reason

    for result, plain, prompt, o in zip(found, want, prompts, opts, strict=True):
        assert what(result) == what(plain), (name, prompt, o)
    for _ in range(own.head.capacity.slots):  # all are free again
        own.head.new_slot()
    return sum(result.stats.by_source.get(own.name, [0, 0])[1] for result in found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["mtp", "eagle3", "eagle3_qwen3", "dflash", "dspark", "dflash_small"])
@pytest.mark.parametrize("scenarios", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_random_scenarios_equal_plain_decoding(name: str, scenarios: int) -> None:
    rng = random.Random(name)
    kept = sum(scenario(rng, name) for _ in range(scenarios))
    assert kept > 0


# --------------------------------------------------------------------------------------------- drafts of known heads

V = 5
DFLASH: dict[str, Any] = {
    "algorithm": "dflash", "block_size": 4, "mask_token": 0, "sample_from_anchor": True, "markov": "vanilla",
    "markov_rank": 1,
}  # fmt: skip


def table(path: Sequence[int], salt: int = 0) -> np.ndarray:
    return table_logits(path, V, salt)


def known(state: State, drafter: FeatureReader, tokens: int) -> State:
    """The target has read all but the last token: their hidden states come in two parts."""
    state.features.start = drafter.begin(state, 0)
    for part in np.split(np.arange(1, tokens, dtype=np.float32), [max(0, tokens // 2)]):
        state.features.append(np.repeat(part[:, None], 4, axis=1))
    return state


def text(drafter: FeatureReader, tokens: Sequence[int], vocab: int = V, **opts: Any) -> State:
    sampler = Sampler(SampleOpts(**{"temperature": 0.0, "seed": 3, **opts}), vocab, tokens)
    return known(State(list(tokens), sampler), drafter, len(tokens))


Node = tuple[tuple[int, ...], float]


def expected_tree(state: State, want: Want) -> list[Node]:
    """Paths with their chances, best first: all candidates of all nodes that may have children among the best."""
    room = max(want.most, want.stretch)
    nodes: list[Node] = []
    level: list[Node] = [((), 1.0)]
    first: list[float] = []
    for _ in range(room):
        below = []
        for path, reach in level:
            found = state.sampler.candidates(table([*state.tokens[1:], *path]), room, path)
            chances = [sure for _, sure in found] if want.chances is None else want.chances([c for _, c in found])
            below += [((*path, token), reach * chance) for (token, _), chance in zip(found, chances, strict=True)]
        nodes = sorted([*nodes, *below], key=lambda node: -node[1])
        first = first or [reach for _, reach in below]
        level = [node for node in below if node in nodes[: room - 1] and node[1] >= want.worth]
        if sum(max(0.0, reach * chance - want.worth) for _, reach in level for chance in first) <= want.step:
            break
    end = next((i + 1 for i, (_, reach) in enumerate(nodes) if reach < want.worth), len(nodes))
    return nodes[: min(end, room)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("most", "stretch", "worth", "step"),
    [(1, 0, 0.9, 0), (4, 0, 1e-9, 0), (3, 5, 0.1, 0), (5, 0, 0.3, 0), (2, 4, 0.1, 0.2), (9, 0, 0.01, 9)],
)
def test_a_tree_is_the_best_of_all_trees(
    temperature: float, most: int, stretch: int, worth: float, step: float
) -> None:
    shapes = set()
    for seed, halve in itertools.product(range(5), (None, lambda sure: [0.5 + c / 2 for c in sure])):
        head = TableHead(table)
        drafter = HeadDrafter(head)
        state = text(drafter, (1, 2, 3, seed % V, 4), temperature=temperature, seed=seed)
        want = Want(state, most, stretch, worth, step, halve)
        (draft,) = drafter.propose([want])
        wanted = expected_tree(state, want)
        assert [draft.path(i) for i in range(len(draft))] == [path for path, _ in wanted]
        assert draft.confidence is not None
        assert draft.q == (None,) * len(draft)
        # The text, then at most a pass for each level but the last.
        assert head.rows[0] == 4
        assert len(head.rows) <= max(draft.depths(), default=0) + 1
        assert len(head.rows) == 1 or step < 9
        assert draft.cut(2).checked(V).tokens == draft.tokens[:2]
        shapes.add(draft.parents)
    assert len(shapes) > 1 or most in (1, 9)


def test_the_best_tree_of_all_there_are() -> None:
    """Every token at every place looked at: nothing that was left out is likelier than what was drafted."""
    for seed in range(4):
        drafter = HeadDrafter(TableHead(table))
        state = text(drafter, (1, 2, 3, seed), seed=seed)
        (draft,) = drafter.propose([Want(state, 4, 0, 1e-12)])
        all_nodes: list[Node] = []
        level: list[Node] = [((), 1.0)]
        for _ in range(4):
            deeper = []
            for path, reach in level:
                p = np.exp(table([*state.tokens[1:], *path]).astype(np.float64))
                deeper += [((*path, token), reach * share) for token, share in enumerate((p / p.sum()).tolist())]
            all_nodes += deeper
            level = deeper
        best = sorted(all_nodes, key=lambda node: -node[1])[:4]
        assert [draft.path(i) for i in range(4)] == [path for path, _ in best]


def test_texts_together_have_the_drafts_they_have_alone() -> None:
    prompts = [(1, 2, 3), (4,), (2, 2), tuple(i % V for i in range(20))]

    def drafts(rows: int, together: bool) -> list[Draft]:
        drafter = HeadDrafter(TableHead(table, rows=rows))
        wants = [Want(text(drafter, p, temperature=1.0), 4, 6, 0.05) for p in prompts]
        return drafter.propose(wants) if together else [drafter.propose([want])[0] for want in wants]

    alone = drafts(64, together=False)
    assert drafts(64, together=True) == alone
    assert drafts(7, together=True) == alone
    assert [len(d) > 0 for d in alone] == [True, False, True, True]  # of one token there are no hidden states yet


def test_a_draft_of_fixed_length_is_a_chain_drawn_as_the_rule_wants_it() -> None:
    for rule, temperature in (("match", 0.0), ("match", 1.0), ("rejection", 0.0), ("block", 1.0)):
        drafter = HeadDrafter(TableHead(table))
        state = text(drafter, (1, 2, 3), temperature=temperature, rule=rule)
        (draft,) = drafter.propose([Want(state, 3)])
        (again,) = drafter.propose([Want(state, 3)])  # nothing new to read
        assert draft.tokens == again.tokens
        assert (draft.parents, draft.confidence, len(draft)) == (None, None, 3)
        tokens: list[int] = []
        for i in range(3):
            token, q = state.sampler.draft(table([2, 3, *tokens]), tokens)
            tokens.append(token)
            assert draft.q is not None
            assert (draft.q[i] is None) == (q is None)
            if q is not None and (got := draft.q[i]) is not None:
                assert np.array_equal(got.probs, q.probs)
        assert draft.tokens == tuple(tokens)


def test_under_the_rejection_rule_a_second_token_stands_beside_the_first() -> None:
    drafter = HeadDrafter(TableHead(table))
    state = text(drafter, (1, 2, 3), temperature=1.0, rule="rejection")
    (draft,) = drafter.propose([Want(state, 4)])
    assert (draft.parents, draft.confidence, len(set(draft.tokens[:2]))) == ((-1, -1, 0, 2), None, 2)
    assert draft.q is not None
    first, second, third, fourth = draft.q
    assert first is not None
    assert second is not None
    rest = first.dense(V)
    assert draft.tokens[0] == state.sampler.draft(table([2, 3]))[0]
    rest[draft.tokens[0]] = 0.0
    np.testing.assert_allclose(second.dense(V), rest / rest.sum())
    for q, path in ((third, draft.path(0)), (fourth, draft.path(2))):
        p = np.exp(table([2, 3, *path]).astype(np.float64))
        assert q is not None
        np.testing.assert_allclose(q.dense(V), p / p.sum())
    (short,) = drafter.propose([Want(state, 2)])
    assert (short.parents, short.tokens[0]) == (None, draft.tokens[0])
    only = text(drafter, (1, 2, 3), temperature=1.0, rule="rejection", top_k=1)
    assert drafter.propose([Want(only, 4)])[0].parents is None


def test_siblings_are_drawn_without_replacement() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.zeros((4, 4))
    for seed in range(6000):
        sampler = Sampler(SampleOpts(temperature=1.0, seed=seed, rule="rejection"), 4)
        (a, _), (b, _) = sampler.siblings(np.log(p).astype(np.float32), 2)
        counts[a, b] += 1
    want = 6000 * p[:, None] * p[None, :] / (1 - p[:, None])
    assert not counts.diagonal().any()
    off = ~np.eye(4, dtype=bool)
    assert ((counts - want)[off] ** 2 / want[off]).sum() < 35  # chi-square of 11 degrees: 35 is 1 in 4000


def test_the_text_goes_on_where_it_was_read() -> None:
    head = TableHead(table)
    drafter = HeadDrafter(head)
    state = text(drafter, (1, 2, 3))
    drafter.propose([Want(state, 3)])
    assert head.rows == [2, 1, 1]
    for token in (4, 0):
        state.features.append(np.full((1, 4), len(state.tokens), np.float32))
        state.tokens.append(token)
    (draft,) = drafter.propose([Want(state, 2)])
    assert head.rows[3:] == [2, 1]
    assert draft.tokens[0] == int(np.argmax(table([2, 3, 4, 0])))
    # It has ended: one that goes on from it finds its rows, the last one excepted, whose token may be another.
    drafter.forget(state)
    other = State([1, 2, 3, 4, 1, 1], state.sampler)
    assert drafter.begin(other, 5) == 3
    assert drafter.begin(State([3, 3], state.sampler), 1) == 0
    other.features.start = 3
    other.features.append(np.repeat(np.arange(4, 6, dtype=np.float32)[:, None], 4, axis=1))
    assert drafter.propose([Want(other, 1)])[0].tokens == (int(np.argmax(table([2, 3, 4, 1, 1]))),)
    drafter.forget(other)
    assert drafter.begin(State([1, 2, 3, 4, 1, 1], state.sampler), 2) == 2  # the target holds no more
    drafter.close()
    assert not head._held


def test_long_texts_are_read_in_passes_that_fit_and_only_what_is_new_is_guessed_from() -> None:
    head = TableHead(table, rows=7)
    drafter = HeadDrafter(head)
    states = [text(drafter, [i % V for i in range(n)]) for n in (20, 2, 9)]
    drafter.absorb(states)
    assert (sum(head.rows), max(head.rows)) == (19 + 1 + 8, 7)
    drafter.absorb(states)
    assert sum(head.rows) == 28


def test_a_head_whose_slots_end_early_drafts_up_to_there() -> None:
    for make in (
        lambda: HeadDrafter(TableHead(table, positions=8)),
        lambda: BlockDrafter(TableHead(table, positions=8, **DFLASH)),
        lambda: BlockDrafter(TableHead(table, positions=8, **DFLASH | {"sample_from_anchor": False})),
    ):
        lengths = []
        for n in range(4, 12):
            drafter = make()
            (chain,) = drafter.propose([Want(text(drafter, [1] * n), 9)])
            (tree,) = drafter.propose([Want(text(drafter, [1] * n), 9, 9, 1e-9)])
            assert len(tree) >= len(chain)
            lengths.append(len(chain))
        assert lengths in ([6, 5, 4, 3, 2, 1, 0, 0], [4, 4, 3, 2, 1, 0, 0, 0], [3, 3, 2, 1, 0, 0, 0, 0])


def test_a_small_draft_vocabulary_speaks_the_targets_ids() -> None:
    ids = [1, 4]
    drafter = HeadDrafter(TableHead(lambda path: table(path)[ids], d2t=ids))
    for opts in ({}, {"temperature": 1.0}, {"temperature": 1.0, "rule": "rejection"}):
        state = text(drafter, (1, 2, 3), **opts)
        for want in (Want(state, 3), Want(state, 4, 4, 1e-9)):
            (draft,) = drafter.propose([want])
            assert len(draft) >= 3
            assert set(draft.tokens) <= set(ids)
    # What the request forbids leaves nothing, or a part.
    assert not drafter.propose([Want(text(drafter, (1, 2, 3), allowed_tokens=(0, 2)), 3)])[0].tokens
    assert drafter.propose([Want(text(drafter, (1, 2, 3), allowed_tokens=(0, 4)), 3)])[0].tokens == (4, 4, 4)
    assert drafter.propose([Want(text(drafter, (1, 2, 3), bad_words=((1, 1), (1, 4), (4,))), 3)])[0].tokens == (1,)


def test_a_block_is_drawn_with_the_markov_head_and_ends_where_its_own_confidence_says() -> None:
    for first in (True, False):
        head = TableHead(table, **DFLASH | {"sample_from_anchor": first})
        drafter = BlockDrafter(head)
        state = text(drafter, (1, 2, 3))
        (draft,) = drafter.propose([Want(state, 9)])
        tokens, before = [], 3
        for row in range(0 if first else 1, 4):
            before = int(np.argmax(table((2, 3, row)) + table((before, -1))))
            tokens.append(before)
        assert draft.tokens == tuple(tokens)
        assert head.rows == [4]
        head.sure = lambda before: 0.9
        (draft,) = drafter.propose([Want(state, 2, 3, 0.5)])
        assert (draft.tokens, draft.confidence) == (tuple(tokens[:3]), (0.9,) * 3)
        head.sure = lambda before: 0.4
        assert max(drafter.propose([Want(state, 2, 3, 0.5)])[0].depths()) == 1
        assert drafter.propose([Want(text(drafter, (1, 2, 3)), 2), Want(state, 2)])[0].tokens == tuple(tokens[:2])

    def nobody_asks(before: int) -> float:
        raise AssertionError("a draft of fixed length needs no confidence")

    head = TableHead(table, rows=5, **DFLASH)
    head.sure = nobody_asks
    drafter = BlockDrafter(head)
    states = [text(drafter, (1, 2, 3)[:n]) for n in (3, 2, 3)]
    drafts = drafter.propose([Want(s, 4) for s in states])
    assert drafts[0] == drafts[2]
    assert max(head.rows) <= 5
    head.sure = lambda before: float("nan")
    with pytest.raises(NumericalError, match="confidence is no number"):
        drafts_of(drafter.propose([Want(states[0], 2, 3, 0.5)]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sure", [None, 0.7])
@pytest.mark.parametrize("first", [True, False])
def test_a_tree_of_a_block_is_the_best_of_all_trees(temperature: float, sure: float | None, first: bool) -> None:
    bushy = 0
    for seed, (most, worth) in itertools.product(range(5), ((1, 0.9), (6, 1e-9), (5, 0.1), (8, 0.03))):
        head = TableHead(table, **DFLASH | {"sample_from_anchor": first})
        head.sure = lambda before: sure
        drafter = BlockDrafter(head)
        state = text(drafter, (1, 2, 3), temperature=temperature, seed=seed)
        (draft,) = drafter.propose([Want(state, most, 0, worth, -1.0)])
        nodes: list[tuple[tuple[int, ...], float]] = []
        level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for row in range(0 if first else 1, 4):
            below = []
            for path, reach in level:
                logits = table((2, 3, row)) + table((path[-1] if path else 3, -1))
                found = state.sampler.candidates(logits, most, path)
                shares = [share for _, share in found]
                if sure is not None:
                    shares = [sure, *(share * (1 - sure) / (1 - shares[0]) for share in shares[1:])]
                below += [((*path, token), reach * share) for (token, _), share in zip(found, shares, strict=True)]
            nodes += below
            level = below
        wanted = sorted((node for node in nodes if node[1] >= worth), key=lambda node: -node[1])[:most]
        assert [draft.path(i) for i in range(len(wanted))] == [path for path, _ in wanted]
        assert len(draft) <= most
        assert head.rows == [4]
        bushy += draft.parents is not None
    assert bushy


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["steps", "small", "block"])
@pytest.mark.parametrize("parameters", ["plain", "all", "dead end", "allowed"])
def test_joint_law_with_a_heads_drafts_is_the_targets(
    rule: str, kind: str, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration, as in test_verify.py, of what the drafter draws."""
    # After a 0 there is nothing left of the small vocabulary.
    monkeypatch.setitem(test_verify.PARAMETERS, "dead end", {"bad_words": ((0, 2), (0, 0))})
    opts, vocab = test_verify.options(parameters, rule), test_verify.V
    ids = [0, 2]

    def choose_draft(sampler: Sampler, output: tuple[int, ...], n: int, _: str, branches: Branches) -> Draft:
        class Enumerated:
            def draw(self, row: Any, *_: int) -> int:
                return branches.draw(row)

        sampler.noise = Enumerated()  # type: ignore[assignment]
        logits = lambda path: test_verify.draft_logits(tuple(path[1:]))  # noqa: E731
        if kind == "steps":
            drafter: FeatureReader = HeadDrafter(TableHead(logits, vocab))
        elif kind == "small":
            drafter = HeadDrafter(TableHead(lambda path: logits(path)[ids], vocab, d2t=ids))
        else:
            drafter = BlockDrafter(TableHead(lambda where: table_logits(where, vocab), vocab, **DFLASH))
        tokens = [*test_verify.PROMPT, *output]
        (draft,) = drafter.propose([Want(known(State(tokens, sampler), drafter, len(tokens)), n)])
        lengths.add(len(draft))
        return draft

    lengths: set[int] = set()
    monkeypatch.setattr(test_verify, "choose_draft", choose_draft)
    test_verify.assert_equal_laws(test_verify.joint_law(opts, 3, 2, kind), test_verify.expected_law(opts, 3))
    assert lengths == ({1, 2} if (kind, parameters) == ("small", "dead end") else {2})
    if rule == "rejection" and kind != "block":  # with a second token beside the first
        test_verify.assert_equal_laws(test_verify.joint_law(opts, 2, 3, kind), test_verify.expected_law(opts, 2))
        assert 3 in lengths


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_seed_repeats_its_answer_whatever_was_held_or_shares_the_pass(rule: str) -> None:
    opts: dict[str, Any] = {"temperature": 1.0, "rule": rule, "seed": 4, "max_tokens": 20}
    for kind in ({}, DFLASH):

        def model(rows: int = 64, kind: dict[str, Any] = kind) -> LanguageModel:
            head = TableHead(lambda path: table(path, salt=1), **kind)
            drafter = BlockDrafter(head) if kind else HeadDrafter(head)
            return LanguageModel(TableBackend(V, rows=rows), None, drafters=[drafter, NgramDrafter()])

        want = model().generate((1, 2, 3, 4), **opts)
        assert want.stats.by_source.keys() == {"dflash" if kind else "mtp"}
        m = model(rows=12)
        for prompt in ((1, 2, 3, 4), (1, 2), (1, 2, 3, 4, 0, 0)):
            m.generate(prompt, max_tokens=5)
            assert m.generate((1, 2, 3, 4), **opts).token_ids == want.token_ids
            fresh = model(rows=12)
            fresh.generate(prompt, max_tokens=5, speculate=False)  # the target alone holds these tokens
            assert fresh.generate((1, 2, 3, 4), **opts).token_ids == want.token_ids
        results = m.generate_many([(4, 3), (1, 2, 3, 4), (1, 2, 3)], **opts)
        assert results[1].token_ids == want.token_ids


# --------------------------------------------------------------------------------------------------------------- broken


def _fails(*_: Any) -> Any:
    raise ZeroDivisionError("broken")


BROKEN: dict[str, Callable[[FeatureReader], None]] = {
    "nan": lambda d: setattr(d.head, "_logits", lambda path: np.full(V, np.nan, np.float32)),
    "one nan": lambda d: setattr(d.head, "_logits", lambda path: np.where(np.arange(V) == 2, np.nan, table(path))),
    "infinite": lambda d: setattr(d.head, "_logits", lambda path: np.full(V, np.inf, np.float32)),
    "too narrow": lambda d: setattr(d.head, "_logits", lambda path: table(path)[:3]),
    "too wide": lambda d: setattr(d.head, "_logits", lambda path: np.tile(table(path), 2)),
    "raises": lambda d: setattr(d.head, "_logits", _fails),
    "cannot commit": lambda d: setattr(d.head, "commit", _fails),
    "cannot begin": lambda d: setattr(d.head, "new_slot", _fails),
    "holds too much": lambda d: setattr(d, "begin", lambda state, held: held + 1),
    "begins as if it held all": lambda d: setattr(d, "begin", lambda state, held: held),
    "cannot follow": lambda d: setattr(d, "_follow", _fails),
}


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_head_costs_a_warning_and_no_token(kind: str, rule: str) -> None:
    head = TableHead(table)
    drafter = HeadDrafter(head)
    BROKEN[kind](drafter)
    model = LanguageModel(TableBackend(V), None, drafters=[drafter], draft_tokens=3)
    opts: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 0.9, "rule": rule}
    prompt = [i % 3 for i in range(40)]
    with pytest.warns(UserWarning, match=f"{drafter.name} failed and is left out") as caught:
        found = model.generate(prompt, **opts)
    assert len(caught) == 1
    with LanguageModel(TableBackend(V), None) as plain:
        assert found.token_ids == plain.generate(prompt, **opts).token_ids
    assert found.stats.drafted == 0
    model.close()
    assert not head._held


class Unwilling:
    """A constraint that raises as soon as a draft is looked at."""

    def fork(self) -> Unwilling:
        return self

    def mask(self, ahead: Sequence[int]) -> None:
        if ahead:
            raise ZeroDivisionError("unwilling")

    def cut(self, tokens: Sequence[int]) -> int:
        return 0

    def advance(self, token: int) -> None:
        pass


GOOD, BAD = (1, 2, 3, 1), (4, *[1, 2, 0] * 8)


def partly_broken(kind: str, cause: str) -> Any:
    """A drafter that has no numbers, or no tokens, for the text BAD alone."""
    nan = np.full(V, np.nan, np.float32)
    if kind == "tree":  # GOOD's answer ends before a row sees as many tokens
        return HeadDrafter(TableHead(lambda path: nan if cause == "nan" and len(path) >= 20 else table(path)))
    if kind == "block":
        return BlockDrafter(
            TableHead(lambda at: nan if cause == "nan" and at[0] >= 20 else table(at, salt=1), **DFLASH)
        )
    size = V - 1 if cause == "unknown token" else V
    return DraftModelDrafter(
        TableBackend(size, logits=lambda path: nan if cause == "nan" and path[0] == 4 else table_logits(path, size, 3))
    )


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [(kind, cause) for kind in ("tree", "block", "model") for cause in ("nan", "constraint")]
    + [("model", "unknown token")],
)
def test_what_fails_for_one_text_leaves_the_others_their_drafts(kind: str, cause: str, rule: str) -> None:
    def run(prompts: Sequence[tuple[int, ...]], fixed: int | None, speculate: bool = True) -> tuple[Any, list[Result]]:
        with LanguageModel(TableBackend(V), None, drafters=[partly_broken(kind, cause)], draft_tokens=fixed) as model:
            some: dict[str, Any] = {"temperature": 1.0, "rule": rule, "max_tokens": 14, "banned_tokens": (4,)}
            opts = [
                SampleOpts(**some, seed=i, constraint=Unwilling() if cause == "constraint" and p == BAD else None)
                for i, p in enumerate(prompts)
            ]
            return model, model.generate_many(prompts, opts, speculate=speculate)

    for fixed in (3, None) if rule != "match" else (3,):
        _, (_, alone) = run([GOOD[:2], GOOD], fixed)
        with pytest.warns(UserWarning, match="failed and is left out for this request") as caught:
            model, (bad, good) = run([BAD, GOOD], fixed)
        assert len(caught) == 1
        assert (good.token_ids, good.stats.by_source) == (alone.token_ids, alone.stats.by_source)
        assert good.stats.drafted > 0
        assert bad.stats.drafted == 0
        assert bad.token_ids == run([BAD, GOOD], fixed, speculate=False)[1][0].token_ids
    # A draft that was never made is no guess that was wrong.
    with pytest.warns(UserWarning, match="left out"):
        model, _ = run([BAD], 3)
    name = model.drafters[0].name
    assert model.engine.decoder.controller.evidence.gains(name, 4) == Controller().evidence.gains(name, 4)
    assert not model.engine.decoder.controller.costs.timed(name)


def test_a_text_that_cannot_be_read_is_alone_in_it() -> None:
    class Unreadable(TableHead):
        def forward(self, batch: Sequence[HeadRows]) -> HeadPass:
            if any(share.tokens.count(4) > 9 for share in batch):  # type: ignore[attr-defined]
                raise ZeroDivisionError("unreadable")
            return super().forward(batch)

    def run(*prompts: Sequence[int]) -> list[Result]:
        head = Unreadable(table, positions=300, rows=300)
        target = TableBackend(V, positions=300, rows=300, logits=lambda path: np.array([9, 0, 0, 0, 0], np.float32))
        with LanguageModel(target, None, drafters=[HeadDrafter(head)], draft_tokens=3) as model:
            return model.generate_many([list(p) for p in prompts], SampleOpts.greedy(max_tokens=9))

    (alone,) = run([1, 2] * 70)
    with pytest.warns(UserWarning, match="left out for this request: ZeroDivisionError: unreadable") as caught:
        good, bad = run([1, 2] * 70, [4, 4] * 65)
    assert len(caught) == 1
    assert good.stats.by_source == alone.stats.by_source
    assert good.stats.drafted > 0
    assert bad.stats.drafted == 0


@pytest.mark.parametrize("kind", ["tree", "block", "model"])
def test_memory_of_idle_texts_is_given_up_for_the_drafts_of_running_ones(kind: str) -> None:
    """What holds 40 tokens in all drafts for one long text after another, without a word."""

    def limited(backend: Any, *names: str) -> Any:
        def small(method: Callable[..., Any]) -> Callable[..., Any]:
            def limited(*args: Any) -> Any:
                if sum(map(len, backend._held.values())) > 40:
                    raise CapacityError("out of memory")
                return method(*args)

            return limited

        for name in names:
            setattr(backend, name, small(getattr(backend, name)))
        return backend

    drafter: Any
    if kind == "model":
        drafter = DraftModelDrafter(limited(TableBackend(V, salt=3), "forward"))
    elif kind == "tree":
        drafter = HeadDrafter(limited(TableHead(table), "forward"))
    else:
        drafter = BlockDrafter(limited(TableHead(table, **DFLASH), "read", "block"))
    model = LanguageModel(TableBackend(V), None, drafters=[drafter], draft_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (1, 2, 3):
            assert model.generate([first, 2, 3], max_tokens=25, seed=1).stats.drafted > 0
    # And what cannot be helped ends drafts for that text alone.
    with pytest.warns(UserWarning, match="left out for this request: out of memory"):
        assert len(model.generate([1, 1, 1], max_tokens=60, seed=1).token_ids) == 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate([1, 2, 3], max_tokens=25, seed=1).stats.drafted > 0


def test_a_head_is_told_of_a_text_before_it_drafts() -> None:
    drafter = HeadDrafter(TableHead(table))
    stranger = State([1, 2, 3], Sampler(SampleOpts(), V))
    with pytest.raises(UsageError, match="call begin first"):
        drafts_of(drafter.propose([Want(stranger, 3)]))
    drafter.begin(stranger, 0)
    with pytest.raises(UsageError, match="hidden states of this text are missing"):
        drafts_of(drafter.propose([Want(stranger, 3)]))
    with pytest.raises(UsageError):  # its slot was given up
        drafts_of(drafter.propose([Want(stranger, 3)]))
    drafter.forget(stranger)
    broken = HeadDrafter(TableHead(lambda path: np.full(V, np.nan)))
    with pytest.raises(NumericalError, match="no numbers"):
        drafts_of(broken.propose([Want(text(broken, (1, 2, 3)), 3)]))


def test_one_drafter_reads_hidden_states() -> None:
    two = [HeadDrafter(TableHead(table), name) for name in ("a", "b")]
    with pytest.raises(UsageError, match="one drafter can read hidden states, got a, b"):
        Decoder(TableBackend(V), two)
    Decoder(TableBackend(V), [two[0], DraftModelDrafter(TableBackend(V)), SuffixDrafter()])


def test_features_wait_in_bounded_number_while_nothing_is_drafted() -> None:
    head = TableHead(table, positions=600, rows=300)
    most = []

    class Watched(HeadDrafter):
        def absorb(self, states: Sequence[State]) -> None:
            most.append(max(len(state.features) for state in states))
            super().absorb(states)

    class Never(Controller):
        def choose(self, asks: Sequence[Ask], rows: int = 0, others: int = 0) -> list[Choice]:
            return [Choice() for _ in asks]

    drafter = Watched(head)
    e = Engine(Decoder(TableBackend(V, positions=600, rows=300), [drafter], Never()))
    request = e.submit([1, 2] * 50, SampleOpts(max_tokens=450, temperature=1.0, seed=1))
    e.run([request])
    assert max(most) <= 128 + 100
    assert request.emitted == 450
    assert sum(head.rows) == 100 + 449  # what was not drafted was read all the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        e.close()


@pytest.mark.parametrize("drafts", ["its own", "another's trees"])
def test_hidden_states_are_those_of_the_text_in_the_heads_order(drafts: str) -> None:
    """Whatever was refused of the drafts, and whatever the target's slot held already."""
    taps = (6, -1, 3)
    config = replace(HEADS["dflash"], taps=taps)
    seen: dict[int, np.ndarray] = {}

    class Watched(BlockDrafter):
        def _read(self, batch: Sequence[tuple[State, int]], failed: Failed) -> None:
            for state, _ in batch:
                start, count = state.features.start, len(state.features)
                rows = state.features.take(count)
                seen.update(zip(range(start, start + count), rows, strict=True))
                state.features.start = start
                state.features.append(rows)
            super()._read(batch, failed)

    def tree(state: State, n: int) -> Draft:
        """A wrong token, and beside it the right one and the next."""
        right = answers[state.tokens[-1]]
        return Draft(((right[0] + 1) % VOCAB, *right), parents=(-1, -1, 1)[: len(right) + 1])

    plain = LanguageModel(target(), None)
    watched = Watched(ReferenceHead(config, tensors(config), positions=CONTEXT))
    drafters = [watched] if drafts == "its own" else [FunctionDrafter(tree), watched]
    with LanguageModel(target(), None, drafters=drafters, draft_tokens=3) as model:
        for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]):
            opts: dict[str, Any] = {"temperature": 8.0, "seed": 1, "max_tokens": 20}
            answer = plain.generate(prompt, **opts).token_ids
            whole = [*prompt, *answer]
            answers = {token: whole[i + 1 : i + 3] for i, token in enumerate(whole) if whole.count(token) == 1}
            answers = {token: answers.get(token, [0]) for token in range(VOCAB)}
            seen.clear()
            result = model.generate(prompt, **opts)
            first = 2 if 9 in prompt else 0
            assert (result.token_ids, result.stats.cached_prompt_tokens) == (answer, first)
            assert 0 < result.stats.accepted < result.stats.drafted
            found = plain.generate(whole, taps=taps, max_tokens=1).taps
            assert sorted(seen) == list(range(first, len(whole) - 1))
            for at, row in seen.items():
                assert np.array_equal(row, np.concatenate([found[tap][at] for tap in taps]))


def test_drafts_of_no_tokens_need_no_head() -> None:
    head = TableHead(table)
    model = LanguageModel(TableBackend(V), None, drafters=[HeadDrafter(head)], draft_tokens=0)
    model.generate((1, 2, 3), max_tokens=9)
    assert not head.rows


def test_a_request_that_does_not_speculate_has_no_hidden_states() -> None:
    head = TableHead(table)
    model = LanguageModel(TableBackend(V), None, drafters=[HeadDrafter(head)], draft_tokens=3)
    result = model.generate((1, 2, 3), speculate=False, max_tokens=9, taps=(0,))
    assert not head.rows
    assert result.taps[0].shape == (11, 4)
    result = model.generate((1, 2, 3), max_tokens=9, taps=(0, 1))
    assert sum(head.rows) > 0
    assert (result.taps[0].shape, result.taps[1].shape) == ((11, 4), (11, 4))
