"""Durations of target passes and of drafting, estimated from measured rounds. Imports no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from paceline.types import RoundStats

FIRST_DRAFTS = 3
"""The shortest of this many drafting passes, after the very first one, is a drafter's first estimate. If one pass was
enough and another program disturbed it, the drafter would seem too slow and not be tried again."""

DRAFT_WEIGHT = 0.1
"""Weight of the latest drafting pass in the average of their seconds; the first ten count alike, so that a wrong first
estimate is soon corrected."""


class PassCosts:
    """Seconds of one forward pass of the target, by its number of token positions in all rows. Interpolates linearly
    between measured points, and extrapolates."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points`: measured pairs (token positions, seconds), at least one, with ascending positions. Points that
        other programs disturbed are lowered: a smaller pass never takes longer, nor does one pass than several smaller
        ones for as many positions."""
        assert points
        sizes, times = zip(*reversed(points), strict=True)
        # From the largest size down: each takes at most as long as any larger one.
        rising = list(zip(sizes, accumulate(times, min), strict=True))[::-1]
        for place, (size, seconds) in enumerate(rising):
            parts = (math.ceil(size / smaller) * part_s for smaller, part_s in rising[:place])
            rising[place] = size, min([seconds, *parts])
        # With a single point, time is taken as proportional to the size.
        self._points = rising if len(rising) > 1 else [rising[0], (2 * rising[0][0], 2 * rising[0][1])]
        self._known: list[float] = []

    def seconds(self, num_positions: int) -> float:
        while len(self._known) <= num_positions:
            self._known.append(self._at(len(self._known)))
        return self._known[num_positions]

    def _at(self, num_positions: int) -> float:
        pairs = list(pairwise(self._points))
        # The first and the last segment also serve the sizes outside the points.
        (left, low), (right, high) = next((pair for pair in pairs if num_positions <= pair[1][0]), pairs[-1])
        return max(low + (high - low) * (num_positions - left) / (right - left), 1e-9)


@dataclass(slots=True)
class RoundCosts:
    """Estimated durations of rounds of one type: all rows greedy, or some sampled. The estimates are the measured
    seconds of target passes (`passes`), corrected by a factor for each number of token positions.

    Times are in seconds at the machine's speed when `passes` was measured. The speed changes within seconds; its
    present value is estimated separately (`slowness`).
    """

    passes: PassCosts
    slowness: float = 1.0
    """Present duration of a round, without drafting but with host work, divided by the seconds that `passes` gives for
    it."""
    _num_rounds: int = 0
    _factors: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Size class -> (correction of `passes` relative to other sizes, number of comparisons)."""
    _pass_s: dict[int, float] = field(default_factory=dict)
    """Cache of `pass_s`, cleared when the factors change."""
    _draft_s: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """(source, number of rows that draft) -> (seconds of drafting, number of measurements)."""
    _first_s: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Source -> (seconds, number of rows) of its first drafting passes."""
    _latest: tuple[int | None, float] = (None, 0.0)
    """Size class of the latest round, and its duration over the one in `passes`."""

    def pass_s(self, num_positions: int) -> float:
        """Returns the estimated seconds, without drafting, of a round that verifies `num_positions` token positions
        (last committed tokens and drafts) in all rows."""
        known = self._pass_s.get(num_positions)
        if known is None:
            factor = self._factor(size_class(num_positions))
            known = self._pass_s[num_positions] = self.passes.seconds(num_positions) * factor
        return known

    def _factor(self, size: int) -> float:
        """Returns a size class's factor, interpolated geometrically; outside the known sizes, the nearest one's."""
        if size in self._factors or not self._factors:
            return self._factors.get(size, (1.0, 0))[0]
        below = max((each for each in self._factors if each < size), default=None)
        above = min((each for each in self._factors if each > size), default=None)
        if below is None or above is None:
            return self._factors[below if above is None else above][0]  # pyright: ignore[reportArgumentType]
        low, high = self._factors[below][0], self._factors[above][0]
        return low * (high / low) ** ((size - below) / (above - below))

    def drafting_s(self, source: str, num_rows: int) -> float:
        """Returns the estimated seconds of one drafting pass of `source` (a drafter's name) for `num_rows` rows: the
        average of measured passes, or scaled from the nearest number of rows that was measured. 0 if nothing was
        measured."""
        if num_rows == 0:
            return 0.0
        known = self._draft_s.get((source, num_rows))
        if known is not None:
            return known[0]
        measured = [rows for name, rows in self._draft_s if name == source]
        if not measured:
            return 0.0
        nearest = min(measured, key=lambda rows: abs(rows - num_rows))
        scale = 0.5 + 0.5 * num_rows / nearest  # half of the time is fixed, half proportional to the rows
        return self._draft_s[source, nearest][0] * scale

    def record(self, num_positions: int, pass_s: float) -> None:
        """Update the estimates with a finished round that verified `num_positions` token positions in all rows.
        `pass_s`: measured seconds of its target pass and host work, without drafting."""
        size, measured = size_class(num_positions), pass_s / self.passes.seconds(num_positions)
        ratio = measured / (self._factor(size) * self.slowness)
        if self._num_rounds == 0:
            self.slowness, ratio = max(measured, 1e-6), 1.0
        self.slowness *= 1.0 + max(0.1, 1.0 / (1 + self._num_rounds)) * (min(max(ratio, 0.5), 2.0) - 1.0)
        if size != self._latest[0]:
            self._compare(size, measured)  # consecutive rounds: the machine's speed cancels out
        self._latest = size, measured
        self._num_rounds += 1

    def drafted(self, source: str, num_rows: int, draft_s: float) -> None:
        """Update the estimates with one drafting pass of `source` (a drafter's name). `draft_s`: its measured seconds.
        Call it after `record` of the same round."""
        seconds, first = draft_s / self.slowness, self._first_s.setdefault(source, [])
        if len(first) <= FIRST_DRAFTS:
            first.append((seconds, num_rows))
            if len(first) > FIRST_DRAFTS:
                seconds, num_rows = min(first[1:])  # the very first draft touches memory for the first time
                self._draft_s[source, num_rows] = seconds, 1
            return
        known, (_, count) = self.drafting_s(source, num_rows), self._draft_s.get((source, num_rows), (0.0, 0))
        # An outlier counts at most 4 times the estimate; 2 times one that other numbers of rows gave.
        step = min(seconds, (4 if count else 2) * known) - known
        self._draft_s[source, num_rows] = known + max(DRAFT_WEIGHT, 1 / (1 + count)) * step, count + 1

    def forget(self, source: str) -> None:
        """Discard the drafting seconds of a drafter that was replaced or removed."""
        self._first_s.pop(source, None)
        self._draft_s = {key: known for key, known in self._draft_s.items() if key[0] != source}

    def _compare(self, size: int, measured: float) -> None:
        """Correct the factors of two sizes by comparing consecutive rounds. Later comparisons have less weight;
        outliers are clipped."""
        before, measured_before = self._latest
        if before is None:
            return
        self._pass_s.clear()
        error = math.log(measured * self._factor(before) / (measured_before * self._factor(size)))
        num_compared = min(self._factors.get(each, (1.0, 0))[1] for each in (size, before))
        most = max(0.3, 3.0 / (1 + num_compared))
        step = 0.5 * min(max(error, -most), most) * max(0.06, 1.0 / (1 + num_compared))
        for each, by in ((size, step), (before, -step)):
            self._factors[each] = self._factor(each) * math.exp(by), self._factors.get(each, (1.0, 0))[1] + 1


def drafting_by(stats: RoundStats, rows_by: Mapping[str, int]) -> dict[str, float]:
    """Divides a round's drafting time among the sources (drafters) that drafted; returns source -> seconds. `stats`:
    measured times of the round. `rows_by`: source -> number of rows that it drafted for; time that was measured for all
    sources together is divided in proportion to these."""
    shared_s = max(stats.draft_s - sum(stats.source_s.values()), 0.0)
    num_rows = sum(rows_by.values())
    return {source: stats.source_s.get(source, 0.0) + shared_s * rows / num_rows for source, rows in rows_by.items()}


@lru_cache(maxsize=4096)
def size_class(count: int) -> int:
    """Returns the class of a number of positions or rows, round(2 * log2(count)). Statistics are kept per class, of
    which there are two for each doubling of the number."""
    return round(2 * math.log2(max(count, 1)))
