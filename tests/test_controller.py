"""The controller: what it picks by known chances and costs, and in a closed loop on a virtual clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import FunctionDrafter, Machine, TableBackend, TreeLaw
from outpace import costs as costs_module
from outpace.backends.base import Rows
from outpace.controller import FIXED_DRAFT, Ask, Choice, Controller, Offer
from outpace.costs import Costs, measure_shape
from outpace.decode import Decoder, Request
from outpace.engine import Engine
from outpace.evidence import Evidence
from outpace.types import Draft, SampleOpts, UsageError

V = 5


def answer(e: Engine, n: int, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    request = e.submit(prompt, SampleOpts.greedy(max_tokens=n))
    e.run([request])
    return request


# ------------------------------------------------------------------------------------------------------- closed loop


COSTS: dict[str, Callable[[int], float]] = {
    "a row costs what the first does": lambda rows: float(rows),
    "half": lambda rows: 0.5 + 0.5 * rows,
    "a third": lambda rows: 0.7 + 0.3 * rows,
    "nearly nothing": lambda rows: 1.0 + 0.02 * rows,
    "a step at eight": lambda rows: 1.0 + 0.01 * rows + (rows > 8),
}
CHANCES = [0.0, 0.2, 0.5, 0.8, 0.95]
LENGTHS = (0, 1, 2, 3, 5, 8, 15)
# One of each kind in the quick suite, every combination in the whole one.
GRID = [
    pytest.param(cost, chance, draft_cost, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, cost in enumerate(COSTS)
    for j, chance in enumerate(CHANCES)
    for k, draft_cost in enumerate((0.02, 0.1, 0.4))
]


@pytest.mark.parametrize("block", [False, True], ids=["token by token", "in a block"])
@pytest.mark.parametrize(("cost", "chance", "draft_cost"), GRID)
def test_never_loses_and_finds_what_pays(
    monkeypatch: pytest.MonkeyPatch, cost: str, chance: float, draft_cost: float, block: bool
) -> None:
    """On the decoder's own measurements: against plain decoding and the best fixed length."""
    machine = Machine(monkeypatch, COSTS[cost], draft_cost)
    own = machine.run(machine.drafter(chance, block=block), tokens=1000 if chance < 0.8 else 2500)
    fixed = [machine.chain_s(chance, k, block=block) for k in LENGTHS]
    assert own < fixed[0] / 0.98
    # A step between the row counts of the shape has to be found out.
    assert own < min(fixed) / (0.92 if cost == "a step at eight" else 0.95)


@pytest.mark.parametrize(("cost", "chance"), list(itertools.product(COSTS, CHANCES)))
def test_free_drafts_never_lose(monkeypatch: pytest.MonkeyPatch, cost: str, chance: float) -> None:
    """They are judged by what they would have guessed, so that even trying costs nothing."""
    machine = Machine(monkeypatch, COSTS[cost])
    own = machine.run(machine.drafter(chance, free=True), tokens=600)
    fixed = [machine.chain_s(chance, k, free=True) for k in LENGTHS]
    assert own < fixed[0] / 0.99
    assert own < min(fixed) / 0.95


@pytest.mark.parametrize("catch_up", [0.01, 0.03])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.42])
def test_a_source_that_has_to_catch_up_loses_no_more(
    monkeypatch: pytest.MonkeyPatch, chance: float, catch_up: float
) -> None:
    """A head on text that it cannot guess well: what it left unread is read in its next trial, and counts."""
    machine = Machine(monkeypatch, COSTS["half"], 0.2)
    drafter = machine.drafter(chance, catch_up=catch_up)
    assert machine.run(drafter, tokens=2000) < machine.cost(1) * (1.0 + 0.5 * catch_up) / 0.98


def test_what_a_source_lost_stops_it_whatever_it_promises() -> None:
    """Estimates that are wrong for ever (cheap drafts that are always right): the account is not."""
    controller = Controller()
    for rows in range(1, 20):
        controller.costs.add_pass(rows, 1.0 + 0.1 * rows)
    for tokens in (1, 4, 1):
        controller.costs.add_draft("a", tokens, 0.01 * tokens, depth=tokens)
    lost, request = 0.0, controller.track()
    for rounds in range(1, 2001):
        resting = controller.rests(request, "a")
        (choice,) = controller.choose([Ask(request, 4, [] if resting else [offer([0.9] * 4)])])
        if choice.asks:
            controller.spend("a", 0.55)  # half a pass of one row
            controller.earn([("a", choice.length, 0)])
            lost += 0.5 + 0.1 * choice.length / 1.1
        assert lost < 8.0 + 0.015 * rounds
    assert lost > 10.0  # tried again and again
    # What it gains again is its own to lose.
    while controller.rests(request, "a"):
        controller.choose([Ask(request, 4, [])])
    for rounds in range(40):
        assert not controller.rests(request, "a")
        (choice,) = controller.choose([Ask(request, 4, [offer([0.9] * 4)])])
        controller.spend("a", 0.01 if rounds < 30 else 0.55)
        controller.earn([("a", choice.length, choice.length if rounds < 30 else 0)])


def test_the_sweep_of_fixed_lengths_is_what_fixed_lengths_take(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, COSTS["half"], 0.1)
    assert machine.run(machine.drafter(0.8), fixed=3) == pytest.approx(machine.chain_s(0.8, 3), rel=0.02)
    law = TreeLaw((0.5, 0.2, 0.1, 0.05))
    chain = machine.tree_s(law, 0, 1)
    assert machine.run(machine.tree(law), fixed=1) == pytest.approx(chain, rel=0.02)


@pytest.mark.parametrize("free", [True, False], ids=["free", "costly"])
@pytest.mark.parametrize("cost", ["half", "a third"])
def test_a_source_that_knows_how_sure_it_is_drafts_when_it_is(
    monkeypatch: pytest.MonkeyPatch, cost: str, free: bool
) -> None:
    """Half of its tokens are right, and it knows which: better than any fixed length can be."""
    machine = Machine(monkeypatch, COSTS[cost], 0.05)
    fixed = [machine.chain_s(0.5, k, free=free) for k in LENGTHS]
    assert machine.run(machine.drafter(0.5, free=free, sure=True)) < 0.95 * min(fixed)


HEADS = {
    "a weak head": TreeLaw((0.25, 0.12, 0.08, 0.05)),
    "a good head": TreeLaw((0.6, 0.15, 0.08, 0.04)),
    "a useless head": TreeLaw((0.01, 0.01, 0.01, 0.01)),
    "a head that is too sure": TreeLaw((0.4, 0.15, 0.08, 0.05), says=lambda chance: min(0.97, 2.0 * chance)),
    "a head whose text changes": TreeLaw((0.9, 0.04, 0.02, 0.01), (0.15, 0.1, 0.05, 0.03)),
}
TREE_GRID = [
    pytest.param(cost, head, draft_cost, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, cost in enumerate(COSTS)
    for j, head in enumerate(HEADS)
    for k, draft_cost in enumerate((0.02, 0.08, 0.3))
]


@pytest.mark.parametrize(("cost", "head", "draft_cost"), TREE_GRID)
def test_trees_never_lose_and_find_what_pays(
    monkeypatch: pytest.MonkeyPatch, cost: str, head: str, draft_cost: float
) -> None:
    """Against plain decoding and the best fixed number of a tree's rows, grown as the source would at best."""
    machine = Machine(monkeypatch, COSTS[cost], draft_cost)
    own = machine.run(machine.tree(HEADS[head]))
    fixed = [machine.tree_s(HEADS[head], 0, size) for size in LENGTHS]
    assert own < fixed[0] / 0.98
    # That a head is too sure has to be found out, too, where a row costs a third and at best 6 % can be won.
    assert own < min(fixed) / (0.92 if cost == "a step at eight" else 0.94 if "too sure" in head else 0.95)


def test_trees_are_worth_more_than_chains_where_rows_are_nearly_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, COSTS["nearly nothing"], 0.05)
    law = HEADS["a weak head"]
    chains = [machine.chain_s(law.kinds(0)[0][0], k) for k in range(16)]
    assert machine.run(machine.tree(law)) < 0.9 * min(chains)


@pytest.mark.parametrize("good", ["free", "costly", "none"])
def test_of_several_sources_the_better_one_is_used(monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    machine = Machine(monkeypatch, lambda rows: 0.9 + 0.1 * rows, 0.05)
    costly = machine.drafter(0.8 if good == "costly" else 0.05, "costly")
    free = machine.drafter(0.8 if good == "free" else 0.05, "free", free=True)
    alone = [machine.chain_s(0.8, k, free=good == "free") for k in LENGTHS] if good != "none" else []
    assert machine.run(costly, free) < min([machine.cost(1) / 0.98, *(each / 0.95 for each in alone)])


@pytest.mark.parametrize("source", ["chain", "tree"])
@pytest.mark.parametrize("cost", ["half", "nearly nothing"])
def test_recovers_when_the_text_changes(monkeypatch: pytest.MonkeyPatch, cost: str, source: str) -> None:
    """Unguessable, easy, unguessable, a thousand tokens each: near the best fixed length of each third."""
    machine = Machine(monkeypatch, COSTS[cost], 0.1)
    hard, easy = (0.02, 0.01, 0.01, 0.01), (0.85, 0.05, 0.02, 0.01)
    parts = ((0, hard), (1000, easy), (2000, hard))

    def p(position: int) -> tuple[float, ...]:
        return next(chances for start, chances in reversed(parts) if position >= start)

    if source == "chain":
        own = machine.run(machine.drafter(lambda position: p(position)[0]), tokens=3000)
        best = [min(machine.chain_s(chances[0], k) for k in LENGTHS) for _, chances in parts]
    else:
        law = TreeLaw(later=lambda position: [p(position)])
        own = machine.run(machine.tree(law), tokens=3000)
        best = [min(machine.tree_s(law, start, k) for k in LENGTHS) for start, _ in parts]
    assert own < sum(best) / 3 / 0.92


def test_recovers_when_drafts_become_cheap_or_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, COSTS["a third"], 1.0)
    controller = Controller(None, machine.shape())
    assert machine.run(machine.drafter(0.8), controller=controller) < machine.cost(1) / 0.97
    machine.draft_cost = 0.02
    own = machine.run(machine.drafter(0.8), controller=controller)
    assert own < min(machine.chain_s(0.8, k) for k in LENGTHS) / 0.9
    machine.draft_cost = 1.0
    assert machine.run(machine.drafter(0.8), controller=controller) < machine.cost(1) / 0.97


def test_recovers_when_passes_change_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the cores: a row costs what the first does, where eight were nearly free."""
    machine = Machine(monkeypatch, COSTS["nearly nothing"], 0.1)
    controller = Controller(None, machine.shape())
    machine.run(machine.drafter(0.3), controller=controller)
    machine.cost = COSTS["a row costs what the first does"]
    assert machine.run(machine.drafter(0.3), controller=controller) < machine.cost(1) / 0.97
    machine.cost = COSTS["nearly nothing"]
    own = machine.run(machine.drafter(0.3), tokens=2000, controller=controller)
    assert own < min(machine.chain_s(0.3, k) for k in LENGTHS) / 0.95


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("cost", ["half", "nearly nothing"])
def test_requests_that_share_passes_share_them_well(monkeypatch: pytest.MonkeyPatch, cost: str, chance: float) -> None:
    """Two answers side by side, against plain decoding of both and the best fixed length for both."""
    machine = Machine(monkeypatch, COSTS[cost], 0.05)
    own = machine.run(machine.drafter(chance), requests=2)
    fixed = [
        (machine.cost(2 + 2 * k) + 2 * k * machine.draft_cost) / 2 / sum(chance**i for i in range(k + 1))
        for k in LENGTHS
    ]
    assert own < fixed[0] / 0.98
    assert own < min(fixed) / 0.94


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_drafts_beside_a_prompt_that_is_read(monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
    """A long prompt in pieces of some 50 rows: the other answer goes on, faster where drafts are right, and reading is
    not held up where they are not."""
    machine = Machine(monkeypatch, lambda rows: 0.5 + 0.5 * rows, 0.05)

    def answers(*drafters: Any) -> tuple[int, float]:
        e = Engine(Decoder(machine.target(), drafters, Controller(None, machine.shape())))
        first = e.submit((1,), SampleOpts.greedy(max_tokens=7000))
        while first.emitted < 200:
            e.step()
        second = e.submit([2] * 3000, SampleOpts.greedy(max_tokens=1))
        before, start = first.emitted, machine.now
        while not second.finish:
            e.step()
        return first.emitted - before, machine.now - start

    (plain, plain_s), (own, own_s) = answers(), answers(machine.drafter(chance))
    if chance:
        assert own > 3 * plain
    assert own_s < (1.3 if chance else 1.15) * plain_s


@pytest.mark.parametrize(("draft_s", "chance"), [(0.05, 0.9), (0.05, 0.3), (0.001, 0.9)])
def test_drafts_while_every_pass_reads(monkeypatch: pytest.MonkeyPatch, draft_s: float, chance: float) -> None:
    """No pass that only decodes was ever timed: what a draft costs is compared with the passes there are, in seconds
    (a plain one takes 0.02, so that a draft token of 0.05 never pays)."""
    machine = Machine(monkeypatch, lambda rows: 0.02 + 1e-4 * rows, draft_s)

    def answers(speculate: bool) -> tuple[int, float]:
        e = Engine(Decoder(machine.target(), [machine.drafter(chance)], Controller(None, machine.shape())))
        first = e.submit((1,), SampleOpts.greedy(max_tokens=7000), speculate=speculate)
        start = machine.now
        for second in [e.submit([2] * 7900, SampleOpts.greedy(max_tokens=1)) for _ in range(2)]:
            while not second.finish:
                e.step()
        return first.emitted, machine.now - start

    (plain, plain_s), (own, own_s) = answers(False), answers(True)
    if draft_s < 0.02:
        assert own > 5 * plain
    assert own_s < (1.6 if draft_s < 0.02 else 1.1) * plain_s


def test_recovers_from_a_slow_first_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda rows: 1.0 + 0.02 * rows, 0.1)
    machine.slow_drafts = 1
    slow = machine.run(machine.drafter(0.9), tokens=2000)
    assert slow < 1.15 * machine.run(machine.drafter(0.9), tokens=2000)


def test_a_new_request_begins_with_what_others_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a source that is nearly always wrong: after one answer the next does not try them again at length."""
    machine = Machine(monkeypatch, lambda rows: 0.5 + 0.5 * rows)
    e = Engine(Decoder(machine.target(), [machine.drafter(0.05)], Controller()))
    first, second = answer(e, 200), answer(e, 200)
    early = [sum(each.drafted for each in request.rounds[:30]) for request in (first, second)]
    assert early[0] > early[1]


# ------------------------------------------------------------------------------------------------------------ choices


def offer(chances: Sequence[float], source: str = "a", *, free: bool = False) -> Offer:
    draft = Draft(tuple(range(len(chances))), source=source) if free else None
    return Offer(source, list(itertools.accumulate(chances, lambda a, b: a * b)), draft)


def test_the_choice_is_the_best_of_all_lengths() -> None:
    """Against brute force, for two requests of one source."""
    random = np.random.default_rng(0)
    for _ in range(30):
        controller = Controller()
        for rows in range(2, 40):
            controller.costs.add_pass(rows, 1.0 + float(random.uniform(0, 0.3)) * rows)
        for requests in (1, 1, 1, 2):
            controller.costs.add_draft("a", 2, 0.1, requests=requests)
        offers = [offer(random.uniform(0.5, 0.95, 6).tolist()) for _ in range(2)]

        def rate(lengths: Sequence[int], offers: list[Offer] = offers, controller: Controller = controller) -> float:
            tokens = 2 + sum(sum(o.gains[:n]) for o, n in zip(offers, lengths, strict=True))
            rows = 2 + sum(lengths)
            return float(tokens / (controller.costs.passes(rows, rows)[0] + 0.05 * sum(lengths)))

        choices = controller.choose([Ask(Evidence(), 6, [o]) for o in offers])
        best = max(rate(lengths) for lengths in itertools.product(range(7), repeat=2))
        assert any(choice.length for choice in choices)
        assert rate([choice.length for choice in choices]) == pytest.approx(best, rel=1e-9)


def test_the_better_offer_is_taken_and_free_ones_count_as_free() -> None:
    controller = Controller()
    for rows in range(1, 20):
        controller.costs.add_pass(rows, 1.0 + 0.1 * rows)
    for _ in range(3):
        controller.costs.add_draft("slow", 1, 0.3)
    slow, free = offer([0.9] * 4, "slow"), offer([0.8] * 4, "look-up", free=True)
    (choice,) = controller.choose([Ask(Evidence(), 4, [slow, free])])
    assert choice.offer is free
    assert choice.length == 4
    (choice,) = controller.choose([Ask(Evidence(), 4, [slow, offer([0.1] * 4, "look-up", free=True)])])
    assert choice.offer is slow
    assert 0 < choice.worth < 0.9


def test_steady_requests_draft_a_fixed_length_from_the_main_source_in_any_company() -> None:
    controller = Controller()
    steady, free = Evidence(), Evidence()
    steady.steady = True

    def ask(evidence: Evidence, most: int) -> Ask:
        return Ask(evidence, most, [offer([0.9] * most, "main"), offer([1.0] * most, "other", free=True)])

    def lengths(*asks: Ask) -> list[int]:
        choices = controller.choose(list(asks))
        assert all(
            c.offer is None or c.offer.source == "main" for c, a in zip(choices, asks, strict=True) if a.evidence.steady
        )
        return [choice.length for choice in choices]

    assert lengths(ask(steady, 9)) == [FIXED_DRAFT]
    assert lengths(ask(steady, 2)) == [2]
    assert lengths(ask(steady, 9), ask(free, 9)) == [FIXED_DRAFT, 0]  # the other's plain round comes first
    controller.costs.add_pass(2 + FIXED_DRAFT, 1.0)
    fixed, chosen = lengths(ask(steady, 9), ask(free, 9))
    assert (fixed, chosen > 0) == (FIXED_DRAFT, True)
    assert lengths(ask(steady, 9), ask(free, 0), ask(Evidence(), 0)) == [FIXED_DRAFT, 0, 0]
    controller = Controller(2)
    assert lengths(ask(steady, 9), ask(free, 9)) == [2, 2]


def test_no_draft_goes_on_beyond_what_its_request_can_use() -> None:
    controller = Controller()
    for rows in range(1, 40):
        controller.costs.add_pass(rows, 1.0 + 0.01 * rows)
    for requests in (1, 1, 1, 2):
        controller.costs.add_draft("a", 2, 0.02, requests=requests)
    short, long = controller.choose([Ask(Evidence(), n, [offer([0.9] * n)]) for n in (2, 15)])
    assert (short.length, short.stretch) == (2, 2)
    assert 2 < long.length <= long.stretch <= 15


def test_drafts_that_are_made_get_the_rows_they_are_worth() -> None:
    controller = Controller()
    for rows in range(1, 20):
        controller.costs.add_pass(rows, 1.0 if rows <= 8 else 1.5)
    asked, look_up = offer([0.5] * 15, "head"), offer([0.6] * 5, "look-up", free=True)
    ask = Ask(Evidence(), 15, [asked, look_up])

    def settle(chances: Sequence[float], *, sure: bool = True, worth: float = 0.1, trial: int = 0) -> tuple[str, int]:
        new = offer(chances, "head", free=True)
        assert new.draft is not None
        new.draft = replace(new.draft, confidence=tuple(chances) if sure else None)
        choice = Choice(asked, min(len(chances), 9), worth, trial=trial)
        ((found, length),) = controller.settle([ask], [choice], [new])
        return (found.source if found is not None else ""), length

    assert settle([0.9] * 15) == ("head", 7)  # up to the step, whatever was planned
    assert settle([0.99] * 15) == ("head", 15)
    assert settle([0.2] * 9) == ("look-up", 5)
    assert settle([], sure=False) == ("look-up", 5)
    assert settle([0.2] * 9, sure=False) == ("head", 9)  # it says nothing new
    assert settle([0.2] * 9, worth=0.0) == ("head", 9)
    assert settle([0.2] * 9, trial=9) == ("head", 9)


def test_sources_need_names_of_their_own() -> None:
    twins = [FunctionDrafter(lambda state, n: Draft(), "twin") for _ in range(2)]
    with pytest.raises(UsageError, match="twin"):
        Decoder(TableBackend(V), twins)


# -------------------------------------------------------------------------------------------------- costs and evidence


def test_costs_between_and_beyond_measurements() -> None:
    costs = Costs()
    assert costs.passes(5, 5)[0] > costs.passes(1, 1)[0] > 0
    costs = Costs({1: 1.0, 8: 1.0, 16: 2.0})
    assert costs.passes(1, 16) == pytest.approx([1.0] * 8 + [1 + i / 8 for i in range(1, 9)])
    costs.add_pass(1, 3.0)
    assert costs.passes(12, 12) == pytest.approx([4.5])  # the shape, scaled by what was measured now
    costs.add_pass(16, 12.0)
    assert costs.passes(12, 12)[0] == pytest.approx((1 - 11 / 15) * 4.5 + 11 / 15 * 9.0)
    assert costs.passes(16, 16) == [12.0]


def test_the_cost_of_a_draft_is_a_line_over_its_length() -> None:
    costs = Costs()
    assert costs.draft("a", 4) == 0.0
    costs.add_draft("a", 4, 2.0)
    costs.add_draft("a", 0, 9.0)
    assert [costs.draft("a", n) for n in (0, 1, 8)] == [0.0, 0.5, 4.0]  # one length: token by token
    assert costs.draft("b", 1) == 0.0
    for tokens in (2, 6, 2, 6):
        costs.add_draft("block", tokens, 0.5, depth=tokens)
        costs.add_draft("tree", tokens, 0.1 + 0.2 * (tokens // 2), depth=tokens // 2)
    assert [costs.draft("block", n) for n in (1, 15)] == pytest.approx([0.5, 0.5])
    assert costs.step("block") == pytest.approx(0.0)
    assert costs.draft("tree", 4) == pytest.approx(0.5)
    assert costs.step("tree") == pytest.approx(0.2)
    # Requests that share the drafter's passes: as the nearest number of them, until they were timed themselves.
    assert costs.draft("tree", 8, requests=2) == pytest.approx(0.5)
    costs.add_draft("tree", 8, 0.7, requests=2)
    assert costs.draft("tree", 8, requests=2) == pytest.approx(0.7)
    # The machine got slower: the newest timing sets the level, and one interruption nothing.
    costs.add_draft("tree", 2, 50.0)
    assert costs.draft("tree", 2) == pytest.approx(0.3)
    for _ in range(3):
        costs.add_draft("tree", 2, 0.6)
    assert costs.draft("tree", 2) == pytest.approx(0.6)
    # A draft that had to catch up can only have been dear.
    costs.add_draft("block", 2, 9.0, behind=True)
    assert costs.draft("block", 2) == pytest.approx(0.5)


def test_passes_that_read_a_prompt_say_how_fast_it_is_read() -> None:
    costs = Costs({1: 1.0, 16: 2.0})
    costs.add_pass(1, 3.0)
    alone = costs.passes(100, 100)[0]
    costs.add_pass(100, 0.5 * alone, reading=True)
    assert costs.passes(50, 50, reading=True) == pytest.approx([0.5 * costs.passes(50, 50)[0]])
    assert costs.passes(100, 100) == [alone]
    assert not costs.knows(100)


def test_passes_that_read_are_the_scale_while_no_other_was_measured() -> None:
    costs = Costs({1: 1.0, 16: 2.0})
    costs.add_pass(16, 0.4, reading=True)
    for reading in (False, True):
        assert costs.passes(1, 1, reading=reading) == pytest.approx([0.2])
        assert costs.passes(16, 16, reading=reading) == pytest.approx([0.4])
    costs.add_pass(1, 0.3)  # from here on a better one is known, and nothing yet of how fast prompts are read
    assert costs.passes(16, 16) == costs.passes(16, 16, reading=True) == pytest.approx([0.6])
    costs.add_pass(16, 0.3, reading=True)
    assert costs.passes(16, 16, reading=True) == pytest.approx([0.3])
    for _ in range(600):  # it was too long ago
        costs.add_pass(16, 4.0, reading=True)
    assert costs.passes(1, 1) == costs.passes(1, 1, reading=True) == pytest.approx([2.0])


def test_the_shape_is_measured_in_turns_and_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    counts: list[int] = []
    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: now[0])

    class Target(TableBackend):
        def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Any:
            rows = sum(len(share.tokens) for share in batch)
            counts.append(rows)
            now[0] += 0.1 * {1: 1.0, 2: 0.7}.get(rows, 1 + rows / 16)
            return super().forward(batch, taps)

    target = Target(V, positions=64, rows=8)
    assert measure_shape(target) == pytest.approx({1: 1.0, 2: 1.0, 4: 1.25, 8: 1.5})
    assert counts == [8, 1, 2, 4, 8]  # one turn took longer than it should
    assert len({target.new_slot() for _ in range(target.capacity.slots)}) == target.capacity.slots
    assert measure_shape(TableBackend(V, rows=1)) == {}


def test_evidence_by_place_and_by_confidence() -> None:
    everyone = Evidence()
    one, other = Evidence(everyone), Evidence(everyone)
    for _ in range(60):
        one.observe(Draft((1, 2, 3), source="a", confidence=(0.95, 0.95, 0.05)), (1, 2, 9))
    first, second, third = one.by_place("a", 3)
    assert first > 0.9 < second
    assert third < 0.2
    assert one.by_confidence("a", [0.95])[0] > 0.9 > 0.2 > one.by_confidence("a", [0.05])[0]
    # Another request leans on it; another source does not.
    assert other.by_place("a", 3) == pytest.approx([first, second, third], abs=0.1)
    assert other.by_place("b", 1) == [0.6]
    assert other.by_confidence("b", [0.35]) == [0.35]
    for _ in range(60):
        other.observe(Draft((1,), source="a"), (2,))
    assert other.by_place("a", 1)[0] < 0.1 < 0.5 < one.by_place("a", 1)[0]


def test_evidence_of_a_tree_judges_every_sibling_and_no_more_than_was_emitted() -> None:
    tree = Draft((1, 2, 3, 4), parents=(-1, -1, 1, 1), source="t", confidence=(0.55, 0.35, 0.75, 0.15))
    evidence = Evidence()
    for _ in range(40):
        evidence.observe(tree, (2, 3))
    sure = evidence.by_confidence("t", [0.55, 0.35, 0.75, 0.15])
    assert sure[0] < 0.1 < 0.9 < sure[1]
    assert sure[2] > 0.9 > 0.1 > sure[3]
    evidence = Evidence()
    evidence.observe(tree, (2,))
    assert evidence.by_confidence("t", [0.75]) == [0.75]  # nobody knows what came next
    assert math.isclose(sum(evidence.by_place("t", 2)), 2 * evidence.by_place("t", 1)[0])


def test_gains_of_a_tree_are_counted_by_rank_and_what_got_no_row_gained_nothing() -> None:
    """A tree right three times in four at its first two ranks, once with rows for all, once with one for the first."""
    tree = Draft((1, 4, 2), parents=(-1, 0, -1), source="t")
    for verified in (3, 1):
        evidence = Evidence()
        for right in (False, True, True, True) * 30:
            # With the second token unverified the round ends with it.
            told = (1, 4, 0)[: verified + 1] if right else (3,)
            evidence.observe(tree, told, asked=3, verified=verified)
        first, second, third = evidence.gains("t", 3)
        assert first == pytest.approx(0.75, abs=0.1)
        assert second == (pytest.approx(first, abs=0.01) if verified == 3 else pytest.approx(0.0, abs=0.05))
        assert third < 0.05
        assert evidence.rows("t", 3) == pytest.approx([float(rank < verified) for rank in range(3)], abs=0.1)


def test_lengths_are_tried_step_by_step() -> None:
    evidence = Evidence()
    assert len(evidence.gains("a", 15)) == 2
    evidence.observe(Draft((1, 1), source="a"), (1, 1, 1), asked=2, verified=2)
    assert len(Evidence(evidence).gains("a", 15)) == 5


def test_chances_follow_confidence_within_a_bin() -> None:
    """A source four times too sure of its unlikely tokens: known for those, and in proportion."""
    random, evidence, found = np.random.default_rng(0), Evidence(), []
    for i in range(4000):
        sure = float(random.choice([0.02, 0.04, 0.16, 0.9]))
        right = random.random() < (sure / 4 if sure < 0.5 else sure)
        evidence.observe(Draft((1,), source="a", confidence=(sure,)), (1,) if right else (0,))
        if i >= 1000 and i % 50 == 0:
            found.append(evidence.by_confidence("a", [0.02, 0.04, 0.16, 0.9]))
    low, twice, other, high = np.mean(found, axis=0)
    assert (low, twice, other) == pytest.approx((0.005, 0.01, 0.04), rel=0.5)
    assert high == pytest.approx(0.9, abs=0.07)
    assert evidence.by_confidence("a", [1.0])[0] < 1.0


def test_a_trial_that_went_better_than_expected_is_a_surprise() -> None:
    evidence = Evidence()
    for _ in range(40):
        evidence.observe(Draft((1,), source="a"), (2,), asked=1, verified=1)
    assert not evidence.surprised("a")
    evidence.observe(Draft((1,), source="a"), (1, 2), asked=1, verified=1)
    assert evidence.surprised("a")
    evidence.observe(Draft((1,), source="a"), (2,), asked=1, verified=1)
    assert not evidence.surprised("a")


def test_sources_that_do_not_pay_rest_and_requests_of_fixed_length_never_do() -> None:
    controller, steady = Controller(), Evidence()
    steady.steady = True
    for rows in range(1, 20):
        controller.costs.add_pass(rows, float(rows))  # a pass a row: no draft pays
    for tokens in (1, 4, 1):
        controller.costs.add_draft("a", tokens, 0.5 * tokens, depth=tokens, requests=1)
    request = controller.track()
    rested = looked = 0
    for _ in range(200):
        resting = controller.rests(request, "a")
        assert not controller.rests(steady, "a")
        (choice,) = controller.choose([Ask(request, 8, [] if resting else [offer([0.5] * 8)])])
        if choice.asks:
            assert not resting
            controller.evidence.observe(Draft((1,), source="a"), (2,), asked=1, verified=1)
        rested += resting
        looked += not resting
    assert rested > 5 * looked
    # What pays is looked at in every round.
    cheap = Controller()
    for rows in range(1, 20):
        cheap.costs.add_pass(rows, 1.0 + 0.01 * rows)
    for tokens in (1, 4, 1):
        cheap.costs.add_draft("a", tokens, 0.01 * tokens, depth=tokens, requests=1)
    for _ in range(50):
        assert not cheap.rests(request, "a")
        cheap.choose([Ask(cheap.track(), 8, [offer([0.9] * 8)])])
    assert not Controller(fixed=3).rests(request, "a")
