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
drafts cost nothing are judged every round by what they would have guessed; others are tried again, ever more rarely,
where they did not pay.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .costs import Costs
from .evidence import Evidence
from .types import Draft

MAX_DRAFT = 15  # with the pending token 16 rows: the width that kernels are built for
FIXED_DRAFT = 4  # length for the rejection and block rules
_ANCHOR_EVERY = 128  # rounds with drafts between two measurements of the plain round
_PROBE_SHARE = 0.01  # of the tokens per second may be spent on trying sources that do not promise to pay
_PROBE_NEW = 2  # tokens of a first draft
_PROBE_EVERY = 8, 1024  # ... but not more often, nor more seldom, in rounds


@dataclass(slots=True)
class Offer:
    """What a source can do for a request. gains[i]: the chance that draft token i is reached and accepted.

    draft: the tokens, from a source whose drafts cost nothing; None from one that drafts when it is chosen. main: the
    source that requests with a fixed draft take.
    """

    source: str
    gains: Sequence[float]
    draft: Draft | None = None
    main: bool = True


@dataclass(slots=True)
class Ask:
    """A request that can use a draft of at most `most` tokens, and what its sources offer, the main one first."""

    evidence: Evidence
    most: int
    offers: list[Offer]


@dataclass(slots=True)
class Choice:
    """One offer and its length. None: no draft. worth: a token that is reached and accepted with a smaller chance than
    this is not worth its row; 0.0 where the length is fixed. fallback: an offer whose draft is there already, for the
    case that the chosen source comes to nothing."""

    offer: Offer | None = None
    length: int = 0
    worth: float = 0.0
    fallback: Offer | None = None

    @property
    def asks(self) -> str:
        """The source that has to draft now; "" for none."""
        return self.offer.source if self.offer is not None and self.offer.draft is None and self.length else ""

    @property
    def draft(self) -> Draft:
        """What is there already: the chosen draft, or the fallback of one that has to be made."""
        ready = self.fallback if self.asks else self.offer
        return ready.draft.cut(self.length) if ready is not None and ready.draft is not None else Draft()


class Controller:
    """Shares the rows of a pass between requests. One per target and its drafters."""

    def __init__(self, fixed: int | None = None, shape: Mapping[int, float] | None = None) -> None:
        """fixed: always draft this many tokens (0 .. 15) from the main source instead of deciding by evidence.
        shape: T(rows) / T(1), see costs.py."""
        self.fixed = fixed
        self.costs = Costs(shape)
        self.evidence = Evidence()
        self._since_plain: dict[int, int] = {}  # rows without drafts -> rounds with since that pass was measured
        self._idle = 0  # rounds in which no source that costs something was chosen

    def track(self) -> Evidence:
        """The evidence of a new request."""
        return Evidence(self.evidence)

    def choose(self, asks: Sequence[Ask], rows: int = 0, others: int = 0) -> list[Choice]:
        """A choice for each request. rows: of the pass that belong to other requests, `others` in number."""
        choices = [self._steady(ask) for ask in asks]
        free = [i for i, ask in enumerate(asks) if not self._is_steady(ask)]
        base = rows + len(asks) + sum(choice.length for choice in choices)
        for i, choice in zip(free, self._by_evidence(base, [asks[i] for i in free], others + len(asks)), strict=True):
            choices[i] = choice
            if choice.asks:
                ready = [offer for offer in asks[i].offers if offer.draft is not None and offer.gains]
                choice.fallback = max(ready, key=lambda offer: sum(offer.gains[: choice.length]), default=None)
        return choices

    def _is_steady(self, ask: Ask) -> bool:
        return self.fixed is not None or ask.evidence.steady

    def _steady(self, ask: Ask) -> Choice:
        length = FIXED_DRAFT if self.fixed is None else self.fixed
        if not self._is_steady(ask) or not ask.offers or not ask.offers[0].main:
            return Choice()
        main = ask.offers[0]
        return Choice(main, min(length, ask.most, len(main.gains)))

    def _by_evidence(self, base: int, asks: Sequence[Ask], sure: int) -> list[Choice]:
        """base: rows of the pass without these drafts; sure: the tokens it emits without any draft."""
        none = [Choice() for _ in asks]
        if not any(offer.gains for ask in asks for offer in ask.offers):
            return none
        if not self.costs.knows(base) or self._since_plain.get(base, 0) >= _ANCHOR_EVERY:
            self._since_plain[base] = 0
            return none
        choices, rate = self._best(base, sure, asks)
        if any(choice.length for choice in choices):
            self._since_plain[base] = self._since_plain.get(base, 0) + 1
        return self._probe(base, sure, asks, choices, rate)

    def _probe(
        self, base: int, sure: int, asks: Sequence[Ask], choices: list[Choice], best_rate: float
    ) -> list[Choice]:
        """Now and then tries a source that costs something and was not chosen for long: the nearer it came to paying,
        the sooner."""
        if any(choice.asks for choice in choices):
            self._idle = 0
            return choices
        self._idle += 1
        if self._idle < _PROBE_EVERY[0]:
            return choices
        costly = [(i, offer) for i, ask in enumerate(asks) for offer in ask.offers if offer.draft is None]
        if not costly:
            return choices
        costs = self.costs.passes(base, base + max(len(offer.gains) for _, offer in costly))
        trials = [(*self._prefix(offer, sure, costs), i, offer) for i, offer in costly if offer.gains]
        rate, length, i, offer = max(trials, key=lambda trial: trial[0])
        # Tokens that the best choice would have emitted in the time, and this one is not expected to.
        lost = (best_rate - rate) * (costs[length] + length * self._token_s(offer))
        patience = min(_PROBE_EVERY[1], lost / (_PROBE_SHARE * sure))
        if self._idle >= patience or self.costs.is_new(offer.source):
            self._idle = 0
            choices[i] = Choice(offer, length)
        return choices

    def _best(self, base: int, sure: int, asks: Sequence[Ask]) -> tuple[list[Choice], float]:
        """The choices with the most expected tokens per second, and how many these are."""
        most = sum(max((len(offer.gains) for offer in ask.offers), default=0) for ask in asks)
        costs = self.costs.passes(base, base + most)
        picked = [self._pick(ask, sure, costs) for ask in asks]
        chosen, order, spent = [0] * len(asks), [], 0.0
        # (minus the chance that the request's next row is reached and accepted, the request)
        heap = [(-offer.gains[0], i) for i, offer in enumerate(picked) if offer is not None]
        heapq.heapify(heap)
        expected = float(sure)
        best_rate, best_count, drafting = expected / costs[0], 0, [0.0]
        while heap:
            minus_gain, i = heapq.heappop(heap)
            offer = picked[i]
            assert offer is not None
            expected -= minus_gain
            chosen[i] += 1
            order.append(i)
            spent += self._token_s(offer)
            drafting.append(spent)
            rate = expected / (costs[len(order)] + spent)
            if rate > best_rate:
                best_rate, best_count = rate, len(order)
            if chosen[i] < self._most(offer):
                heapq.heappush(heap, (-offer.gains[chosen[i]], i))
        if not best_count:
            return [Choice() for _ in asks], best_rate
        last = costs[best_count] - costs[0] + drafting[best_count]
        worth = best_rate * last / best_count  # of an average row
        counts = [order[:best_count].count(i) for i in range(len(asks))]
        choices = [
            Choice(offer, n, worth) if offer is not None and n else Choice()
            for offer, n in zip(picked, counts, strict=True)
        ]
        return choices, best_rate

    def _most(self, offer: Offer) -> int:
        """Tokens of the offer that may be drafted: until a source's cost is known, few."""
        new = offer.draft is None and self.costs.is_new(offer.source)
        return min(len(offer.gains), _PROBE_NEW) if new else len(offer.gains)

    def _token_s(self, offer: Offer) -> float:
        return 0.0 if offer.draft is not None else self.costs.draft(offer.source)

    def _pick(self, ask: Ask, sure: int, costs: Sequence[float]) -> Offer | None:
        """The offer that alone gives the pass the most tokens per second, None without any."""
        rates = [(self._prefix(offer, sure, costs)[0], -i) for i, offer in enumerate(ask.offers) if offer.gains]
        return ask.offers[-max(rates)[1]] if rates else None

    def _prefix(self, offer: Offer, sure: int, costs: Sequence[float]) -> tuple[float, int]:
        """The best tokens per second of a pass with this draft alone, one token at least; and its length."""
        expected, token_s, best = float(sure), self._token_s(offer), (0.0, 0)
        for k, gain in enumerate(offer.gains[: self._most(offer)], start=1):
            expected += gain
            rate = expected / (costs[k] + k * token_s)
            if rate > best[0]:
                best = rate, k
        return best
