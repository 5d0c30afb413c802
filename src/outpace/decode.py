"""The loop. One round: draft, one target pass over all rows, verify, commit.

    drafter.propose -> Draft -> target.forward -> sampling rows -> verify -> Verdict -> target.commit

Every active request takes part in every round: one that still reads its prompt brings a chunk of it, one that decodes
brings the token emitted last and the draft that follows it (proposing.py). Both are one pass. A request's tokens depend
on its prompt, options and seed alone; drafts, company and controller only decide how many of them a round yields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from . import verify
from .backends.base import Backend, Pass, Rows
from .controller import FIXED_DRAFT, MAX_DRAFT, Controller
from .drafters.base import Drafter, FeatureDrafter, State
from .evidence import Evidence
from .proposing import Proposal, Proposer, leave_out
from .sampling import Sampler
from .types import F32, Draft, Round, SampleOpts, Stats, TokenLogprobs, UsageError, Verdict

_FEATURES_HELD = 128  # tokens whose hidden states wait until a drafter reads them, whether it drafts or not


class TextSink(Protocol):
    """Turns emitted tokens into text and watches for stop strings (text/stream.py)."""

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Takes one token; True when a stop string is complete: the text ends before it."""

    def finish(self) -> None:
        """No more tokens: releases what was held back."""


@dataclass(eq=False, slots=True)
class Request:
    """One answer in the making.

    tokens: prompt and emitted tokens. slot: the target's. read: how many of `tokens` the slot holds.
    limit: most tokens to emit. finish: "" while running, then "stop" (end token, stop token or stop string),
    "length", "cancelled" or "error" (error says which). taps: wanted hidden states; tapped[t] collects one float32 row
    per token read. known: the prompt's first tokens for which they need not be there. evidence: how its drafts fare.
    without: drafters that failed for it. drafted_by: the source of the last round's draft, where it was one that costs
    something.
    """

    prompt: tuple[int, ...]
    opts: SampleOpts
    sampler: Sampler
    limit: int
    end_tokens: frozenset[int] = frozenset()
    text: TextSink | None = None
    taps: tuple[int, ...] = ()
    known: int = 0
    speculate: bool = True
    most_drafted: int = MAX_DRAFT
    evidence: Evidence = field(default_factory=Evidence)
    slot: int = -1
    read: int = 0
    finish: str = ""
    error: Exception | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tapped: dict[int, list[F32]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    without: set[str] = field(default_factory=set)
    drafted_by: str = ""
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.state = State(self.tokens, self.sampler)
        self.stats.prompt_tokens = len(self.prompt)
        self.evidence.steady = self.opts.rule != "match" and bool(self.opts.temperature)

    def begin(self, slot: int, read: int) -> None:
        """Gives the request its slot, which already holds the prompt's first `read` tokens."""
        self.slot, self.read = slot, read
        self.state.features.start = read
        self.stats.cached_prompt_tokens = read

    @property
    def output(self) -> list[int]:
        """Emitted tokens, an end token included."""
        return self.tokens[len(self.prompt) :]

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def may_use(self, drafter: Drafter) -> bool:
        """Whether this drafter may draft for it now. One that reads hidden states begins after the answer's first
        token, whether or not the prompt's are there: rules whose answers depend on the rounds must not depend on what
        the slots still held."""
        return drafter.name not in self.without and (self.emitted > 0 or not getattr(drafter, "taps", ()))

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error of its own (NaN logits, a constraint that raises): others go on."""
        self.finish, self.error = "error", error

    def emit(self, token: int) -> bool:
        """Appends one token; True when the answer ends with it."""
        self.tokens.append(token)
        self.sampler.extend((token,))
        self.stats.tokens += 1
        stopped = token in self.opts.stop_tokens
        if token in self.end_tokens:
            stopped = stopped or not self.opts.ignore_eos
        elif self.text is not None:
            late = self.emitted >= (self.opts.min_tokens or 0)
            stopped = self.text.push(token, may_stop=late) or stopped
        if stopped:
            self.finish = "stop"
        elif self.emitted >= self.limit:
            self.finish = "length"
        if self.finish and self.text is not None:
            self.text.finish()
        return bool(self.finish)


@dataclass(slots=True)
class _Share:
    """One request's part of a pass: tokens to read, then a draft (empty while the prompt is not read to its end)."""

    request: Request
    reading: list[int]
    proposal: Proposal = field(default_factory=Proposal)

    @property
    def draft(self) -> Draft:
        return self.proposal.draft

    @property
    def decodes(self) -> bool:
        return self.request.read + len(self.reading) == len(self.request.tokens)

    def rows(self) -> Rows:
        first = len(self.reading) - 1  # the row whose logits follow the context
        draft = self.draft
        parents = None
        if draft.parents is not None:
            parents = [*range(-1, first), *(first if p < 0 else len(self.reading) + p for p in draft.parents)]
        wanted = range(first, first + 1 + len(draft)) if self.decodes else ()
        return Rows(self.request.slot, [*self.reading, *draft.tokens], parents, wanted)


class Decoder:
    """Runs rounds for any number of requests on one target.

    drafters: where drafts come from, the main one first (rules that need a fixed source take it alone); without any
    it decodes plainly: the same tokens, one a round. total: what all requests came to, each pass counted once.
    """

    def __init__(self, target: Backend, drafters: Sequence[Drafter] = (), controller: Controller | None = None) -> None:
        self.target = target
        self.drafters = tuple(drafters)
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) < len(names):
            raise UsageError(f"drafters are told apart by their names, got {', '.join(names)}")
        readers = [drafter for drafter in self.drafters if isinstance(drafter, FeatureDrafter)]
        if len(readers) > 1:
            raise UsageError(f"one drafter can read hidden states, got {', '.join(each.name for each in readers)}")
        self.controller = controller or Controller()
        self.reader = readers[0] if readers and self.controller.fixed != 0 else None  # 0: it will never be asked
        self.total = Stats()
        self._proposer = Proposer(self.drafters, self.controller, target.config.vocab_size)
        # Each request has its row and room for a short draft, however much of a prompt another one brings: rules that
        # draft a fixed length must not depend on company.
        self._reserve = max(FIXED_DRAFT, self.controller.fixed or 0) if self.drafters else 0
        self.most = max(1, target.capacity.rows // (1 + self._reserve))  # requests in a pass

    def begin(self, request: Request, slot: int, held: int) -> None:
        """Gives the request its slot, which holds the prompt's first `held` tokens. A drafter that reads hidden states
        may need those of some of them, which are then read again."""
        if self.reader is not None and request.speculate:
            try:
                needed = self.reader.begin(request.state, held)
                if not 0 <= needed <= held:
                    raise UsageError(f"of {held} tokens it cannot hold {needed}")
                if needed < held:
                    self.target.truncate(slot, needed)
                    held = needed
            except Exception as error:  # whatever a drafter does, it must not cost the answer
                leave_out(self.reader.name, [request], error)
        request.begin(slot, held)

    def round(self, requests: Sequence[Request]) -> None:
        """One pass for all these running requests; afterwards each has read or emitted something.

        At most `most` requests. What goes wrong with one request alone ends that request (`Request.error`); what goes
        wrong with the pass is raised, and the requests are as before then.
        """
        start = time.perf_counter()
        shares = self._read(requests)
        self._absorb(requests)
        self._propose(shares)
        drafted_at = time.perf_counter()
        taps = tuple(sorted({tap for r in requests for tap in (*r.taps, *self._feature_taps(r))}))
        batch = [share.rows() for share in shares]
        result = self.target.forward(batch, taps)
        passed_at = time.perf_counter()
        emitted = [share.request.emitted for share in shares]
        first_logits = first_row = 0
        for share, rows in zip(shares, batch, strict=True):
            count = len(share.draft) + 1 if share.decodes else 0
            try:
                if not share.request.finish:
                    self._settle(share, result.logits[first_logits : first_logits + count], result, first_row)
            except Exception as error:
                share.request.fail(error)
            first_logits += count
            first_row += len(rows.tokens)
        done = time.perf_counter()
        decoding = all(len(share.reading) == 1 for share in shares)
        self.controller.costs.add_pass(first_row, passed_at - drafted_at, reading=not decoding)
        tokens = [share.request.emitted - before for share, before in zip(shares, emitted, strict=True)]
        asked = [(share, n) for share, n in zip(shares, tokens, strict=True) if share.proposal.verified and n]
        self.controller.earn([(share.draft.source, len(share.draft), n - 1) for share, n in asked])
        self.total.tokens += sum(tokens)
        shared = [(self.total, all(len(share.reading) > 1 for share in shares), sum(tokens))]
        for share, n in zip(shares, tokens, strict=True):
            shared.append((share.request.stats, len(share.reading) > 1, n))
        for stats, reads, n in shared:
            if reads:
                stats.prefill_s += done - start
            else:
                stats.draft_s += drafted_at - start
                stats.forward_s += passed_at - drafted_at
                stats.verify_s += done - passed_at
                stats.decode_s += done - start
                stats.decode_tokens += n

    # -- before the pass

    def _read(self, requests: Sequence[Request]) -> list[_Share]:
        """Hands out the rows of the pass: one and the reserve to every request, the rest to prompts in order."""
        budget = max(0, self.target.capacity.rows - len(requests) * (1 + self._reserve))
        shares = []
        for request in requests:
            unread = len(request.tokens) - request.read
            extra = min(unread - 1, budget)
            budget -= extra
            shares.append(_Share(request, request.tokens[request.read : request.read + 1 + extra]))
        return shares

    def _feature_taps(self, request: Request) -> tuple[int, ...]:
        """Hidden states that a drafter reads of the request's tokens; () where none does."""
        if self.reader is None or not request.speculate or self.reader.name in request.without:
            return ()
        return self.reader.taps

    def _absorb(self, requests: Sequence[Request]) -> None:
        """Has long runs of features read now, so that they neither pile up nor delay the next draft for long."""
        full = [r for r in requests if self._feature_taps(r) and len(r.state.features) >= _FEATURES_HELD]
        if self.reader is None or not full:
            return
        for request in full:  # one by one: each fills a pass nearly, and one that fails is alone in it
            try:
                self.reader.absorb([request.state])
            except Exception as error:  # whatever a drafter does, it must not cost the answer
                leave_out(self.reader.name, [request], error)

    def _propose(self, shares: Sequence[_Share]) -> None:
        """Fills in the proposals of the shares that decode."""
        willing = [share for share in shares if share.decodes and share.request.speculate]
        if not willing or not self.drafters:
            return
        room = self.target.capacity.rows - sum(len(share.reading) for share in shares)
        limits = [self._limit(share.request, room // len(willing)) for share in willing]
        rows = sum(len(share.reading) for share in shares) - len(willing)
        others = len(shares) - len(willing)
        proposals = self._proposer.propose([share.request for share in willing], limits, rows, others)
        for share, proposal in zip(willing, proposals, strict=True):
            share.proposal = proposal

    def _limit(self, request: Request, room: int) -> int:
        """Most draft tokens that can be of use: each must leave a place for the token after it."""
        context = self.target.capacity.positions - len(request.tokens)
        return max(0, min(request.most_drafted, room, request.limit - request.emitted - 1, context))

    # -- after the pass

    def _settle(self, share: _Share, logits: F32, result: Pass, first_row: int) -> None:
        request, draft, read = share.request, share.draft, len(share.reading)
        kept: tuple[int, ...] = ()
        if share.decodes:
            verdict = decide(request.sampler, draft, logits)
            before = len(request.tokens)
            kept = self._emit(request, draft, verdict, logits)
            share.proposal.learn(request.evidence, request.tokens[before:])
            # Of a round that ended the answer early, only what the text holds stays: all but the last token.
        rows = [*range(read), *(read + i for i in kept)]
        self.target.commit(request.slot, rows)
        request.read += len(rows)
        at = [first_row + row for row in rows]
        for tap in request.taps:
            request.tapped.setdefault(tap, []).append(np.array(result.taps[tap][at]))
        if taps := self._feature_taps(request):
            together = at[-1] - at[0] == len(at) - 1
            part = slice(at[0], at[-1] + 1) if together else at  # a view where it can be
            request.state.features.append(*[result.taps[tap][part] for tap in taps])

    def _emit(self, request: Request, draft: Draft, verdict: Verdict, logits: F32) -> tuple[int, ...]:
        """Emits the verdict's tokens, up to the one that ends the answer; returns the draft tokens that stay read."""
        wants_logprobs = request.opts.logprobs is not None
        nodes = (verify.ROOT, *verdict.kept)
        tokens = (*(draft.tokens[i] for i in verdict.kept), verdict.next_token)
        before = request.emitted
        for node, token in zip(nodes, tokens, strict=True):
            if wants_logprobs:
                request.logprobs.append(request.sampler.logprobs(logits[node + 1], token))
            if request.emit(token):
                break
        emitted = request.emitted - before
        accepted = min(emitted, len(verdict.kept))
        depth = max(draft.depths(), default=0)
        request.rounds.append(Round(len(draft), accepted, draft.source if len(draft) else "", depth))
        for stats in (request.stats, self.total):
            stats.count(request.rounds[-1])
        return verdict.kept[: emitted - 1]


def decide(sampler: Sampler, draft: Draft, logits: F32) -> Verdict:
    """Applies the request's rule. logits: float32 [len(draft) + 1, vocab_size], row i + 1 follows draft token i."""

    def ahead(row: int) -> tuple[int, ...]:
        return draft.path(row - 1)

    rule = sampler.opts.rule
    if rule == "match" or not sampler.opts.temperature:
        return verify.match(draft, lambda row: sampler.token(logits[row], ahead(row)))
    law: Callable[..., Verdict] = {"rejection": verify.rejection, "block": verify.block}[rule]
    return law(draft, lambda row: sampler.row(logits[row], ahead(row)), sampler.accept, sampler.residual)
