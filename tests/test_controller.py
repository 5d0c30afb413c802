"""The controller: what it picks by known chances and costs, and in a closed loop on a virtual clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fakes import FunctionDrafter, Machine, TableBackend
from outpace import costs as costs_module
from outpace.backends.base import Rows
from outpace.controller import FIXED_DRAFT, Ask, Controller, Offer
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


@pytest.mark.parametrize("draft_cost", [0.0, 0.1])
@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("cost", COSTS)
def test_never_loses_and_finds_what_pays(
    monkeypatch: pytest.MonkeyPatch, cost: str, chance: float, draft_cost: float
) -> None:
    """On the decoder's own measurements: against plain decoding and the best fixed length."""
    machine = Machine(monkeypatch, COSTS[cost], draft_cost)
    fixed = [machine.seconds(machine.drafter(chance), fixed=k) for k in (0, 1, 2, 3, 5, 8, 15)]
    own = machine.seconds(machine.drafter(chance))
    assert own < fixed[0] / 0.98
    # A step between the row counts of the shape has to be found out.
    assert own < min(fixed) / (0.92 if cost == "a step at eight" else 0.95)


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("cost", COSTS)
def test_free_drafts_never_lose(monkeypatch: pytest.MonkeyPatch, cost: str, chance: float) -> None:
    """They are judged by what they would have guessed, so that even trying costs nothing."""
    machine = Machine(monkeypatch, COSTS[cost])
    fixed = [machine.seconds(machine.drafter(chance, free=True), fixed=k) for k in (0, 1, 2, 3, 5, 8, 15)]
    own = machine.seconds(machine.drafter(chance, free=True))
    assert own < fixed[0] / 0.99
    assert own < min(fixed) / 0.95


@pytest.mark.parametrize("cost", ["half", "a third"])
def test_a_source_that_knows_how_sure_it_is_drafts_when_it_is(monkeypatch: pytest.MonkeyPatch, cost: str) -> None:
    """Half of its tokens are right, and it knows which: better than any fixed length can be."""
    machine = Machine(monkeypatch, COSTS[cost])
    fixed = [machine.seconds(machine.drafter(0.5, free=True, sure=True), fixed=k) for k in range(16)]
    assert machine.seconds(machine.drafter(0.5, free=True, sure=True)) < 0.95 * min(fixed)


@pytest.mark.parametrize("good", ["free", "costly", "none"])
def test_of_several_sources_the_better_one_is_used(monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    machine = Machine(monkeypatch, lambda rows: 0.9 + 0.1 * rows, 0.05)

    def costly() -> Any:
        return machine.drafter(0.8 if good == "costly" else 0.05, "costly")

    def free() -> Any:
        return machine.drafter(0.8 if good == "free" else 0.05, "free", free=True)

    both, plain = machine.seconds(costly(), free()), machine.seconds()
    alone = min(machine.seconds(costly()), machine.seconds(free()))
    assert both < alone / 0.95
    assert both < plain / 0.98


def test_recovers_from_a_slow_first_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda rows: 1.0 + 0.02 * rows, 0.1)
    machine.slow_drafts = 1
    slow = machine.seconds(machine.drafter(0.9))
    assert slow < 1.15 * machine.seconds(machine.drafter(0.9))


def test_a_new_request_begins_with_what_others_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a source that is nearly always wrong: after one answer the next does not try them again at length."""
    machine = Machine(monkeypatch, lambda rows: 0.5 + 0.5 * rows)
    e = Engine(Decoder(machine.target(), [machine.drafter(0.05)], Controller()))
    first, second = answer(e, 200), answer(e, 200)
    assert first.stats.drafted > 0
    assert second.stats.drafted < first.stats.drafted


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
        for _ in range(3):
            controller.costs.add_draft("a", 1, 0.05)
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
    assert costs.draft("a") == 0.0
    costs.add_draft("a", 4, 2.0)
    costs.add_draft("a", 0, 9.0)
    assert (costs.draft("a"), costs.draft("b")) == (0.5, 0.0)


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
