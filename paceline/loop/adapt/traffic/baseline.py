"""Model of one hourly series with a daily and weekly course: a level plus effects of hour of day, day of week and hour
of week. With little data the effects are estimated closer to zero.

    log(acceptance length) = level + hour of day + day of week + hour of week + noise

Effects have normal priors with known standard deviations (`SPREADS`), so a shrunk mean is the posterior mean; they are
fitted one after the other (Gelman and Hill, chapter 12). An effect without data keeps its whole prior variance in the
prediction, which delays alarms.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.loop.adapt.traffic.hours import DAY, WEEK

SPREADS = (0.10, 0.10, 0.05)
"""Prior standard deviations of the effects of hour of day, day of week and hour of week, in log acceptance length."""
OBSERVED_SPREAD = 0.02
"""Standard deviation of an hour's true value around its usual one, because content varies. It limits the weight of one
hour."""
MEMORY_WEEKS = 8.0
"""Half-life of observations, in weeks."""


class Seasonal:
    """Learns the usual log acceptance length at each hour of the week, and predicts it. Call `predict` for an hour
    before `learn` adds it, so that the prediction comes from earlier hours only."""

    def __init__(self) -> None:
        self._weights = np.zeros((7, DAY))
        self._sums = np.zeros((7, DAY))
        self.first: int | None = None
        self.last: int | None = None
        self.num_hours = 0
        self._fit: tuple[float, float, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def has_day(self) -> bool:
        """True if there is enough data to compare hours of the day: 24 observed hours, and more than two days from the
        first to the last."""
        return self._span > 2 * DAY and self.num_hours >= DAY

    @property
    def has_week(self) -> bool:
        return self._span >= WEEK and self.num_hours >= WEEK / 2

    @property
    def _span(self) -> int:
        return 0 if self.first is None or self.last is None else self.last - self.first + 1

    def learn(self, hour: int, value: float, variance: float) -> None:
        """Add the observation of one hour (counted from 1970). `value`: log acceptance length; `variance`: its squared
        standard error. Values that are not finite are ignored."""
        if not (math.isfinite(value) and math.isfinite(variance)):
            return
        if self.last is not None and hour > self.last:
            fade = 0.5 ** ((hour - self.last) / (MEMORY_WEEKS * WEEK))
            self._weights *= fade
            self._sums *= fade
        day, of_day = day_and_hour(hour)
        weight = 1.0 / (variance + OBSERVED_SPREAD**2)
        self._weights[day, of_day] += weight
        self._sums[day, of_day] += weight * value
        self.first = hour if self.first is None else min(self.first, hour)
        self.last = hour if self.last is None else max(self.last, hour)
        self.num_hours += 1
        self._fit = None

    def predict(self, hour: int) -> tuple[float, float]:
        """Returns (expected log acceptance length, variance of this prediction) for an hour, counted from 1970. Without
        any observation returns (0, infinity)."""
        if not self.num_hours:
            return 0.0, math.inf
        level, variance, values, variances, _ = self._fit or self._fitted()
        day, of_day = day_and_hour(hour)
        return level + float(values[day, of_day]), variance + float(variances[day, of_day])

    def shared_variance(self, hour: int) -> float:
        """Returns the part of the prediction's variance that all hours of one day have in common: the variances of the
        level and of the day of the week. Averaging over the hours of a day does not reduce this part. `hour`: any hour
        of the day, counted from 1970."""
        _, variance, _, _, days = self._fit or self._fitted()
        return variance + float(days[day_and_hour(hour)[0], 0])

    def shift(self, by: float) -> None:
        """Move the usual level by `by` (difference of log acceptance length), for example to the level of a new
        drafter. The usual differences between hours stay the same."""
        self._sums += self._weights * by
        self._fit = None

    @property
    def level(self) -> float:
        return (self._fit or self._fitted())[0] if self.num_hours else 0.0

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


def day_and_hour(hour: int) -> tuple[int, int]:
    """Converts an hour counted from 1970 to (day of the week, 0 = Monday; hour of the day, 0 to 23), both in UTC."""
    return (hour // DAY + 3) % 7, hour % DAY
