"""What passes and drafts cost on this machine: measured while decoding, between and beyond by known shapes.

Neighbours: controller.py decides by these figures, decode.py reports what it saw; `measure_shape` is run once a model
and machine, and the shape kept (opening.py). Seconds are whatever clock the decoder uses.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from .backends.base import Backend, Rows
from .json_file import write_json
from .types import CapacityError

_ROW_PRIOR = 0.08  # T(rows) / T(1) - 1 per further row where nothing is known
_SHAPE_ROWS = (1, 2, 4, 8, 12, 16)
_STALE = 512  # passes after which a timing that was not renewed is forgotten


class Timing:
    """The last few timings of one thing. Its value is their lower median: an interrupted pass says nothing."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=5)
        self.value = 0.0
        self.when = 0  # passes before the latest one

    def add(self, seconds: float, when: int = 0) -> None:
        if when - self.when >= _STALE:  # whatever the machine did then, it may do something else now
            self._last.clear()
        self._last.append(seconds)
        self.value = sorted(self._last)[(len(self._last) - 1) // 2]
        self.when = when

    @property
    def count(self) -> int:
        return len(self._last)


class Line:
    """Seconds over a count, from timings at some counts: the line that fits best, through the newest timing.

    A draft costs a part that is there in any case and a part for each step, both 0 or more: a model that drafts token
    by token has hardly anything but the second, a head that guesses a block at once only the first. While one count
    alone was timed the first part is 0.
    """

    def __init__(self) -> None:
        self._timings: dict[int, Timing] = {}
        self.start = self.slope = 0.0

    def add(self, n: int, seconds: float, now: int) -> None:
        """One timing at n >= 1; now: passes so far."""
        timings = self._timings
        timings.setdefault(n, Timing()).add(seconds, now)
        for old in sorted(timings, key=lambda k: timings[k].when)[:-2]:
            if now - timings[old].when >= _STALE:
                del timings[old]
        weights = [(k, timing.value, timing.count) for k, timing in timings.items()]
        total = sum(count for _, _, count in weights)
        mean_n = sum(k * count for k, _, count in weights) / total
        mean = sum(value * count for _, value, count in weights) / total
        spread = sum(count * (k - mean_n) ** 2 for k, _, count in weights)
        slope = (
            sum(count * (k - mean_n) * (value - mean) for k, value, count in weights) / spread if spread else math.inf
        )
        slope = min(max(slope, 0.0), mean / mean_n)
        start = mean - slope * mean_n
        # The line's form is as old as its oldest timing; its level is the newest's.
        level = timings[n].value / (start + slope * n) if start + slope * n > 0.0 else 0.0
        self.start, self.slope = level * start, level * slope

    def at(self, n: float) -> float:
        return self.start + self.slope * n


class _DraftCost:
    """What drafts of one source cost: by tokens, for each number of requests drafted for at once, and by depth."""

    def __init__(self) -> None:
        self.count = 0
        self.by_tokens: dict[int, Line] = {}
        self.by_depth = Line()

    def add(self, tokens: int, depth: int, requests: int, seconds: float, now: int) -> None:
        self.count += 1
        self.by_tokens.setdefault(requests, Line()).add(tokens, seconds, now)
        self.by_depth.add(depth, seconds, now)

    def at(self, tokens: int, requests: int) -> float:
        line = self.by_tokens.get(requests)
        if line is None:
            # As for the nearest number of requests, each with as many tokens: they share the drafter's passes.
            nearest = min(self.by_tokens, key=lambda known: abs(known - requests))
            return self.by_tokens[nearest].at(tokens * nearest / requests)
        return line.at(tokens)


class Costs:
    """Seconds of a pass by its rows, and of a draft by its source and length.

    shape: rows -> T(rows) / T(1), as measure_shape found it; only its ratios count, because a machine that was quiet
    when it was measured may be busy now.
    """

    def __init__(self, shape: Mapping[int, float] | None = None) -> None:
        self._shape = sorted((shape or {}).items())
        self._ratios: dict[int, float] = {}
        self._passes: dict[int, Timing] = {}
        self._reading = Timing()  # of passes that read a prompt, too: times of what their rows would cost
        self._unit = Timing()  # seconds of one row by the same passes: the scale while no other pass was measured
        self._drafts: dict[str, _DraftCost] = {}
        self._behind: dict[str, Timing] = {}
        self._now = 0  # passes so far

    def add_pass(self, rows: int, seconds: float, *, reading: bool = False) -> None:
        """reading: a prompt was read in it. Such a pass has rows without logits, and many: what it cost says how fast
        the machine reads, and nothing of passes that only decode."""
        self._now += 1
        if not reading:
            self._passes.setdefault(rows, Timing()).add(seconds, self._now)
            return
        if self._fresh():
            self._reading.add(seconds / self.passes(rows, rows)[0], self._now)
        self._unit.add(seconds / self._ratio(rows), self._now)

    def add_draft(
        self, source: str, tokens: int, seconds: float, *, depth: int = 0, requests: int = 1, behind: bool = False
    ) -> None:
        """tokens: of the drafts of all `requests` together. depth: of the deepest, `tokens` where they are a chain.
        behind: the source had to read more than the last round's tokens first. Its draft can have cost only less, so
        that this counts while nothing better is known."""
        if not tokens:
            return
        cost = self._drafts.setdefault(source, _DraftCost())
        if behind and not self.is_new(source):
            self._behind.setdefault(source, Timing()).add(max(0.0, seconds - cost.at(tokens, requests)), self._now)
        if not behind or self.is_new(source) or seconds < cost.at(tokens, requests):
            cost.add(tokens, depth or tokens, requests, seconds, self._now)

    def knows(self, rows: int) -> bool:
        """Whether a pass of so many rows was measured while decoding."""
        return rows in self._passes

    def is_new(self, source: str) -> bool:
        """Whether so few drafts were timed that one interruption could make the figure."""
        return self.timed(source) < 3

    def timed(self, source: str) -> int:
        """How many drafts of the source were timed."""
        return self._drafts[source].count if source in self._drafts else 0

    def draft(self, source: str, tokens: int = 1, requests: int = 1) -> float:
        """Seconds of drafts of so many tokens in all for so many requests at once; 0.0 before the first."""
        cost = self._drafts.get(source)
        return cost.at(tokens, requests) if cost is not None and tokens else 0.0

    def behind(self, source: str) -> float:
        """Seconds that a draft takes more when the source did not draft in the rounds before; 0.0 where unknown."""
        return self._behind[source].value if source in self._behind else 0.0

    def step(self, source: str) -> float:
        """Seconds by which a draft costs more that is one token deeper; 0.0 before the first."""
        return self._drafts[source].by_depth.slope if self.timed(source) else 0.0

    def passes(self, first: int, last: int, *, reading: bool = False) -> list[float]:
        """Seconds of passes of first .. last rows: measured, interpolated, or the nearest measured one scaled by the
        shape; while none was measured the shape, scaled by passes that read. In units of a one-row pass before the very
        first. reading: they read a prompt, too."""
        known = self._fresh()
        if not known:
            unit = self._unit.value or 1.0
            return [unit * self._ratio(rows) for rows in range(first, last + 1)]
        if reading:
            factor = self._reading.value or 1.0
            return [factor * seconds for seconds in self.passes(first, last)]
        costs, at = [], 0
        for rows in range(first, last + 1):
            while at < len(known) and known[at][0] < rows:
                at += 1
            if at < len(known) and known[at][0] == rows:
                costs.append(known[at][1])
                continue
            # Between two measurements the shape bends the line; beyond them it goes on from the nearest.
            sides = [known[at - 1]] if at == len(known) else [known[0]] if at == 0 else [known[at - 1], known[at]]
            guesses = [seconds * self._ratio(rows) / self._ratio(n) for n, seconds in sides]
            if len(sides) == 1:
                costs.append(guesses[0])
            else:
                part = (rows - sides[0][0]) / (sides[1][0] - sides[0][0])
                costs.append((1 - part) * guesses[0] + part * guesses[1])
        return costs

    def _fresh(self) -> list[tuple[int, float]]:
        """Measured passes by their rows. What was measured long ago may have been a busy minute: the shape, scaled by a
        fresh pass, is better."""
        fresh = (item for item in self._passes.items() if self._now - item[1].when < _STALE)
        return sorted((rows, timing.value) for rows, timing in fresh)

    def _ratio(self, rows: int) -> float:
        """T(rows) / T(1) by the shape, or by the prior."""
        if rows not in self._ratios:
            self._ratios[rows] = self._find_ratio(rows)
        return self._ratios[rows]

    def _find_ratio(self, rows: int) -> float:
        shape = self._shape
        if len(shape) < 2:
            return 1.0 + _ROW_PRIOR * (rows - 1)
        i = next((i for i, (n, _) in enumerate(shape) if n >= rows), len(shape) - 1)
        i = max(i, 1)
        (low, low_cost), (high, high_cost) = shape[i - 1], shape[i]
        return max(0.1, low_cost + (rows - low) / (high - low) * (high_cost - low_cost))


def measure_shape(target: Backend, seconds: float = 0.3, rows: Sequence[int] = _SHAPE_ROWS) -> dict[int, float]:
    """T(n) / T(1) for some row counts, on an empty slot: medians of interleaved passes for about so many seconds, each
    count once at least. {} when the target takes no pass of that many rows, or has no slot."""
    fit = [n for n in rows if n <= min(target.capacity.rows, target.capacity.positions)]
    if len(fit) < 2:
        return {}
    try:
        slot = target.new_slot()
    except CapacityError:
        return {}
    try:
        target.forward([Rows(slot, [0] * fit[-1])])  # the first pass finds pages and caches cold
        times: dict[int, list[float]] = {n: [] for n in fit}
        end = time.perf_counter() + seconds
        while not times[fit[0]] or (len(times[fit[0]]) < 15 and time.perf_counter() < end):
            for n in fit:
                start = time.perf_counter()
                target.forward([Rows(slot, [0] * n)])
                times[n].append(time.perf_counter() - start)
    finally:
        target.free_slot(slot)
    middle = {n: sorted(found)[(len(found) - 1) // 2] for n, found in times.items()}
    # Noise must not make more rows cheaper than fewer: a draft would then be free.
    shape, least = {}, 1.0
    for n in fit:
        least = max(least, middle[n] / middle[fit[0]])
        shape[n] = least
    return shape


def kept_shape(target: Backend, file: Path | None, key: str) -> dict[int, float]:
    """The shape that `file` holds under this key, else measured now and kept there. A file that cannot be read, or be
    written, is as if it were not there. key: what the costs depend on besides the model."""
    kept: dict[str, dict[str, float]] = {}
    if file is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(file.read_text(encoding="utf-8"))
            kept = found if isinstance(found, dict) else {}
    with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):
        shape = {int(rows): float(ratio) for rows, ratio in kept[key].items()} if key in kept else {}
        if shape and all(n > 0 and math.isfinite(ratio) and ratio > 0 for n, ratio in shape.items()):
            return shape
    shape = measure_shape(target)
    if file is not None and shape:
        with contextlib.suppress(OSError):
            write_json(file, {**kept, key: shape})
    return shape
