"""What to draft now: the source and the length with the most expected tokens per second, and nothing when none pays.

A round that drafts k tokens emits 1 + sum over i <= k of (a_1 * ... * a_i) tokens in expectation, a_i being the chance
that draft token i is accepted once those before it were (evidence.py), and costs T(rows of the pass) + the draft's own
time (costs.py). Each request takes the offer that promises most; then rows are handed out one by one, to the request
whose next row promises most, and the count with the best tokens per second wins. `Offer.gains` is the interface: the
expected gain of a row, by which a server may share a pass between requests. The choice never touches the tokens
themselves under the match rule; rules that only promise the distribution get a fixed source and length, so that a seed
repeats its answer.

Never slower than plain decoding needs two things to be known rather than guessed: the plain round itself, which is
therefore measured before the first draft and again now and then; and what a draft costs and gains today. Sources whose
drafts cost nothing are judged every round by what they would have guessed; others are tried again now and then, and
whatever they promise, an account of what they really took and gained (budget.py) bounds what they may lose.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .budget import Budget
from .costs import Costs
from .evidence import Evidence
from .types import Draft

MAX_DRAFT = 15  # with the pending token 16 rows: the width that kernels are built for
FIXED_DRAFT = 4  # length for the rejection and block rules
_ANCHOR_EVERY = 128  # rounds with drafts between two measurements of the plain round
_NOTHING = 1e-9  # a worth that every token has
_MARGIN = 1.02  # by which drafts that cost something must promise more than none
_PROBE_SHARE = 0.005  # of the tokens per second may be spent on trying sources that do not promise to pay
_PROBE_EVERY = 8, 1024  # ... but not more often, nor more seldom, in rounds
_REST = 63  # rounds in which sources that cost something are not looked at, at most, where none promised to pay


@dataclass(slots=True)
class Offer:
    """What a source can do for a request. gains[i]: the chance that draft token i is reached and accepted.

    draft: the tokens, from a source whose drafts cost nothing; None from one that drafts when it is chosen. main: the
    source that requests with a fixed draft take. rows[i]: the chance that token i gets a row at all; None: it will.
    """

    source: str
    gains: Sequence[float]
    draft: Draft | None = None
    main: bool = True
    rows: Sequence[float] | None = None


@dataclass(slots=True)
class Ask:
    """A request that can use a draft of at most `most` tokens, and what its sources offer, the main one first."""

    evidence: Evidence
    most: int
    offers: list[Offer]


@dataclass(slots=True)
class Choice:
    """One offer and its length. None: no draft.

    worth, step, stretch: what the source is told with it (drafters/base.py: Want); 0 where the length is fixed. trial:
    tokens that the source drafts so that its cost is known; only `length` of them are verified.
    """

    offer: Offer | None = None
    length: int = 0
    worth: float = 0.0
    step: float = 0.0
    stretch: int = 0
    trial: int = 0

    @property
    def asks(self) -> str:
        """The source that has to draft now; "" for none."""
        return self.offer.source if self.offer is not None and self.offer.draft is None and self.length else ""


class Controller:
    """Shares the rows of a pass between requests. One per target and its drafters."""

    def __init__(self, fixed: int | None = None, shape: Mapping[int, float] | None = None) -> None:
        """fixed: always draft this many tokens (0 .. 15) from the main source instead of deciding by evidence.
        shape: T(rows) / T(1), see costs.py."""
        self.fixed = fixed
        self.costs = Costs(shape)
        self.evidence = Evidence()
        self._since_plain: dict[int, int] = {}  # rows without drafts -> rounds with since that pass was measured
        self._budget = Budget()
        self._planner: _Planner | None = None  # of the pass that is under way, where drafts are chosen by evidence
        self._untried = 0  # rounds in which no source that costs something was chosen
        self._rest = 0  # further rounds in which none is looked at

    def rests(self, evidence: Evidence, source: str) -> bool:
        """Whether a source that costs something need not be offered for a request now: it has lost too much, or none
        promised to pay a moment ago and the next trial is not due. Looking at it takes as long as a tenth of a small
        model's pass."""
        if self.fixed is not None or evidence.steady or self.costs.is_new(source):
            return False
        return self._rest > 0 or self._budget.left(source) <= 0.0

    def track(self) -> Evidence:
        """The evidence of a new request, for which all sources are looked at again."""
        self._rest = 0
        return Evidence(self.evidence)

    def skip(self) -> None:
        """A round in which all sources rest."""
        self._next_round()
        self._untried += 1

    def _next_round(self) -> None:
        self._rest = max(0, self._rest - 1)
        self._budget.grow()
        self._planner = None

    def choose(self, asks: Sequence[Ask], rows: int = 0, others: int = 0) -> list[Choice]:
        """A choice for each request. rows: of the pass besides one for each of these requests: `others` requests, and
        what they and these read of prompts."""
        self._next_round()
        choices = [self._steady(ask) for ask in asks]
        free = [i for i, ask in enumerate(asks) if not self._is_steady(ask)]
        base = rows + len(asks) + sum(choice.length for choice in choices)
        found = self._by_evidence(base, [asks[i] for i in free], others + len(asks), reading=rows > others)
        for i, choice in zip(free, found, strict=True):
            choices[i] = choice
        return choices

    def settle(
        self,
        asks: Sequence[Ask],
        choices: Sequence[Choice],
        made: Sequence[Offer | None],
        rows: int = 0,
        others: int = 0,
    ) -> list[tuple[Offer | None, int]]:
        """For each request the draft that is verified, an offer and a length. made: what the chosen sources drafted.

        Drafts that say how sure their source is get the rows that they turned out to be worth; one that there already
        was takes their place where it is worth more.
        """
        settled = [(new or choice.offer, choice.length) for choice, new in zip(choices, made, strict=True)]
        judged = [i for i, new in enumerate(made) if new is not None and choices[i].worth and not choices[i].trial]
        judged = [i for i in judged if _tells(made[i])]
        if not judged:
            return settled
        fixed = [pair for i, pair in enumerate(settled) if i not in judged]
        base = rows + len(asks) + sum(length for _, length in fixed)
        sure = others + len(asks) + sum(sum(offer.gains[:length]) for offer, length in fixed if offer is not None)
        drafts = [[made[i], *asks[i].offers] for i in judged]
        offers = [[o for o in each if o is not None and o.draft is not None and o.gains] for each in drafts]
        most = sum(max((len(offer.gains) for offer in each), default=0) for each in offers)
        plan = _Planner(self.costs, sure, self.costs.passes(base, base + most, reading=rows > others)).best(offers)
        for i, offer, length in zip(judged, plan.offers, plan.counts(), strict=True):
            settled[i] = (offer, length)
        return settled

    def spend(self, source: str, seconds: float) -> None:
        """A source drafted for so long for requests whose drafts are chosen by evidence."""
        if self._planner is not None:
            self._budget.add(source, -seconds / self._planner.rows_s[0])

    def earn(self, drafts: Sequence[tuple[str, int, int]]) -> None:
        """What became of the drafts for which sources were asked, after the pass: source, rows, tokens accepted."""
        planner = self._planner
        if planner is None or not drafts:
            return
        rows = min(sum(rows for _, rows, _ in drafts), len(planner.rows_s) - 1)
        price = (planner.rows_s[rows] / planner.rows_s[0] - 1.0) / max(rows, 1)
        for source, count, accepted in drafts:
            self._budget.add(source, accepted / planner.sure - count * price)

    def _is_steady(self, ask: Ask) -> bool:
        return self.fixed is not None or ask.evidence.steady

    def _steady(self, ask: Ask) -> Choice:
        length = FIXED_DRAFT if self.fixed is None else self.fixed
        if not self._is_steady(ask) or not ask.offers or not ask.offers[0].main:
            return Choice()
        main = ask.offers[0]
        return Choice(main, min(length, ask.most if main.draft is None else len(main.draft)))

    def _by_evidence(self, base: int, asks: Sequence[Ask], sure: int, reading: bool) -> list[Choice]:
        """base: rows of the pass without these drafts. sure: tokens it emits without them. reading: also of a prompt,
        which counts as much as a token."""
        none = [Choice() for _ in asks]
        most = max((len(offer.gains) for ask in asks for offer in ask.offers), default=0)
        self._untried += bool(asks)
        if not most:
            return none
        if not reading and (not self.costs.knows(base) or self._since_plain.get(base, 0) >= _ANCHOR_EVERY):
            self._since_plain[base] = 0
            return none
        planner = _Planner(self.costs, sure, self.costs.passes(base, base + most * len(asks), reading=reading))
        self._planner = planner
        plan = planner.best([[o for o in ask.offers if o.gains and not self._is_new(o)] for ask in asks])
        choices = planner.choices(plan)
        self._probe(planner, plan, asks, choices)
        if any(choice.length for choice in choices):
            self._since_plain[base] = self._since_plain.get(base, 0) + 1
        if any(choice.asks for choice in choices):
            self._untried = 0
        return choices

    def _is_new(self, offer: Offer) -> bool:
        return offer.draft is None and self.costs.is_new(offer.source)

    def _probe(self, planner: _Planner, plan: _Plan, asks: Sequence[Ask], choices: list[Choice]) -> None:
        """Tries a source that costs something and does not promise to pay: at once while its cost is unknown; else when
        none was chosen for long, the sooner the nearer it came to paying, and again when such a trial went
        surprisingly well."""
        costly = [(i, o) for i, ask in enumerate(asks) for o in ask.offers if o.draft is None and o.gains]
        for i, offer in costly:
            if self._is_new(offer):
                # One token, then several for about the time of a pass, so that two lengths give a line, and one more.
                affordable = planner.rows_s[0] / (self.costs.draft(offer.source) or math.inf)
                tokens = (
                    min(asks[i].most, max(2, min(6, int(affordable)))) if self.costs.timed(offer.source) == 1 else 1
                )
                choices[i] = Choice(offer, 1, planner.worth(plan.rate), planner.step(plan.rate, offer), trial=tokens)
                return
        if not costly or any(choice.asks for choice in choices):
            return
        trials = [(planner.plan([offer], least=1), i) for i, offer in costly]
        trial, i = max(trials, key=lambda each: each[0].rate)
        source = trial.offers[0].source if trial.offers[0] is not None else ""
        # Tokens that the best plan would have emitted in the time, and this one is not expected to.
        lost = (plan.rate - trial.rate) * trial.seconds + plan.rate * self.costs.behind(source)
        patience = min(max(lost / (_PROBE_SHARE * planner.sure), _PROBE_EVERY[0]), _PROBE_EVERY[1])
        if self._untried >= patience or asks[i].evidence.surprised(source):
            choices[i] = planner.choices(trial)[0]
        else:
            self._rest = min(max(int(patience - self._untried), _PROBE_EVERY[0]) - 1, _REST)


def _tells(made: Offer | None) -> bool:
    """Whether a draft that was made says more about its worth than was known before."""
    return made is not None and made.draft is not None and (made.draft.confidence is not None or not len(made.draft))


@dataclass(slots=True)
class _Plan:
    """For each request an offer; the requests in the order in which they get their tokens; what is expected of it."""

    offers: Sequence[Offer | None]
    order: Sequence[int]
    rows: float
    pass_s: float
    seconds: float
    rate: float  # tokens a second

    def counts(self) -> list[int]:
        """How many tokens of each request's offer."""
        return [self.order.count(i) for i in range(len(self.offers))]


def _sure_rate(plan: _Plan) -> float:
    """Tokens a second; of a plan with drafts that cost something a little less: the best of several guesses is, on
    average, less good than it looks."""
    costly = any(offer is not None and offer.draft is None for offer in plan.offers) and bool(plan.order)
    return plan.rate / _MARGIN if costly else plan.rate


class _Planner:
    """Plans of one pass. sure: tokens that it emits without any draft. rows_s: its seconds by rows of drafts."""

    def __init__(self, costs: Costs, sure: float, rows_s: Sequence[float]) -> None:
        self.costs, self.sure, self.rows_s = costs, sure, rows_s

    def best(self, offers: Sequence[Sequence[Offer]]) -> _Plan:
        """The plan with the most expected tokens a second. offers: of each request."""
        if len(offers) == 1:
            return max([self.plan([None]), *(self.plan([offer]) for offer in offers[0])], key=_sure_rate)
        picked = [self._pick(each) for each in offers]
        plan = self.plan(picked)
        if any(offer is not None and offer.draft is None for offer in picked):
            # A draft that costs something may pay for itself and yet stand in the way of those that do not.
            free = self.plan([self._pick([o for o in each if o.draft is not None]) for each in offers])
            plan = max(free, plan, key=_sure_rate)
        return plan

    def _pick(self, offers: Sequence[Offer]) -> Offer | None:
        """The offer that alone gives the pass the most tokens a second; the first of equal ones, None without any."""
        if len(offers) < 2:
            return offers[0] if offers else None
        return max(offers, key=lambda offer: self.plan([offer], least=1).rate)

    def plan(self, offers: Sequence[Offer | None], least: int = 0) -> _Plan:
        """Rows handed out one by one, each to the offer whose next token promises most; the count with the most
        expected tokens a second, at least `least` where there are as many."""
        chosen, order = [0] * len(offers), list[int]()
        asked: dict[str, list[int]] = {}  # source that drafts when it is chosen -> requests, and tokens for them
        # (minus the chance that the request's next row is reached and accepted, the request)
        heap = [(-offer.gains[0], i) for i, offer in enumerate(offers) if offer is not None]
        heapq.heapify(heap)
        rows_s = self.rows_s
        tokens, rows, pass_s, took = self.sure, 0.0, rows_s[0], rows_s[0]
        # count of tokens, rows, seconds of the pass, with the drafting; tokens a second
        best = 0, rows, pass_s, took, (0.0 if least and heap else tokens / took)
        while heap:
            minus_gain, i = heap[0]
            offer = offers[i]
            assert offer is not None
            n, at = chosen[i], len(order)
            row = 1.0 if offer.rows is None else offer.rows[n]
            tokens -= minus_gain
            rows += row
            pass_s += row * (rows_s[at + 1] - rows_s[at])
            chosen[i] = n + 1
            order.append(i)
            took = pass_s
            if offer.draft is None:
                drafts = asked.setdefault(offer.source, [0, 0])
                drafts[0] += not n
                drafts[1] += 1
            for source, drafts in asked.items():
                took += self.costs.draft(source, drafts[1], drafts[0])
            if tokens > best[4] * took and at + 1 >= least:
                best = at + 1, rows, pass_s, took, tokens / took
            if n + 1 < len(offer.gains):
                heapq.heapreplace(heap, (-offer.gains[n + 1], i))
            else:
                heapq.heappop(heap)
        return _Plan(offers, order[: best[0]], *best[1:])

    def choices(self, plan: _Plan) -> list[Choice]:
        """What the plan means for each request. Drafts may go on beyond it while rows cost about the same."""
        counts = plan.counts()
        worth = max(_NOTHING, plan.rate * (plan.pass_s - self.rows_s[0]) / plan.rows) if plan.rows else _NOTHING
        asked = [offer.source for offer, n in zip(plan.offers, counts, strict=True) if offer is not None and n]
        stretch = len(plan.order)
        while stretch + 1 < len(self.rows_s) and self.worth(plan.rate, stretch) <= 2.0 * worth:
            stretch += 1
        choices = []
        for offer, n in zip(plan.offers, counts, strict=True):
            if offer is None or not n:
                choices.append(Choice())
            else:  # a further pass of the drafter serves all requests that it drafts for
                step = self.step(plan.rate, offer) / asked.count(offer.source)
                choices.append(
                    Choice(offer, n, worth, step, min(2 * n + 1, n + stretch - len(plan.order), len(offer.gains)))
                )
        return choices

    def worth(self, rate: float, rows: int = 0) -> float:
        """Expected tokens that one more row than so many of drafts has to bring."""
        return max(_NOTHING, rate * (self.rows_s[rows + 1] - self.rows_s[rows]))

    def step(self, rate: float, offer: Offer) -> float:
        """Expected tokens that a further pass of the offer's source has to bring."""
        return rate * self.costs.step(offer.source)
