"""Has one series of hours fallen below its season, and does it stay there?

    value, variance of an hour -> residual against the season -> river's detectors -> raised -> held for some days -> alarm

States: `learning` (no baseline yet: nothing is raised), `calm`, `raised` (a detector fired; the season learns nothing
meanwhile), `held` (it lasted: now somebody should act).

Thresholds come from theory, not from the scenarios of `world.py`. Residuals are in standard deviations, cut at `CLIP`.
Page-Hinkley with allowance k = 0.5 and threshold h = 8 raises one false alarm in exp(2k(h + 1.17)) / (2 k^2) hours, 19,000 of a
series (Siegmund, Sequential Analysis, 1985, 2.5), and finds a fall of three standard deviations in about four hours. ADWIN
(Bifet and Gavalda, 2007) has its authors' delta of 0.002: it finds what is too slow or too small for the other.
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
"""No single hour says more than this many standard deviations."""
SURE = 3.0
"""Standard deviations that a day's mean residual must be below zero: that of a mean of hours that are correlated."""
MOST_CORRELATION = 0.9
MEMORY_HOURS = 100.0
"""Of the running measures of how wide residuals spread, and how much an hour's tells of the next."""
MOST_STANDING = 14
"""Days after which an alarm that nobody could act on becomes the new normal."""
State = Literal["learning", "calm", "raised", "held"]


@dataclass(frozen=True, slots=True)
class Residual:
    """One hour beside its season, in log tokens a round."""

    hour: int
    value: float
    variance: float
    raw: float
    raw_variance: float


@dataclass(slots=True)
class Series:
    """One series under watch. `update` once an hour that has traffic; hours without say nothing."""

    config: PolicyConfig
    season: Seasonal = field(default_factory=Seasonal)
    state: State = "learning"
    raised_at: int | None = None
    held_at: int | None = None
    loss: float = 0.0
    """Mean fall over the latest whole day of an alarm, as a share."""
    z: float = 0.0
    """The latest residual in standard deviations, for the log."""
    expected: float | None = None
    spread: float = 1.0
    """How much wider residuals spread than their errors say, as a variance ratio; at least 1."""
    num_raised: int = 0
    """How often a detector fired."""
    correlation: float = 0.0
    """Of an hour's residual with the one before; 0 to MOST_CORRELATION."""
    evidence: list[Residual] = field(default_factory=list)
    _detectors: list[Any] = field(default_factory=list)
    _moved: list[float] | None = None
    """Residuals since another drafter took over, until a day of them tells the new level."""
    _moved_at: int = 0
    _judged: int = 0
    _previous: float = 0.0
    _products: tuple[float, float] = (0.0, 0.0)
    """Fading sums of an hour's residual times the one before, and times itself."""

    def update(self, hour: int, value: float, variance: float) -> None:
        """The value of `hour` (log tokens a round, or any other series in such units) and its squared error."""
        predicted, unsure = self.season.predict(hour)
        self.expected = predicted if math.isfinite(unsure) else None
        if self._moved is not None:
            self._learn_level(hour, value - predicted)
            return
        if not self.season.has_day:
            self.season.learn(hour, value, variance)
            return
        if self.state == "learning":
            self.state = "calm"
        whole = self.spread * (variance + OBSERVED_SPREAD**2) + unsure
        self.z = (value - predicted) / math.sqrt(whole)
        if self.state == "calm":
            fell = self._fell(max(-CLIP, min(CLIP, self.z)))
            self._widen(value - predicted, variance + OBSERVED_SPREAD**2 + unsure)
            if not fell:
                self._learn(hour, value, variance)
                return
            self.state, self.raised_at, self._judged = "raised", hour, 0
            self.num_raised += 1
        self.evidence.append(Residual(hour, value - predicted, whole, value, variance))

    def tick(self, hour: int) -> None:
        """After every hour, with traffic or without: judges a raised alarm each time a day of it is over."""
        if self.raised_at is None or (hour + 1 - self.raised_at) // DAY <= self._judged:
            return
        self._judged += 1
        day = [each for each in self.evidence if each.hour >= self.raised_at + DAY * (self._judged - 1)]
        if len(day) < DAY / 2:
            return  # too little traffic to say anything: it stays as it is
        verdict = self._judge(day)
        needed = self.config.hold_periods if self.season.has_week else self.config.early_periods
        if verdict == "lapsed":
            self.settle()
        elif self._judged > MOST_STANDING:
            self.season.shift(sum(each.value for each in self.evidence) / len(self.evidence))
            self.settle()
        elif verdict == "stands" and self._judged >= needed and self.state == "raised":
            self.state, self.held_at = "held", hour

    def _judge(self, day: list[Residual]) -> Literal["stands", "undecided", "lapsed"]:
        """By the mean of a whole day, so that no hour of it counts more than another, and by its median: an incident of some
        hours, however deep, is no drift."""
        mean = sum(each.value for each in day) / len(day)
        own = self._together * sum(each.variance for each in day) / len(day) ** 2
        error = math.sqrt(own + self.season.shared(day[0].hour))
        self.loss = 1.0 - math.exp(mean)
        typical = 1.0 - math.exp(_median(day))
        if mean > -SURE * error or min(self.loss, typical) < self.config.least_loss / 2:
            return "lapsed"
        return "stands" if self.loss >= self.config.least_loss else "undecided"

    def settle(self) -> None:
        """The alarm is over: what was seen meanwhile is part of the season after all."""
        for each in self.evidence:
            self._learn(each.hour, each.raw, each.raw_variance)
        self._calm()

    def moved(self, hour: int) -> None:
        """Another drafter serves this traffic from `hour` on: the season keeps its shape, its level is learned anew."""
        self._calm()
        if self.season.has_day:
            self._moved, self._moved_at = [], hour
        else:
            self.season = Seasonal()

    @property
    def is_moving(self) -> bool:
        """True while the level with another drafter is not known yet."""
        return self._moved is not None

    def relearn(self, hours: Iterable[tuple[int, float, float]]) -> None:
        """Learn the season anew from (hour, value, variance); an alarm that was raised before is over."""
        self.season = Seasonal()
        for hour, value, variance in hours:
            self._learn(hour, value, variance)
        self._calm()

    def _calm(self) -> None:
        self.state = "calm" if self.season.has_day else "learning"
        self.raised_at = self.held_at = None
        self.loss, self._judged = 0.0, 0
        self.evidence, self._detectors = [], []

    @property
    def _together(self) -> float:
        """How much less a mean of hours tells because they go together, as variances: an AR(1)'s (Box and Jenkins)."""
        return (1 + self.correlation) / (1 - self.correlation)

    def _learn(self, hour: int, value: float, variance: float) -> None:
        """An hour is worth as much as it tells about means of hours."""
        whole = self.spread * self._together * (variance + OBSERVED_SPREAD**2)
        self.season.learn(hour, value, whole - OBSERVED_SPREAD**2)

    def _learn_level(self, hour: int, residual: float) -> None:
        assert self._moved is not None
        self._moved.append(residual)
        if hour - self._moved_at >= DAY - 1 and len(self._moved) >= DAY / 2:
            self.season.shift(sum(self._moved) / len(self._moved))
            self._moved = None

    def _fell(self, z: float) -> bool:
        """Whether a detector says that residuals are lower than they were."""
        if not self._detectors:
            self._detectors = _detectors()
        page_hinkley, adwin = self._detectors
        page_hinkley.update(z)
        before = adwin.estimation
        adwin.update(z)
        dropped = adwin.drift_detected and adwin.estimation < min(before, 0.0)
        return bool(page_hinkley.drift_detected or dropped)

    def _widen(self, residual: float, variance: float) -> None:
        """Follow how wide residuals really spread; one hour counts as CLIP deviations at most."""
        ratio = min(residual * residual / variance, CLIP**2)
        self.spread = max(1.0, self.spread + (ratio - self.spread) / MEMORY_HOURS)
        scaled = max(-CLIP, min(CLIP, residual / math.sqrt(variance)))
        keep = 1 - 1 / MEMORY_HOURS
        self._products = (keep * self._products[0] + scaled * self._previous, keep * self._products[1] + scaled * scaled)
        self._previous = scaled
        self.correlation = min(max(self._products[0] / (self._products[1] + 1.0), 0.0), MOST_CORRELATION)


def _median(day: list[Residual]) -> float:
    """Of the residuals, each as heavy as it is exact."""
    ordered = sorted(day, key=lambda each: each.value)
    half, weight = sum(1 / each.variance for each in day) / 2, 0.0
    for each in ordered:
        weight += 1 / each.variance
        if weight >= half:
            return each.value
    return 0.0


def _detectors() -> list[Any]:
    with needing(ConfigError, "drift is detected by river: pip install 'paceline[adapt]'"):
        from river.drift import ADWIN, PageHinkley
    page_hinkley = PageHinkley(min_instances=1, delta=ALLOWANCE, threshold=THRESHOLD, mode="down")
    for _ in range(MIN_HOURS):
        page_hinkley.update(0.0)  # it compares with the mean of what it saw, and that of residuals is known to be zero
    return [page_hinkley, ADWIN(delta=ADWIN_DELTA, clock=1)]
