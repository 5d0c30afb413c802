"""How many tokens to draft now: as many as raise the expected tokens per second, and none when none do.

A round that drafts k tokens emits 1 + sum over i <= k of (a_1 * ... * a_i) tokens in expectation, a_i being the chance
that draft token i is accepted once those before it were, and costs T(rows of the pass) + k * (cost of a draft token).
T, the draft's cost and the a_i are measured while decoding. Rows are handed out one by one, to the request whose next
row promises most (`Track.gains`), and the count with the best tokens per second wins. The choice never touches the
tokens themselves under the match rule; rules that only promise the distribution get a fixed length, so that a seed
repeats its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DRAFT = 15  # with the pending token 16 rows: the width that kernels are built for
FIXED_DRAFT = 4  # length for the rejection and block rules
_PRIOR_GAIN = 0.6  # acceptance of a draft token before anything is known
_PRIOR_WEIGHT = 2.0  # ... worth this many observations
_MEMORY = 0.95  # weight of old acceptance observations per new one
_RECOVERY = 0.97  # and per round without a draft: a drafter that failed is tried again
_ROW_PRIOR = 0.08  # T(rows) / T(1) - 1 per further row before it is measured
_SMOOTH = 0.15  # weight of a new timing


@dataclass(slots=True)
class Track:
    """One request's acceptance by draft position: decayed counts of trials and successes.

    gains[i]: chance that draft token i is accepted given that those before it are (the expected gain of a row).
    """

    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT)
    kept: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT)
    gains: list[float] = field(default_factory=lambda: [_PRIOR_GAIN] * MAX_DRAFT)

    def observe(self, drafted: int, accepted: int) -> None:
        """A round drafted this many tokens in a chain and this many stayed."""
        if not drafted:
            self.tried = [t * _RECOVERY for t in self.tried]
            self.kept = [k * _RECOVERY for k in self.kept]
        for i in range(min(drafted, accepted + 1, MAX_DRAFT)):
            self.tried[i] = self.tried[i] * _MEMORY + 1.0
            self.kept[i] = self.kept[i] * _MEMORY + (i < accepted)
        gain = _PRIOR_GAIN
        for i in range(MAX_DRAFT):
            # Positions that were seldom reached borrow from the one before: acceptance changes slowly along a draft.
            gain = (self.kept[i] + _PRIOR_WEIGHT * gain) / (self.tried[i] + _PRIOR_WEIGHT)
            self.gains[i] = gain


class Controller:
    """Shares the rows of a pass between requests. One per target and drafter; remembers the measured costs."""

    def __init__(self, fixed: int | None = None) -> None:
        """fixed: always draft this many tokens (0 .. 15) instead of deciding by evidence."""
        self.fixed = fixed
        self._pass_s: dict[int, float] = {}
        self._draft_s = 0.0

    def lengths(self, tracks: Sequence[Track], limits: Sequence[int]) -> list[int]:
        """Draft length for each request, at most its limit. Expected tokens per second is at its maximum."""
        if self.fixed is not None:
            return [min(self.fixed, limit) for limit in limits]
        chosen = [0] * len(tracks)
        best, best_rate = list(chosen), 0.0
        expected = float(len(tracks))
        # Chance that each request's next row is reached and accepted.
        reach = [track.gains[0] if limit > 0 else 0.0 for track, limit in zip(tracks, limits, strict=True)]
        rows = len(tracks)
        while True:
            rate = expected / (self.pass_cost(rows) + self._draft_s * sum(chosen))
            if rate > best_rate:
                best, best_rate = list(chosen), rate
            i = max(range(len(reach)), key=reach.__getitem__, default=0)
            if not reach or reach[i] <= 0.0:
                return best
            expected += reach[i]
            chosen[i] += 1
            rows += 1
            reach[i] *= tracks[i].gains[chosen[i]] if chosen[i] < min(limits[i], MAX_DRAFT) else 0.0

    def pass_cost(self, rows: int) -> float:
        """Seconds of a pass with this many rows: measured, interpolated or scaled by the prior. In units of a one-row
        pass while nothing was measured at all."""
        known = self._pass_s
        if rows in known:
            return known[rows]
        if not known:
            return 1.0 + _ROW_PRIOR * (rows - 1)
        below = max((r for r in known if r < rows), default=None)
        above = min((r for r in known if r > rows), default=None)
        if below is not None and above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        near = below if below is not None else above
        assert near is not None
        return known[near] * (1.0 + _ROW_PRIOR * (rows - 1)) / (1.0 + _ROW_PRIOR * (near - 1))

    def observe(self, rows: int, pass_s: float, drafted: int, draft_s: float) -> None:
        """A pass of decoding rows took pass_s seconds, its drafts draft_s."""
        old = self._pass_s.get(rows)
        # A pass that the machine interrupted says nothing about the next one: bound what one timing can do.
        self._pass_s[rows] = pass_s if old is None else old + _SMOOTH * (min(pass_s, 2.0 * old) - old)
        if drafted:
            each = draft_s / drafted
            self._draft_s += _SMOOTH * (min(each, 2.0 * self._draft_s) - self._draft_s) if self._draft_s else each
