"""Seconds of a prompt's chunk, from measured steps: where prefill was measured, from that; else from the largest passes.

{"prefill": [[tokens, seconds], ...]} beside "verify"
"""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import ConfigError
from paceline.simulate.measured import TimeTable
from paceline.simulate.serving import PrefillSeconds


def prefill_of_steps(steps: dict[str, Any]) -> PrefillSeconds:
    """Chunk's tokens, context -> seconds. The context is the table's. Raises ConfigError for values that are no times."""
    measured = steps.get("prefill")
    if measured is not None and not isinstance(measured, list):
        raise ConfigError("prefill of the table must be [[tokens, seconds], ...]")
    if measured:
        points = [[1, *point] if isinstance(point, list) else [] for point in measured]
        return _along(TimeTable.of(points, "prefill"))
    return _along(TimeTable.of(_by_tokens(steps["verify"])))


def _along(table: TimeTable) -> PrefillSeconds:
    return lambda tokens, context: table.seconds(1, tokens)


def _by_tokens(verify: list[list[float]]) -> list[list[float]]:
    """A pass costs what its tokens do, whoever they belong to: (rows x positions, seconds), and a line fitted to the larger
    half to go on with, since the last two points alone may have any slope."""
    TimeTable.of(verify)
    points = sorted((batch * positions, seconds) for batch, positions, seconds in verify)
    larger = [point for point in points if point[0] >= points[-1][0] / 2]
    mean_x, mean_y = (math.fsum(values) / len(larger) for values in zip(*larger, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in larger)
    if spread > 0:
        slope = max(math.fsum((x - mean_x) * (y - mean_y) for x, y in larger) / spread, 0.0)
        fitted = [(x, mean_y + slope * (x - mean_x)) for x in (larger[-1][0], 2 * larger[-1][0])]
        points = [point for point in points if point[0] < larger[-1][0]] + fitted
    return [[1, tokens, seconds] for tokens, seconds in points]
