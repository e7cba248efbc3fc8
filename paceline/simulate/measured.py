"""The measured model: step times of a machine instead of a roofline, from `paceline bench steps` or any file of that form.

    {"verify": [[batch, positions, seconds], ...], "draft": [[batch, num_drafted, seconds], ...], "host_s": 0.0004,
     "prefill": [[tokens, seconds], ...]}

Between measured points times lie on straight lines, and they never fall when there is more to do: where a larger pass was
faster, another program had slowed the smaller one down. Beyond the widest point they go on as steeply as between the last two;
a batch larger than any measured counts as wider passes of as many positions.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.simulate.costs import NO_COST, FractionDrafter, StepCosts
from paceline.simulate.files import is_amount, read_json


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Seconds over (batch, width), known on a grid that need not be full."""

    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]
    """(batch, ((width, seconds), ...)): both ascending, seconds not falling along a row."""

    @classmethod
    def of(cls, points: Sequence[Sequence[float]], what: str = "verify") -> TimeTable:
        """Raises ConfigError for points that are no [batch, width, seconds]."""
        best: dict[float, dict[float, float]] = {}
        for point in points:
            is_point = isinstance(point, list | tuple) and len(point) == 3
            if not is_point or not all(is_amount(each) and each > 0 for each in point):
                raise ConfigError(f"{what} time {point!r} is not [batch, positions, seconds] with numbers above 0")
            batch, width, seconds = map(float, point)
            row = best.setdefault(batch, {})
            row[width] = min(row.get(width, math.inf), seconds)
        if not best:
            raise ConfigError(f"the table has no {what} times: give [[batch, positions, seconds], ...]")
        return cls(tuple((batch, _rising(sorted(row.items()))) for batch, row in sorted(best.items())))

    def seconds(self, batch: float, width: float) -> float:
        """Linear in both; more never takes less."""
        most, row = self.rows[-1]
        if batch > most:
            more = batch / most
            return self.seconds(most, width * more) if len(row) > 1 else self.seconds(most, width) * more
        values, highest = [], 0.0
        for known, row in self.rows:
            highest = max(highest, _line(row, width))
            values.append((known, highest))
        return _line(values, batch)

    @property
    def span(self) -> tuple[float, float, float, float]:
        """Smallest and largest batch, smallest and largest width."""
        widths = [width for _, row in self.rows for width, _ in row]
        return self.rows[0][0], self.rows[-1][0], min(widths), max(widths)


@dataclass(frozen=True, slots=True)
class MeasuredCosts(StepCosts):
    """A machine's measured steps for one model and drafter, whatever the context."""

    verify: TimeTable
    draft: TimeTable | None
    """None when no drafter was measured: then `drafter` says what it costs."""
    prefill: TimeTable
    """A chunk of one prompt, by its tokens."""
    host_s: float = 0.0
    context: float = 0.0
    """Tokens in the cache of each sequence while it was measured; 0 when not told."""
    title: str = ""
    """Model and machine, for people."""
    prefill_adapts: bool = False
    """Whether the engine that was measured shortens the chunks of a prompt beside running requests."""
    drafter: FractionDrafter = NO_COST

    @property
    def max_draft(self) -> int | None:
        """Most drafts of a round that were measured; None when only plain passes were."""
        _, _, _, widest = (self.draft or self.verify).span
        return int(widest) - (self.draft is None) or None

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.draft is None:
            return self.drafter.draft_s(num_drafted, batch, self.verify.seconds(batch, 1))
        return self.draft.seconds(batch, num_drafted) if num_drafted else 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": self.verify.seconds(batch, positions)}

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.prefill.seconds(1, tokens)


def read_table(path: Path) -> MeasuredCosts:
    """A steps.json, the folder it is in, or a file of the form above. Raises ConfigError."""
    return table_of(read_steps(path), str(path))


def read_steps(path: Path) -> dict[str, Any]:
    """The JSON object of a table. Raises ConfigError when there is none."""
    file = path / "steps.json" if path.is_dir() else path
    steps = read_json(file, "paceline bench steps --out FOLDER makes one")
    if isinstance(steps, list):
        steps = {"verify": steps}
    if not isinstance(steps, dict) or not isinstance(steps.get("verify"), list):
        raise ConfigError(f'{file} holds no step times: give {{"verify": [[batch, positions, seconds], ...]}}')
    return steps


def table_of(steps: dict[str, Any], title: str = "") -> MeasuredCosts:
    """Raises ConfigError for values that are no times."""
    draft = steps.get("draft") or []
    host_s, context = steps.get("host_s", 0.0), steps.get("context", 0)
    if not (is_amount(host_s) and is_amount(context)):
        raise ConfigError("host_s and context of the table must be numbers of 0 or more")
    machine = steps.get("machine")
    told = (steps.get("model"), machine.get("name") if isinstance(machine, dict) else machine)
    verify = TimeTable.of(steps["verify"])
    return MeasuredCosts(
        verify=verify,
        draft=TimeTable.of(draft, "draft") if draft else None,
        prefill=TimeTable.of(_prefill(steps), "prefill"),
        host_s=float(host_s),
        context=float(context),
        title=" on ".join(name for name in told if isinstance(name, str)) or title,
        prefill_adapts=steps.get("prefill_adapts") is True,
    )


def _prefill(steps: dict[str, Any]) -> list[list[float]]:
    """[1, tokens, seconds] of chunks: as measured, else from target passes, whose time depends on their tokens alone.

    A straight line through the larger half of the passes goes on beyond them: the last two alone may have any slope.
    """
    measured = steps.get("prefill") or []
    if not isinstance(measured, list):
        raise ConfigError("prefill of the table must be [[tokens, seconds], ...]")
    if measured:
        return [[1, *point] if isinstance(point, list) else [] for point in measured]
    points = sorted((batch * positions, seconds) for batch, positions, seconds in steps["verify"])
    larger = [point for point in points if point[0] >= points[-1][0] / 2]
    if larger[0][0] < larger[-1][0]:
        sizes, times = zip(*larger, strict=True)
        slope = max(statistics.linear_regression(sizes, times).slope, 0.0)
        middle, mean_s = statistics.fmean(sizes), statistics.fmean(times)
        fitted = [(size, mean_s + slope * (size - middle)) for size in (sizes[-1], 2 * sizes[-1])]
        points = [point for point in points if point[0] < sizes[-1]] + fitted
    return [[1, tokens, seconds] for tokens, seconds in points]


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """From the right: a smaller pass never takes more than a larger one."""
    widths, times = zip(*reversed(points), strict=True)
    return tuple(zip(widths, itertools.accumulate(times, min), strict=True))[::-1]


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Straight lines through the points; flat before the first, as steep as the last two after the last."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left([place for place, _ in points], at), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    return before + (after - before) * (at - low) / (high - low)
