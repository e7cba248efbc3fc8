"""Detects a lasting drop of one hourly series, such as acceptance length, below its season (usual daily and weekly
course).

    value, variance of an hour -> difference from the season (residual) -> detectors of the package river
    -> `raised` -> confirmed after days -> `held`

States: `learning` (no baseline yet, no alarms), `calm`, `raised` (a detector fired; the season is not updated), `held`
(the alarm is confirmed: action is needed).

Thresholds come from theory, not from the scenarios of `world.py`; only PRIOR_HOURS was chosen by looking at them.
Residuals are in standard deviations, clipped at `CLIP`. Page-Hinkley with allowance k = 0.5 and threshold h = 8 gives
one false alarm in exp(2k(h + 1.17)) / (2 k^2) hours, 19,000 per series (Siegmund, Sequential Analysis, 1985, 2.5), and
detects a drop of three standard deviations in about four hours. ADWIN (Bifet and Gavalda, 2007) with its authors' delta
of 0.002 detects slower or smaller drops.

An alarm is judged at the end of each day since it was raised, by the hours with traffic since the last verdict, once
there are LEAST_HOURS of them. They are assumed to be as correlated as consecutive hours, which is cautious across a
night, and to share the season's error on the first day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import ConfigError, needing
from paceline.loop.adapt.config import PolicyConfig
from paceline.loop.adapt.traffic.baseline import OBSERVED_SPREAD, Seasonal
from paceline.loop.adapt.traffic.hours import DAY

ALLOWANCE, THRESHOLD, MIN_HOURS = 0.5, 8.0, 30
ADWIN_DELTA = 0.002
CLIP = 4.0
"""Residuals are clipped at this many standard deviations, so that no single hour decides."""
LEAST_ERRORS = 3.0
"""Standard errors by which a day's mean residual must be below zero to confirm an alarm; they account for
autocorrelated hours."""
MOST_CORRELATION = 0.9
PRIOR_HOURS = 12.0
"""Independent hours that the autocorrelation is estimated from at first; they are forgotten like other hours. Without
them, the first hours of a drop early in the life of a series look like autocorrelation, and hide that it lasts."""
MEMORY_HOURS = 100.0
"""Time constant, in hours, of the running estimates of residual spread and autocorrelation."""
LEAST_HOURS = DAY // 2
"""Hours with traffic that a verdict on an alarm needs."""
MOST_ALARM_DAYS = 14
"""Days, with or without traffic, after which an alarm without action ends: the lower level is then the usual one, if it
was seen for LEAST_HOURS."""
State = Literal["learning", "calm", "raised", "held"]


@dataclass(frozen=True, slots=True)
class Residual:
    """Difference of one hour's log acceptance length from its usual value. `value`, `variance`: the difference and its
    variance. `raw`, `raw_variance`: the log acceptance length itself and its squared standard error."""

    hour: int
    value: float
    variance: float
    raw: float
    raw_variance: float


@dataclass(slots=True)
class Series:
    """Watches one hourly series, such as a cluster's log acceptance length, and raises an alarm when it stays below its
    usual daily and weekly course. Call `update` for every hour with traffic, then `tick` for every hour. Hours are
    counted from 1970."""

    config: PolicyConfig
    season: Seasonal = field(default_factory=Seasonal)
    state: State = "learning"
    raised_at: int | None = None
    held_at: int | None = None
    loss: float = 0.0
    """Mean drop below the usual course, as a share, in the hours by which the alarm was last checked; 0 without an
    alarm."""
    z: float = 0.0
    """Latest residual in standard deviations, for the log."""
    expected: float | None = None
    spread: float = 1.0
    """Ratio of the variance of residuals to their squared standard errors; at least 1."""
    num_raised: int = 0
    """Number of times a detector fired."""
    correlation: float = 0.0
    """Autocorrelation of residuals at lag one hour; 0 to MOST_CORRELATION."""
    evidence: list[Residual] = field(default_factory=list)
    """One entry for each hour with traffic since the alarm fired."""
    _detectors: list[Any] = field(default_factory=list)
    _level_residuals: list[float] | None = None
    """Residuals of the hours since `change_drafter`, until a day of them gives the new level; else None."""
    _changed_at: int = 0
    _num_days: int = 0
    """Days since the alarm was raised."""
    _num_judged: int = 0
    """Number of entries of `evidence` that earlier checks of the alarm have used."""
    _previous: float = 0.0
    _products: tuple[float, float] = (0.0, PRIOR_HOURS)
    """Exponentially weighted sums of (residual x previous residual) and of squared residuals."""

    def update(self, hour: int, value: float, variance: float) -> None:
        """Add the series' `value` in an hour (counted from 1970), with its squared standard error `variance`. May raise
        an alarm."""
        predicted, predicted_variance = self.season.predict(hour)
        self.expected = predicted if math.isfinite(predicted_variance) else None
        if self._level_residuals is not None:
            self._learn_level(hour, value - predicted)
            return
        if not self.season.has_day:
            self.season.learn(hour, value, variance)
            return
        if self.state == "learning":
            self.state = "calm"
        total_variance = self.spread * (variance + OBSERVED_SPREAD**2) + predicted_variance
        self.z = (value - predicted) / math.sqrt(total_variance)
        if self.state == "calm":
            fell = self._fell(max(-CLIP, min(CLIP, self.z)))
            self._widen(value - predicted, variance + OBSERVED_SPREAD**2 + predicted_variance)
            if not fell:
                self._learn(hour, value, variance)
                return
            self.state, self.raised_at = "raised", hour
            self.num_raised += 1
        self.evidence.append(Residual(hour, value - predicted, total_variance, value, variance))

    def tick(self, hour: int) -> None:
        """Must be called at the end of every hour, with or without traffic. If an alarm has fired (drop below the usual
        course), checks it every 24 hours from then on: the alarm continues, is confirmed, or ends."""
        if self.raised_at is None or (hour + 1 - self.raised_at) // DAY <= self._num_days:
            return
        self._num_days = (hour + 1 - self.raised_at) // DAY
        verdict = self._judge(self.evidence[self._num_judged :])
        needed = self.config.hold_periods if self.season.has_week else self.config.early_periods
        if verdict == "lapsed":
            self.end_alarm()
        elif self._num_days > MOST_ALARM_DAYS:
            if len(self.evidence) >= LEAST_HOURS:
                self.season.shift(sum(residual.value for residual in self.evidence) / len(self.evidence))
            self.end_alarm()
        elif verdict == "lasts" and self._num_days >= needed and self.state == "raised":
            self.state, self.held_at = "held", hour

    def _judge(self, hours: list[Residual]) -> Literal["lasts", "undecided", "lapsed"]:
        """Judge hours by their mean, so that each counts the same, and by their median: a short incident, however deep,
        is no drift. Too few hours are undecided, and judged with later ones."""
        if len(hours) < LEAST_HOURS:
            return "undecided"
        self._num_judged = len(self.evidence)
        mean = sum(residual.value for residual in hours) / len(hours)
        own = self._inflation * sum(residual.variance for residual in hours) / len(hours) ** 2
        error = math.sqrt(own + self.season.shared_variance(hours[0].hour))
        self.loss = 1.0 - math.exp(mean)
        typical = 1.0 - math.exp(_median(hours))
        if mean > -LEAST_ERRORS * error or min(self.loss, typical) < self.config.least_loss / 2:
            return "lapsed"
        return "lasts" if self.loss >= self.config.least_loss else "undecided"

    def end_alarm(self) -> None:
        """End the alarm. The hours since it fired were excluded from the usual course; they are now added to it."""
        for residual in self.evidence:
            self._learn(residual.hour, residual.raw, residual.raw_variance)
        self._calm()

    def change_drafter(self, hour: int) -> None:
        """Record that another drafter serves this traffic from `hour` (since 1970) on, and end any alarm. The usual
        level is then estimated anew, from a day of traffic. The usual differences between hours are kept, unless there
        is too little earlier traffic (at most two days) to know them."""
        self._calm()
        if self.season.has_day:
            self._level_residuals, self._changed_at = [], hour
        else:
            self.season = Seasonal()

    @property
    def is_relearning(self) -> bool:
        """True after `change_drafter`, until the usual level with the new drafter is known."""
        return self._level_residuals is not None

    def relearn(self, hours: Iterable[tuple[int, float, float]]) -> None:
        """Estimate the usual daily and weekly course anew from `hours`, for a series whose earlier values have been
        recomputed. Also ends any alarm. Each element is (hour since 1970, value of the series, squared standard error
        of the value)."""
        self.season = Seasonal()
        for hour, value, variance in hours:
            self._learn(hour, value, variance)
        self._calm()

    def _calm(self) -> None:
        self.state = "calm" if self.season.has_day else "learning"
        self.raised_at = self.held_at = None
        self.loss, self._num_days, self._num_judged = 0.0, 0, 0
        self.evidence, self._detectors = [], []

    @property
    def _inflation(self) -> float:
        """Variance inflation of a mean of autocorrelated hours, for an AR(1) process (Box and Jenkins)."""
        return (1 + self.correlation) / (1 - self.correlation)

    def _learn(self, hour: int, value: float, variance: float) -> None:
        """Add an hour to the season; autocorrelated hours get less weight."""
        total_variance = self.spread * self._inflation * (variance + OBSERVED_SPREAD**2)
        self.season.learn(hour, value, total_variance - OBSERVED_SPREAD**2)

    def _learn_level(self, hour: int, residual: float) -> None:
        assert self._level_residuals is not None
        self._level_residuals.append(residual)
        if hour - self._changed_at >= DAY - 1 and len(self._level_residuals) >= DAY / 2:
            self.season.shift(sum(self._level_residuals) / len(self._level_residuals))
            self._level_residuals = None

    def _fell(self, z: float) -> bool:
        """Returns True if a detector reports lower residuals than before."""
        if not self._detectors:
            self._detectors = _detectors()
        page_hinkley, adwin = self._detectors
        page_hinkley.update(z)
        before = adwin.estimation
        adwin.update(z)
        dropped = adwin.drift_detected and adwin.estimation < min(before, 0.0)
        return bool(page_hinkley.drift_detected or dropped)

    def _widen(self, residual: float, variance: float) -> None:
        """Update the estimates of residual spread and autocorrelation; an hour counts as CLIP deviations at most."""
        ratio = min(residual * residual / variance, CLIP**2)
        self.spread = max(1.0, self.spread + (ratio - self.spread) / MEMORY_HOURS)
        scaled = max(-CLIP, min(CLIP, residual / math.sqrt(variance)))
        keep = 1 - 1 / MEMORY_HOURS
        self._products = (
            keep * self._products[0] + scaled * self._previous,
            keep * self._products[1] + scaled * scaled,
        )
        self._previous = scaled
        self.correlation = min(max(self._products[0] / (self._products[1] + 1.0), 0.0), MOST_CORRELATION)


def _median(hours: list[Residual]) -> float:
    """Median of the residuals, weighted by inverse variance."""
    ordered = sorted(hours, key=lambda residual: residual.value)
    half, weight = sum(1 / residual.variance for residual in hours) / 2, 0.0
    for residual in ordered:
        weight += 1 / residual.variance
        if weight >= half:
            return residual.value
    return 0.0


def _detectors() -> list[Any]:
    with needing(ConfigError, "drift is detected by river: pip install 'paceline[adapt]'"):
        from river.drift import ADWIN, PageHinkley
    page_hinkley = PageHinkley(min_instances=1, delta=ALLOWANCE, threshold=THRESHOLD, mode="down")
    for _ in range(MIN_HOURS):
        page_hinkley.update(0.0)  # sets the detector's reference mean to 0, the known mean of residuals
    return [page_hinkley, ADWIN(delta=ADWIN_DELTA, clock=1)]
