"""How many tokens to draft now: as many as raise the expected tokens per second, and none when none do.

A round that drafts k tokens emits 1 + sum over i <= k of (a_1 * ... * a_i) tokens in expectation, a_i being the chance
that draft token i is accepted once those before it were, and costs T(rows of the pass) + k * (cost of a draft token).
T, the draft's cost and the a_i are measured while decoding. Rows are handed out one by one, to the request whose next
row promises most (`Track.gains`), and the count with the best tokens per second wins. The choice never touches the
tokens themselves under the match rule; rules that only promise the distribution get a fixed length, so that a seed
repeats its answer.

Never slower than plain decoding needs two things to be known rather than guessed: the plain round itself, which is
therefore measured before the first draft and again now and then; and what a draft costs and gains today, which is
therefore tried again, ever more rarely, where drafts did not pay.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DRAFT = 15  # with the pending token 16 rows: the width that kernels are built for
FIXED_DRAFT = 4  # length for the rejection and block rules
_PRIOR_GAIN = 0.6  # acceptance of a draft token before anything is known
_PRIOR_WEIGHT = 1.0  # ... worth this many observations
_MEMORY = 0.97  # weight of old acceptance observations per new one
_ROW_PRIOR = 0.08  # T(rows) / T(1) - 1 per further row before it is measured
_ANCHOR_EVERY = 128  # rounds with drafts between two measurements of the plain round
_PROBE_FIRST, _PROBE_LAST = 16, 512  # rounds without drafts before one is tried again; doubles while it does not pay


@dataclass(slots=True)
class Track:
    """One request's acceptance by draft position: decayed counts of trials and successes.

    steady: its tokens depend on the length of its drafts, which is therefore always FIXED_DRAFT.
    gains[i]: chance that draft token i is accepted given that those before it are (the expected gain of a row).
    """

    steady: bool = False
    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT)
    kept: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT)
    gains: list[float] = field(default_factory=lambda: [_PRIOR_GAIN] * MAX_DRAFT)

    def observe(self, drafted: int, accepted: int) -> None:
        """A round drafted this many tokens in a chain and this many stayed."""
        reached = min(drafted, accepted + 1)
        gain = _PRIOR_GAIN
        for i in range(MAX_DRAFT):
            # What was not tried now is slowly forgotten, so that one bad start does not rule a position out for ever.
            self.tried[i] = self.tried[i] * _MEMORY + (i < reached)
            self.kept[i] = self.kept[i] * _MEMORY + (i < min(accepted, reached))
            # Positions that were seldom reached borrow from the one before: acceptance changes slowly along a draft.
            gain = (self.kept[i] + _PRIOR_WEIGHT * gain) / (self.tried[i] + _PRIOR_WEIGHT)
            self.gains[i] = gain


class Timing:
    """The last few timings of one thing. Its value is their lower median: an interrupted pass says nothing."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=7)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def value(self) -> float:
        return sorted(self._last)[(len(self._last) - 1) // 2] if self._last else 0.0


class Controller:
    """Shares the rows of a pass between requests. One per target and drafter; remembers the measured costs."""

    def __init__(self, fixed: int | None = None) -> None:
        """fixed: always draft this many tokens (0 .. 15) instead of deciding by evidence."""
        self.fixed = fixed
        self._passes: dict[int, Timing] = {}
        self._draft = Timing()
        self._since_plain: dict[int, int] = {}  # requests -> rounds with drafts since their plain round was measured
        self._idle = 0  # rounds without drafts
        self._patience = _PROBE_FIRST

    def lengths(self, tracks: Sequence[Track], limits: Sequence[int]) -> list[int]:
        """Draft length for each request, at most its limit. Expected tokens per second is at its maximum."""
        if self.fixed is not None:
            return [min(self.fixed, limit) for limit in limits]
        lengths = [min(FIXED_DRAFT, n) if track.steady else 0 for track, n in zip(tracks, limits, strict=True)]
        free = [i for i, track in enumerate(tracks) if not track.steady and limits[i] > 0]
        base = len(tracks) + sum(lengths)
        chosen = self._chosen(base, len(tracks), [tracks[i] for i in free], [limits[i] for i in free])
        for i, n in zip(free, chosen, strict=True):
            lengths[i] = n
        return lengths

    def _chosen(self, base: int, sure: int, tracks: Sequence[Track], limits: Sequence[int]) -> list[int]:
        """Lengths by evidence for requests that can use a draft. base: rows of the pass without, sure: its tokens."""
        none = [0] * len(tracks)
        if not tracks:
            return none
        if base not in self._passes or self._since_plain.get(base, 0) >= _ANCHOR_EVERY:
            self._since_plain[base] = 0
            return none
        best = self._best(base, sure, tracks, limits)
        if any(best):
            self._since_plain[base] = self._since_plain.get(base, 0) + 1
            if self._idle and self._idle < self._patience:
                self._patience = _PROBE_FIRST  # chosen by evidence, not as a probe
            self._idle = 0
            return best
        self._idle += 1
        if self._idle < self._patience:
            return none
        self._idle, self._patience = 0, min(2 * self._patience, _PROBE_LAST)
        ready = max(range(len(tracks)), key=lambda i: tracks[i].gains[0])
        return [min(2, limits[i]) if i == ready else 0 for i in range(len(tracks))]

    def _best(self, base: int, sure: int, tracks: Sequence[Track], limits: Sequence[int]) -> list[int]:
        costs = self._costs(base, base + sum(min(limit, MAX_DRAFT) for limit in limits))
        draft_s = self._draft.value
        chosen, order = [0] * len(tracks), []
        # (minus the chance that the request's next row is reached and accepted, the request)
        heap = [(-track.gains[0], i) for i, track in enumerate(tracks)]
        heapq.heapify(heap)
        expected = float(sure)
        best_rate, best_count = expected / costs[0], 0
        while heap:
            reach, i = heapq.heappop(heap)
            expected -= reach
            chosen[i] += 1
            order.append(i)
            rate = expected / (costs[len(order)] + draft_s * len(order))
            if rate > best_rate:
                best_rate, best_count = rate, len(order)
            if chosen[i] < min(limits[i], MAX_DRAFT):
                heapq.heappush(heap, (reach * tracks[i].gains[chosen[i]], i))
        return [order[:best_count].count(i) for i in range(len(tracks))]

    def pass_cost(self, rows: int) -> float:
        """Seconds of a pass with this many rows: measured, interpolated or scaled by the prior. In units of a one-row
        pass while nothing was measured at all."""
        return self._costs(rows, rows)[0]

    def _costs(self, first: int, last: int) -> list[float]:
        known = sorted((rows, timing.value) for rows, timing in self._passes.items())
        if not known:
            return [1.0 + _ROW_PRIOR * (rows - 1) for rows in range(first, last + 1)]
        costs, at = [], 0
        for rows in range(first, last + 1):
            while at < len(known) and known[at][0] < rows:
                at += 1
            if at < len(known) and known[at][0] == rows:
                costs.append(known[at][1])
            elif 0 < at < len(known):
                (low, low_s), (high, high_s) = known[at - 1], known[at]
                costs.append(low_s + (rows - low) / (high - low) * (high_s - low_s))
            else:
                near, near_s = known[at - 1] if at else known[0]
                costs.append(near_s * (1.0 + _ROW_PRIOR * (rows - 1)) / (1.0 + _ROW_PRIOR * (near - 1)))
        return costs

    def observe(self, rows: int, pass_s: float, drafted: int, draft_s: float) -> None:
        """A pass of decoding rows took pass_s seconds, its drafts draft_s."""
        self._passes.setdefault(rows, Timing()).add(pass_s)
        if drafted:
            self._draft.add(draft_s / drafted)
