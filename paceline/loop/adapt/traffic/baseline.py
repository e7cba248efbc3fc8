"""What an hour of the week usually looks like: a level, and effects of the hour of the day, the day of the week and the hour of
the week, each shrunk towards nothing where little has been seen of it.

    log tokens a round = level + hour of day + day of week + hour of week + noise

Effects are normal with known spread beforehand (`SPREADS`), so a shrunk mean is the posterior mean, fitted one after the other
(Gelman and Hill, chapter 12). What was never seen keeps its whole spread in the prediction's variance: the unknown makes slow.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.loop.adapt.traffic.hours import DAY, WEEK

SPREADS = (0.10, 0.10, 0.05)
"""Standard deviations beforehand of the effects of hour of day, day of week, hour of week, in log tokens a round."""
OBSERVED_SPREAD = 0.02
"""Of an hour's true value around its usual one: content is never quite the same. It bounds what one hour can say."""
MEMORY_WEEKS = 8.0
"""Weights halve after so many weeks."""


class Seasonal:
    """One series of hours; `predict` before `learn`."""

    def __init__(self) -> None:
        self._weights = np.zeros((7, DAY))
        self._sums = np.zeros((7, DAY))
        self.first: int | None = None
        self.last: int | None = None
        self.num_hours = 0
        self._fit: tuple[float, float, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def has_day(self) -> bool:
        """Whether more than two days have been seen: hours of the day have something to be compared with."""
        return self._span > 2 * DAY and self.num_hours >= DAY

    @property
    def has_week(self) -> bool:
        return self._span >= WEEK and self.num_hours >= WEEK / 2

    @property
    def _span(self) -> int:
        return 0 if self.first is None or self.last is None else self.last - self.first + 1

    def learn(self, hour: int, value: float, variance: float) -> None:
        """An hour's value, with its squared error."""
        if not (math.isfinite(value) and math.isfinite(variance)):
            return
        if self.last is not None and hour > self.last:
            fade = 0.5 ** ((hour - self.last) / (MEMORY_WEEKS * WEEK))
            self._weights *= fade
            self._sums *= fade
        day, of_day = place(hour)
        weight = 1.0 / (variance + OBSERVED_SPREAD**2)
        self._weights[day, of_day] += weight
        self._sums[day, of_day] += weight * value
        self.first = hour if self.first is None else min(self.first, hour)
        self.last = hour if self.last is None else max(self.last, hour)
        self.num_hours += 1
        self._fit = None

    def predict(self, hour: int) -> tuple[float, float]:
        """Expected value and its variance; of an empty series nothing is known."""
        if not self.num_hours:
            return 0.0, math.inf
        level, variance, values, variances, _ = self._fit or self._fitted()
        day, of_day = place(hour)
        return level + float(values[day, of_day]), variance + float(variances[day, of_day])

    def shared(self, hour: int) -> float:
        """The part of the prediction's variance that all hours of this day have together: level, and day of the week."""
        _, variance, _, _, days = self._fit or self._fitted()
        return variance + float(days[place(hour)[0], 0])

    def shift(self, by: float) -> None:
        """All that was seen moves: another drafter serves this traffic now."""
        self._sums += self._weights * by
        self._fit = None

    @property
    def level(self) -> float:
        return (self._fit or self._fitted())[0] if self.num_hours else 0.0

    @property
    def swing(self) -> float:
        """Standard deviation of the hours of the week around the level."""
        return float(np.std((self._fit or self._fitted())[2])) if self.num_hours else 0.0

    def _fitted(self) -> tuple[float, float, np.ndarray, np.ndarray, np.ndarray]:
        weights, whole = self._weights, float(self._weights.sum())
        level = float(self._sums.sum()) / whole
        rest = self._sums - weights * level
        values, variances, days = np.zeros((7, DAY)), np.zeros((7, DAY)), np.zeros((7, 1))
        for spread, axis in zip(SPREADS, (0, 1, None), strict=True):
            seen = weights if axis is None else weights.sum(axis, keepdims=True)
            left = rest if axis is None else rest.sum(axis, keepdims=True)
            precision = seen + spread**-2
            effect = left / precision
            rest = rest - weights * effect
            values = values + effect
            variances = variances + 1.0 / precision
            days = 1.0 / precision if axis == 1 else days
        self._fit = level, 1.0 / whole, values, variances, days
        return self._fit


def place(hour: int) -> tuple[int, int]:
    """Day of the week (0 is Monday) and hour of the day, UTC."""
    return (hour // DAY + 3) % 7, hour % DAY
