"""What is drafted before a pass: the offers of all sources, the controller's choice among them, the drafts it asks for.

Neighbours: decode.py verifies what comes of it, controller.py chooses, evidence.py and costs.py learn from it. Whatever
a drafter does, it must not cost an answer: what it makes is checked, and one that fails is left out.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from .controller import Ask, Choice, Controller, Offer
from .drafters.base import Drafter, State, Want, drafts_of
from .evidence import Evidence
from .types import Constraint, Draft, OutpaceError, SampleOpts, UsageError


class Drafting(Protocol):
    """What drafting knows of a request. without: drafters that failed for it. drafted_by: the source that costs
    something and drafted for it in the last round, "" for none."""

    state: State
    opts: SampleOpts
    evidence: Evidence
    without: set[str]
    drafted_by: str

    def fail(self, error: Exception) -> None:
        """Ends the request with an error of its own."""

    def may_use(self, drafter: Drafter) -> bool:
        """Whether this drafter may draft for it now."""


@dataclass(slots=True)
class Proposal:
    """A request's draft for the pass, and what can be learned once its tokens are known.

    made: what a source that costs something drafted when it was chosen; it could have been `asked` tokens; the
    first `verified` were worth their rows. offered: drafts of free sources, chosen or not.
    """

    draft: Draft = field(default_factory=Draft)
    made: Draft | None = None
    asked: int = 0
    verified: int = 0
    offered: list[Draft] = field(default_factory=list)

    def learn(self, evidence: Evidence, emitted: Sequence[int]) -> None:
        """Counts what became of the drafts: the text went on with these tokens."""
        if self.made is not None:
            evidence.observe(self.made, emitted, asked=self.asked, verified=self.verified)
        for draft in self.offered:
            evidence.observe(draft, emitted)


class Proposer:
    """Drafts for the requests of one decoder. drafters: the main one first."""

    def __init__(self, drafters: Sequence[Drafter], controller: Controller, vocab_size: int) -> None:
        self._drafters, self._controller, self._vocab_size = drafters, controller, vocab_size

    def propose(
        self, requests: Sequence[Drafting], limits: Sequence[int], rows: int = 0, others: int = 0
    ) -> list[Proposal]:
        """The proposal of each request, of at most so many tokens. rows, others: see Controller.choose."""
        began = time.perf_counter()
        proposals = [Proposal() for _ in requests]
        if all(not drafter.free and self._rests(drafter, requests) for drafter in self._drafters):
            self._controller.skip()  # nothing is looked at: the rest of this would take a hundredth of a pass
            for request in requests:
                request.drafted_by = ""
            return proposals
        asks = [Ask(request.evidence, most, []) for request, most in zip(requests, limits, strict=True)]
        self._offer(requests, asks, proposals)
        choices = self._controller.choose(asks, rows, others)
        made = self._draft_chosen(requests, choices, proposals, began)
        for proposal, (offer, length) in zip(
            proposals, self._controller.settle(asks, choices, made, rows, others), strict=True
        ):
            if offer is not None and offer.draft is not None:
                proposal.draft = offer.draft.cut(length)
                proposal.verified = len(proposal.draft) if offer.draft is proposal.made else 0
        for request, proposal in zip(requests, proposals, strict=True):
            try:
                proposal.draft = _allowed(proposal.draft, request.opts.constraint)
            except Exception as error:
                request.fail(error)
        return proposals

    def _rests(self, drafter: Drafter, requests: Sequence[Drafting]) -> bool:
        return all(self._controller.rests(request.evidence, drafter.name) for request in requests)

    def _offer(self, requests: Sequence[Drafting], asks: Sequence[Ask], proposals: Sequence[Proposal]) -> None:
        """First step: what each source could do, the main one first. Drafts that cost nothing are made here."""
        for drafter in self._drafters:
            main = drafter is self._drafters[0]
            able = [i for i, ask in enumerate(asks) if ask.most and requests[i].may_use(drafter)]
            if drafter.free:
                drafts = self._draft(drafter, [(requests[i], Want(requests[i].state, asks[i].most)) for i in able])
                for i, draft in zip(able, drafts, strict=True):
                    if draft is not None:
                        proposals[i].offered.append(draft)
                        asks[i].offers.append(_made(draft, asks[i].evidence, main))
            else:
                for i in able:
                    if self._controller.rests(asks[i].evidence, drafter.name):
                        continue
                    gains = asks[i].evidence.gains(drafter.name, asks[i].most)
                    rows = asks[i].evidence.rows(drafter.name, len(gains))
                    asks[i].offers.append(Offer(drafter.name, gains, main=main, rows=rows))

    def _draft_chosen(
        self, requests: Sequence[Drafting], choices: Sequence[Choice], proposals: Sequence[Proposal], began: float
    ) -> list[Offer | None]:
        """Third step: the drafts of chosen sources that cost something; None for requests without. Timed since `began`:
        a small model's pass is short enough for the choosing to count."""
        made: list[Offer | None] = [None] * len(requests)
        for drafter in self._drafters:
            chosen = [i for i, choice in enumerate(choices) if choice.asks == drafter.name]
            if not chosen:
                continue
            wanted = [(requests[i], _want(requests[i], choices[i])) for i in chosen]
            # A source that did not draft in the last round has first to read what came since.
            behind = any(requests[i].drafted_by != drafter.name for i in chosen)
            found = self._draft(drafter, wanted)
            now = time.perf_counter()
            seconds, began = now - began, now
            self._controller.spend(drafter.name, seconds)
            drafts = {i: draft for i, draft in zip(chosen, found, strict=True) if draft is not None}
            if len(drafts) == len(chosen):  # of drafts that failed neither their time nor their tokens say anything
                tokens = max(1, sum(map(len, drafts.values())))  # a draft that came to nothing took its time, too
                depth = max(1, *(max(draft.depths(), default=0) for draft in drafts.values()))
                self._controller.costs.add_draft(
                    drafter.name, tokens, seconds, depth=depth, requests=len(chosen), behind=behind
                )
            for i, draft in drafts.items():
                made[i] = _made(draft, requests[i].evidence)
                proposals[i].made, proposals[i].asked = draft, choices[i].length
                if draft.confidence is not None:
                    # A source that knows how sure it is could have gone on, and said by not doing so that it was not.
                    proposals[i].asked = max(choices[i].length, choices[i].stretch)
        for request, choice in zip(requests, choices, strict=True):
            request.drafted_by = choice.asks
        return made

    def _draft(self, drafter: Drafter, wanted: Sequence[tuple[Drafting, Want]]) -> list[Draft | None]:
        """What the drafter proposes, checked. Where it fails (None) it is left out from here on for that request; for
        all of them where it fails as a whole."""
        name = drafter.name
        try:
            proposed = list(drafter.propose([want for _, want in wanted]))
            if len(proposed) != len(wanted):
                raise UsageError(f"it made {len(proposed)} drafts where {len(wanted)} were wanted")
        except Exception as error:
            leave_out(name, [request for request, _ in wanted], error)
            return [None] * len(wanted)
        drafts: list[Draft | None] = [None] * len(wanted)
        for i, (request, want) in enumerate(wanted):
            try:
                (draft,) = drafts_of(proposed[i : i + 1])
                draft = draft.cut(max(want.most, want.stretch)).checked(self._vocab_size)
                if draft.parents is not None and request.opts.rule == "block" and request.evidence.steady:
                    raise UsageError("block verification is defined for chains, and it drafted a tree")
                drafts[i] = replace(draft, source=name)
            except Exception as error:
                leave_out(name, [request], error)
        return drafts


def leave_out(name: str, requests: Sequence[Drafting], error: Exception) -> None:
    """These requests go on without the drafter."""
    for request in requests:
        request.without.add(name)
    why = str(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {error}"
    message = f"drafter {name} failed and is left out for this request: {why}"
    if sys.version_info >= (3, 12):  # it points to the caller's line, however deep in here it happened
        warnings.warn(message, skip_file_prefixes=(f"{Path(__file__).parent}{os.sep}",), stacklevel=2)
    else:  # ... or to the line that left the drafter out
        warnings.warn(message, stacklevel=2)


def _made(draft: Draft, evidence: Evidence, main: bool = True) -> Offer:
    """A draft that is there already, judged by how sure its source is, or else by place."""
    if draft.confidence is not None:
        chances = evidence.by_confidence(draft.source, draft.confidence)
    else:
        chances = evidence.by_place(draft.source, len(draft))
    if draft.parents is None:
        return Offer(draft.source, list(itertools.accumulate(chances, operator.mul)), draft, main)
    gains: list[float] = []
    for node, (parent, depth) in enumerate(zip(draft.parents, draft.depths(), strict=True)):
        # Without confidences siblings share the chance of their place.
        chance = chances[node] if draft.confidence is not None else chances[depth - 1] / draft.parents.count(parent)
        gains.append(chance if parent < 0 else gains[parent] * chance)
    return Offer(draft.source, gains, draft, main)


def _want(request: Drafting, choice: Choice) -> Want:
    chances = partial(request.evidence.by_confidence, choice.asks) if choice.worth else None
    return Want(request.state, max(choice.trial, choice.length), choice.stretch, choice.worth, choice.step, chances)


def _allowed(draft: Draft, constraint: Constraint | None) -> Draft:
    """What the constraint lets through of the draft: a chain's beginning, of a tree the nodes whose path it allows.

    Raises UsageError for a count that makes no sense.
    """
    if constraint is None:
        return draft

    def allowed(tokens: tuple[int, ...]) -> int:
        count = constraint.cut(tokens)
        if not isinstance(count, int) or not 0 <= count <= len(tokens):
            raise UsageError(f"constraint.cut must return a whole number in 0 .. {len(tokens)}, got {count!r}")
        return count

    if draft.parents is None:
        return draft.cut(allowed(draft.tokens))
    paths = [draft.path(node) for node in range(len(draft))]
    return draft.keep([node for node, path in enumerate(paths) if allowed(path) == len(path)])
