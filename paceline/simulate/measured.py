"""The measured model: step times of a machine instead of a roofline, from `paceline bench steps` or any file of that form.

    {"verify": [[batch, positions, seconds], ...], "draft": [[batch, num_drafted, seconds], ...], "host_s": 0.0004}

Between measured points times are interpolated along straight lines, and never fall when there is more to do: a shorter time of
a larger pass was another program's doing. Beyond the widest they go on as steeply as between the last two; more rows than were
measured count as wider passes of as many positions.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

Point = tuple[float, float, float]


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
            batch, width, seconds = _checked(point, what)
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
class StepTable:
    """A machine's measured steps for one model and drafter."""

    verify: TimeTable
    draft: TimeTable | None = None
    host_s: float = 0.0
    """Of a round outside target and drafter."""
    context: float = 0.0
    """Tokens in the cache of each sequence while it was measured; 0 when not told."""
    title: str = ""
    """Model and machine, for people."""


def read_table(path: Path) -> StepTable:
    """A steps.json, the folder it is in, or a file of the form above. Raises ConfigError."""
    return table_of(read_steps(path), str(path))


def read_steps(path: Path) -> dict[str, Any]:
    """The JSON object of a table. Raises ConfigError when there is none."""
    file = path / "steps.json" if path.is_dir() else path
    try:
        steps = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {file}: paceline bench steps --out FOLDER makes one") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror or error}): check its permissions") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}): make it again with paceline bench steps") from error
    if isinstance(steps, list):
        steps = {"verify": steps}
    if not isinstance(steps, dict) or not isinstance(steps.get("verify"), list):
        raise ConfigError(f'{file} holds no step times: give {{"verify": [[batch, positions, seconds], ...]}}')
    return steps


def table_of(steps: dict[str, Any], title: str = "") -> StepTable:
    """Raises ConfigError for values that are no times."""
    draft = steps.get("draft") or []
    host_s, context = steps.get("host_s", 0.0), steps.get("context", 0)
    if not all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in (host_s, context)):
        raise ConfigError("host_s and context of the table must be numbers of 0 or more")
    machine = steps.get("machine")
    told = (steps.get("model"), machine.get("name") if isinstance(machine, dict) else machine)
    names = [name for name in told if isinstance(name, str)]
    return StepTable(
        verify=TimeTable.of(steps["verify"]),
        draft=TimeTable.of(draft, "draft") if draft else None,
        host_s=float(host_s),
        context=float(context),
        title=" on ".join(names) or title,
    )


def _checked(point: Sequence[float], what: str) -> Point:
    is_point = isinstance(point, list | tuple) and len(point) == 3 and all(isinstance(each, int | float) for each in point)
    if not is_point or not all(math.isfinite(each) and each > 0 for each in point):
        raise ConfigError(f"{what} time {point!r} is not [batch, positions, seconds] with numbers above 0")
    return float(point[0]), float(point[1]), float(point[2])


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """From the right: a smaller pass never takes more than a larger one."""
    least, found = math.inf, []
    for width, seconds in reversed(points):
        least = min(least, seconds)
        found.append((width, least))
    return tuple(reversed(found))


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Straight lines through the points; flat before the first, as steep as the last two after the last."""
    places = [place for place, _ in points]
    if at <= places[0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1]
    right = min(bisect_left(places, at), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    return before + (after - before) * (at - low) / (high - low)
