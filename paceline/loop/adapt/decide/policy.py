"""Hourly policies: each call of `hour` takes one hour's traffic, decides, and returns a line with both. Imports no
PyTorch, reads no clock.

    policy.hour(number, {cluster: Sums}) -> Line

The commands `watch`, `check` and `replay` use the same policy. The caller carries out its decisions and reports them
back (`is_training`, `trained`, `routed`). `NaivePolicy` is a simple baseline for comparisons."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.loop.adapt.config import PolicyConfig, PriceConfig
from paceline.loop.adapt.decide.decide import Alarm, Customer, Decision, Mix, View, decide
from paceline.loop.adapt.traffic.drift import Series
from paceline.loop.adapt.traffic.hours import DAY, WEEK, Sums, total
from paceline.plan.clusters import OTHER, is_tag

RETURNS = 0.5
"""Minimum autocorrelation, at a lag of one period, of a periodic cluster mix. At half a period it must be lower by this
amount: a single shift would be high there, too."""
PERIODS_SEEN = 3
"""Number of whole periods that must have been observed before the mix counts as periodic."""
LOOK_HOURS = 6
"""Hours between searches for a period."""
MIX_WEEKS = 8
"""Weeks of cluster shares that are stored, to re-estimate the daily and weekly course of the mix."""
SURE = 1.96
"""Standard errors within which the gap between a customer's acceptance and that of other traffic is uncertain."""
LEAST_SHARE = 0.02
"""Smallest share of all tokens at which a cluster can raise an alarm (a lasting drop of acceptance)."""


@dataclass(frozen=True, slots=True)
class Line:
    """Observations and decision of the policy for one hour. `seen` has the observations of each cluster (group of
    similar requests), by cluster name: its requests, tokens, acceptance length and alarm state in this hour.

    `mix`: three values about the cluster mix (each cluster's share of the traffic), or {} from NaivePolicy and for an
    ignored hour:
    - "state": state of the alarm about the mix: "learning", "calm", "raised" or "held" (confirmed).
    - "period": hours after which the mix repeats, 24 or 168; None if it does not repeat.
    - "swing": relative drop of acceptance length from the hours with the best mix to those with the worst."""

    hour: int
    seen: Mapping[str, Mapping[str, Any]]
    mix: Mapping[str, Any]
    decision: Decision
    notes: tuple[str, ...] = ()
    raised: tuple[tuple[str, int], ...] = ()
    """(cluster, or "mix" for the cluster mix; hour in which the alarm fired) of each alarm that was confirmed in this
    hour. NaivePolicy confirms alarms at once, under the name "all"."""


@dataclass(slots=True)
class _Cluster:
    series: Series
    recent: deque[Sums] = field(default_factory=deque)
    hours: deque[int] = field(default_factory=lambda: deque(maxlen=DAY))
    """Hours of `recent`, since 1970."""
    last_day: Sums = field(default_factory=Sums)
    """Sum of `recent`: the last 24 hours with traffic."""

    def add(self, number: int, sums: Sums) -> None:
        self.hours.append(number)
        self.recent.append(sums)
        self.last_day += sums
        if len(self.recent) > DAY:
            self.last_day -= self.recent.popleft()

    def tokens_per_hour(self, now: int) -> float:
        """Returns the mean rate since the first of the last 24 hours with traffic, but of a day at least."""
        return self.last_day.tokens / max(now + 1 - self.hours[0], DAY) if self.hours else 0.0

    @property
    def usual(self) -> float:
        """Log of the usual acceptance length without season; for a new cluster that of the last day."""
        season = self.series.season
        return season.level if season.num_hours else math.log(self.last_day.tokens_per_round)


@dataclass(frozen=True, slots=True)
class _MixHour:
    """Cluster shares of one hour, and the value of the mix series computed from the clusters' usual levels."""

    hour: int
    shares: Mapping[str, float]
    """Cluster -> share of the tokens."""
    num_effective: float
    value: float = 0.0
    variance: float = 0.0


class SeasonalPolicy:
    """Detects lasting drops of acceptance length below its usual value at this hour of the week, for each cluster
    (group of similar requests), and lasting changes of the clusters' shares of the traffic. Reacts with the cheapest
    action that suffices: another drafter that is already on the server, an additional drafter, or a training."""

    def __init__(self, config: PolicyConfig | None = None, prices: PriceConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self.prices = prices or PriceConfig()
        self.scores: Callable[[str], Mapping[str, float] | None] = lambda cluster: {}
        """Called only at an alarm: cluster -> {drafter: acceptance length on the newest traces} of the drafters that do
        not serve the cluster; None if they must be scored first."""
        self.reset()

    def reset(self) -> None:
        """Discard all observations, and the record of earlier trainings and proposals."""
        self.clusters: dict[str, _Cluster] = {}
        self.mix = Series(self.config)
        self.is_training = False
        """Set to True while a training runs, until `trained` is called: no other action is decided meanwhile."""
        self.trained_at: int | None = None
        self.proposed: set[str] = set()
        self.num_requests, self.num_hours = 0, 0
        """Requests in total, and hours with any."""
        self._mixes: deque[_MixHour] = deque(maxlen=MIX_WEEKS * WEEK)
        self._relearning: dict[str, int] = {}
        """Cluster -> hour since which another drafter serves it, until its new usual level is known."""
        self._last: int | None = None
        self._period: int | None = None

    @property
    def tracked(self) -> list[str]:
        """Names of the clusters that have separate statistics, at most `max_clusters`. All other clusters share the
        statistics named "other". Returns [] if every cluster has separate statistics."""
        return [name for name in self.clusters if name != OTHER] if OTHER in self.clusters else []

    def hour(self, number: int, seen: Mapping[str, Sums]) -> Line:
        """Add the traffic of one hour, and decide on an action such as "retrain", "route" or "none". `number`: the
        hour, counted from 1970; it must increase from call to call. `seen`: cluster (group of similar requests) -> sums
        of the tokens and rounds of its requests.

        If `number` does not increase, the call has no effect: the returned line contains only a note and the action
        "none"."""
        if self._last is not None and number <= self._last:
            note = f"hour {number} is not after hour {self._last}: the clock went back, it is ignored"
            return Line(number, {}, {}, Decision(why=note), (note,))
        notes: tuple[str, ...] = ()
        if self._last is not None and number - self._last > DAY:
            notes = (f"nothing was seen for {number - self._last - 1} hours: no traffic, or the clock jumped",)
        self._last = number
        grouped = self._grouped(seen)
        for name, sums in grouped.items():
            cluster = self.clusters.setdefault(name, _Cluster(Series(self.config)))
            cluster.add(number, sums)
            cluster.series.update(number, math.log(sums.tokens_per_round), sums.log_variance)
        if grouped:
            self.num_requests, self.num_hours = self.num_requests + total(grouped.values()).requests, self.num_hours + 1
            self._update_mix(number, grouped)
        watched = {**{name: cluster.series for name, cluster in self.clusters.items()}, "mix": self.mix}
        for series in watched.values():
            series.tick(number)
        view = self._view(number)
        decision = decide(view, self.config, self.prices)
        if decision.action == "propose":
            self.proposed |= set(decision.clusters)
        raised = tuple(
            (name, series.raised_at or number) for name, series in watched.items() if series.held_at == number
        )
        mix = {"state": self.mix.state, "period": view.mix.period, "swing": round(view.mix.swing, 3)}
        return Line(number, self._observed(grouped), mix, decision, notes, raised)

    def trained(self, number: int, clusters: tuple[str, ...], hours: float | None = None) -> None:
        """Record that a training ended in hour `number` (since 1970), so that the policy decides on new actions again.
        `clusters`: clusters that the new drafter serves from now on; empty if it was rejected. `hours`: core- or
        GPU-hours that the training took. Later trainings are expected to take the same; None leaves the expectation
        unchanged."""
        self.is_training, self.trained_at = False, number
        if hours:
            self.prices = replace(self.prices, training_hours=hours)
        self.routed(number, clusters)

    def routed(self, number: int, clusters: tuple[str, ...]) -> None:
        """Record that these clusters are served by another drafter from hour `number` (since 1970) on. Their usual
        acceptance length is then estimated anew."""
        for name in clusters:
            if name in self.clusters:
                self.clusters[name].series.change_drafter(number)
                self._relearning[name] = number
        if clusters:
            self.mix.end_alarm()
            self._period = None

    def _grouped(self, seen: Mapping[str, Sums]) -> dict[str, Sums]:
        """Group traffic into at most `max_clusters` clusters, first come first served; hours without a round are left
        out."""
        grouped: dict[str, Sums] = {}
        for name, sums in seen.items():
            is_tracked = name in self.clusters or len({*self.clusters, *grouped} - {OTHER}) < self.config.max_clusters
            key = name if is_tracked else OTHER
            if math.isfinite(sums.tokens) and sums.tokens >= sums.rounds > 0:
                grouped[key] = grouped.get(key, Sums()) + sums
        return grouped

    def _update_mix(self, number: int, seen: Mapping[str, Sums]) -> None:
        """Update the mix series: the acceptance length if every cluster were at its usual level, which changes only
        with the mix.

        Hours with traffic of a cluster whose new level is unknown are only recorded. Once the level is known, the
        season of the mix is relearned from the recorded shares, since its shape depends on the levels, too."""
        tokens = sum(sums.tokens for sums in seen.values())
        shares = {name: sums.tokens / tokens for name, sums in seen.items()}
        effective = sum(sums.num_effective for sums in seen.values())
        newest = self._valued(_MixHour(number, shares, max(effective, 1.0)))
        self._mixes.append(newest)
        relearned = [
            name
            for name, since in self._relearning.items()
            if number - since >= DAY - 1 and not self.clusters[name].series.is_relearning
        ]
        for name in relearned:
            del self._relearning[name]
        if relearned:
            self._mixes = deque(map(self._valued, self._mixes), self._mixes.maxlen)
            self.mix.relearn((mix_hour.hour, mix_hour.value, mix_hour.variance) for mix_hour in self._mixes)
        elif self._relearning.keys().isdisjoint(shares):
            self.mix.update(number, newest.value, newest.variance)

    def _valued(self, each: _MixHour) -> _MixHour:
        """Returns the hour with the value of its shares at the current usual levels."""
        costs = {name: math.exp(-self.clusters[name].usual) for name in each.shares}
        mean = sum(share * costs[name] for name, share in each.shares.items())
        spread = sum(share * (costs[name] - mean) ** 2 for name, share in each.shares.items())
        return replace(each, value=-math.log(mean), variance=spread / mean**2 / each.num_effective)

    def _view(self, number: int) -> View:
        rates, alarms = self._rates(number), []
        for name, rate in rates.items():
            cluster = self.clusters[name]
            if cluster.series.state == "held" and rate >= LEAST_SHARE * sum(rates.values()):
                now = cluster.last_day.tokens_per_round
                alarms.append(Alarm(name, cluster.series.loss, now, rate, self.scores(name)))
        mix = self._mix(number)
        if mix.has_moved and not alarms:
            alarms += self._newcomers(number)
        proposed, too_little = frozenset(self.proposed), self._too_little()
        falling = tuple(name for name, cluster in self.clusters.items() if cluster.series.state == "raised")
        customers = self._customers(number)
        return View(number, alarms, mix, customers, self.is_training, self.trained_at, proposed, too_little, falling)

    def _customers(self, number: int) -> list[Customer]:
        """Compares every tag that has a baseline and no alarm with all other traffic."""
        rates = self._rates(number)
        everything = total(self.clusters[name].last_day for name in rates)
        customers = []
        for name in rates:
            cluster = self.clusters[name]
            own, rest = cluster.last_day, everything - cluster.last_day
            if is_tag(name) and cluster.series.state == "calm" and rest.requests and own.requests:
                ratio = own.tokens_per_round / rest.tokens_per_round
                error = math.sqrt(own.log_variance + rest.log_variance)
                gap, share = 1 - ratio * math.exp(SURE * error), rates[name] / sum(rates.values())
                customers.append(Customer(name, share, gap, own.tokens_per_round, rates[name], rest.tokens_per_round))
        return customers

    def _too_little(self) -> str:
        """Traffic so far, as text, while no cluster has a baseline; empty once one has."""
        if any(cluster.series.state != "learning" for cluster in self.clusters.values()):
            return ""
        counts = {"request": self.num_requests, "hour": self.num_hours}
        return ", ".join(f"{count:,} {unit}{'' if count == 1 else 's'}" for unit, count in counts.items())

    def _rates(self, number: int, hours: int = WEEK) -> dict[str, float]:
        """Tokens per hour of every cluster with traffic in the last `hours`; the figures of others are of the past."""
        lately = {name: each for name, each in self.clusters.items() if number - each.hours[-1] < hours}
        return {name: cluster.tokens_per_hour(number) for name, cluster in lately.items()}

    def _newcomers(self, number: int) -> list[Alarm]:
        """Alarm for a lasting mix shift, about the cluster that costs the most rounds now: it lacks a drafter. None
        without traffic in the last day."""
        rates = self._rates(number, DAY)
        if not rates:
            return []
        name, best = self._weakest(rates)
        now = self.clusters[name].last_day.tokens_per_round
        loss = max(self.mix.loss, 1 - now / best)  # no baseline: it could at best equal the best
        return [Alarm(name, loss, now, rates[name], self.scores(name))]

    def _mix(self, number: int) -> Mix:
        has_moved = self.mix.state == "held"
        is_known = not self._mixes or self._relearning.keys().isdisjoint(self._mixes[-1].shares)
        if number % LOOK_HOURS == 0 and is_known:
            self._period = next((period for period in (DAY, WEEK) if self._returns(period)), None)
        if (period := self._period) is None:
            return Mix(has_moved)
        lately = self._rates(number, period)
        rates = {name: rate for name, rate in lately.items() if self.clusters[name].series.state == "calm"}
        if len(rates) < 2:
            return Mix(has_moved)
        newest = sorted(mix_hour.value for mix_hour in self._mixes if mix_hour.hour > number - PERIODS_SEEN * period)
        quarter = max(len(newest) // 4, 1)
        swing = 1 - math.exp(float(np.mean(newest[:quarter])) - float(np.mean(newest[-quarter:])))
        name, best = self._weakest(rates)
        return Mix(has_moved, period, swing, name, self.clusters[name].last_day.tokens_per_round, rates[name], best)

    def _returns(self, period: int) -> bool:
        """True if the mix is autocorrelated at lag `period` over the newest periods."""
        if not self._mixes or self._mixes[-1].hour - self._mixes[0].hour < PERIODS_SEEN * period:
            return False
        first = self._mixes[-1].hour - (PERIODS_SEEN + 1) * period
        by_hour = {mix_hour.hour: mix_hour.value for mix_hour in self._mixes if mix_hour.hour > first}
        whole, half = (_correlation(by_hour, lag) for lag in (period, period // 2))
        return whole >= RETURNS and whole - half >= RETURNS

    def _weakest(self, rates: Mapping[str, float]) -> tuple[str, float]:
        """Returns (cluster that costs the most rounds beyond the best one's, acceptance length of the best) of those
        in `rates`, their tokens per hour."""
        lengths = {name: self.clusters[name].last_day.tokens_per_round for name in rates}
        best = max(lengths.values())
        return max(rates, key=lambda name: rates[name] * (1 / lengths[name] - 1 / best)), best

    def _observed(self, grouped: Mapping[str, Sums]) -> dict[str, dict[str, Any]]:
        observed: dict[str, dict[str, Any]] = {}
        for name, cluster in self.clusters.items():
            sums, series = grouped.get(name, Sums()), cluster.series
            entry = {"requests": sums.requests, "tokens": round(sums.tokens), "state": series.state}
            if sums.rounds:
                entry |= {"tokens_per_round": round(sums.tokens_per_round, 3), "z": round(series.z, 2)}
                if series.expected is not None:
                    entry["expected"] = round(math.exp(series.expected), 3)
            if series.raised_at is not None:
                entry |= {"raised_at": series.raised_at, "loss": round(series.loss, 3)}
            observed[name] = entry
        return observed


def _correlation(by_hour: Mapping[int, float], lag: int) -> float:
    """Autocorrelation of an hourly series at lag `lag`; 0 with less than a day of pairs, or a constant series."""
    pairs = [(value, by_hour[hour - lag]) for hour, value in by_hour.items() if hour - lag in by_hour]
    if len(pairs) < DAY:
        return 0.0
    now, before = np.array(pairs).T
    return 0.0 if min(now.std(), before.std()) < 1e-6 else float(np.corrcoef(now, before)[0, 1])


class NaivePolicy:
    """Simple policy for comparisons: retrains whenever acceptance length is more than 5% below its best value since the
    last training. It does not consider the time of day."""

    WINDOW, LEAST_LOSS = 4, 0.05

    def __init__(self) -> None:
        self.is_training = False
        self._reference: float | None = None
        self._window: deque[Sums] = deque(maxlen=self.WINDOW)

    def hour(self, number: int, seen: Mapping[str, Sums]) -> Line:
        """Decide on the action for hour `number` (since 1970). `seen`: cluster -> sums of tokens and rounds. The action
        is "retrain" if acceptance length over the last four hours with traffic is more than 5% below its best four-hour
        value since the last training. Otherwise it is "none". It is also "none" while a training runs."""
        observed = {name: {"tokens": round(sums.tokens)} for name, sums in seen.items()}
        if self.is_training or not seen:
            why = "a training is running" if self.is_training else "no traffic"
            return Line(number, observed, {}, Decision(why=why))
        self._window.append(total(seen.values()))
        now = total(self._window).tokens_per_round
        if len(self._window) < self.WINDOW:
            return Line(number, observed, {}, Decision(why="too few hours"))
        self._reference = max(now, self._reference or now)
        if now >= self._reference * (1 - self.LEAST_LOSS):
            return Line(number, observed, {}, Decision(why="no fall"))
        why = f"{now:.2f} tokens a round, {self._reference:.2f} before"
        return Line(number, observed, {}, Decision("retrain", tuple(seen), why=why), raised=(("all", number),))

    def trained(self, number: int, clusters: tuple[str, ...], hours: float | None = None) -> None:
        self.is_training, self._reference = False, None
        self._window.clear()
