"""Synthetic traffic with known drift (lasting loss of acceptance), for `paceline adapt replay`. A policy gets only
hourly sums of tokens and rounds.

Every request has an answer length and an acceptance probability of its own; its rounds are binomial. The distributions:

    requests per hour         Poisson; rate x daily curve x weekday x AR(1) of log-sd 0.15
    answer length             log-normal, median 120 tokens, log-sd 0.7, 8 to 1,024
    acceptance probability    p of the cluster, with sd 0.06 over requests
    acceptance length         (1 - p^8) / (1 - p): blocks of 7 drafts; 1.5 at p = 0.35, 4.8 at p = 0.85;
                              times an hourly factor that follows an AR(1) of log-sd 0.015
    rounds of an answer       1 + binomial(length - 1, 1 / acceptance length)

A drafter fits a cluster with `fit` from 0 to 1; p = 0.35 + 0.5 x fit. Content has a position on a line, which may move:
fit decays with exp(-distance) from the position of the training data. A cluster (group of similar requests) with its
own drafter uses that one. A training takes two hours; with a replay of general answers it keeps earlier fits, without
replay only the window counts. A fortnight (the simulated time) may begin on any day of the week."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.loop.adapt.config import SCENARIOS
from paceline.loop.adapt.traffic.baseline import day_and_hour
from paceline.loop.adapt.traffic.hours import DAY, Sums

LEAST_CHANCE, MOST_CHANCE, NUM_DRAFTED = 0.35, 0.85, 7
TRAINED_FIT, ENOUGH_SHARE, KEPT = 0.85, 0.1, 0.97
"""Fit after training, for a cluster with share s of the data: TRAINED_FIT s / (s + ENOUGH_SHARE). With replay of
general answers it is at least KEPT x the old fit."""
TRAINING_HOURS = 2
MATERIAL = 0.05
"""Loss of true acceptance length, as a share, from which on a drift counts as begun."""
EPOCH = 20_454 * DAY
"""Hours from 1970 to a Thursday in January 2026; the synthetic traffic begins up to six days later, depending on the
seed."""
Curve = Callable[[int], float]


@dataclass(slots=True)
class Source:
    """One cluster (group of similar requests) of synthetic traffic. `rate`: mean requests per hour. The fields `curve`,
    `place` and `bend` are functions: they get the number of hours since the start, and return the value in this hour.

    Content is modelled as a position on a line, which `place` returns. The training data of a drafter have a position
    on the same line. The farther the content is from the training data, the fewer drafts are accepted."""

    name: str
    rate: float
    fit: float
    """Fit of the initial drafter (0 to 1); a higher fit means that more drafts are accepted."""
    curve: Curve = lambda at: 1.0
    """Factor on the request rate."""
    place: Curve = lambda at: 0.0
    """Position of the content; its distance from that of the training data lowers the fit."""
    bend: Curve = lambda at: 1.0
    """Factor on acceptance length independent of the drafter: harder text at some hours."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Time of the drift in synthetic traffic, in hours since the start. The content changes from `begins` to `ends`; at
    `onset` the loss of acceptance length reaches 5%."""

    begins: int
    onset: int
    ends: int


@dataclass(frozen=True, slots=True)
class Knowledge:
    """How well a simulated drafter fits a cluster. `fit`: 0 to 1, for text like its training data; a higher fit means
    that more drafts are accepted. `place`: position of the training data on the line of contents (see `Source`)."""

    fit: float
    place: float = 0.0


@dataclass(slots=True)
class World:
    """Synthetic traffic of `num_hours` hours, and simulated drafters that serve it. A simulated training changes the
    acceptance of later hours. The methods count hours from the start."""

    sources: list[Source]
    first: int
    """Hour of the start, counted from 1970."""
    num_hours: int
    seed: int
    content_sd: float = 0.015
    """Standard deviation of the log of a random hourly factor on acceptance length."""
    shocks: float = 0.0
    """Share of hours in which one cluster's acceptance length is cut by a third."""
    drift: Drift | None = None
    knowledge: dict[str, Knowledge] = field(default_factory=dict)
    """{name of a source: how well the general drafter, which serves all sources, fits its requests}."""
    members: dict[str, Knowledge] = field(default_factory=dict)
    """{name of a source: how well its own drafter fits its requests}, for the sources that have one."""
    tokens: float = 0.0
    rounds: float = 0.0
    _tokens: dict[tuple[str, int], float] = field(default_factory=dict)
    _state: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.knowledge = {source.name: Knowledge(source.fit) for source in self.sources}
        self._state = {source.name: [0.0, 0.0] for source in self.sources}

    def traffic(self, at: int) -> dict[str, Sums]:
        """Samples the requests of the hour `at`. Returns {cluster: sums of tokens and rounds} of the clusters with
        requests. Must be called for every hour in order, since the random fluctuations of an hour depend on the hour
        before."""
        seen = {}
        for source in self.sources:
            draw = np.random.default_rng((self.seed, at, zlib.crc32(source.name.encode())))
            sums = self._requests(source, at, draw)
            self._tokens[source.name, at] = sums.tokens
            if sums.requests:
                seen[source.name] = sums
            self.tokens += sums.tokens
            self.rounds += sums.rounds
        return seen

    def _requests(self, source: Source, at: int, draw: np.random.Generator) -> Sums:
        state = self._state[source.name]
        state[0] = 0.8 * state[0] + 0.6 * draw.normal(0, 0.15)
        state[1] = 0.8 * state[1] + 0.6 * draw.normal(0, self.content_sd)
        rate = source.rate * source.curve(at) * math.exp(state[0])
        number = int(draw.poisson(rate))
        if not number:
            return Sums()
        lengths = np.clip(np.rint(draw.lognormal(math.log(120), 0.7, number)), 8, 1024).astype(np.int64)
        chances = np.clip(self.chance(source, at) + draw.normal(0, 0.06, number), 0.02, 0.98)
        factor = source.bend(at) * math.exp(state[1]) * (2 / 3 if draw.random() < self.shocks else 1.0)
        per_round = np.maximum(tokens_per_round(chances) * factor, 1.0)
        rounds = 1.0 + draw.binomial(lengths - 1, 1.0 / per_round)
        return Sums.of(zip(lengths.astype(float).tolist(), rounds.tolist(), strict=True))

    def chance(self, source: Source, at: int) -> float:
        """Mean probability that a draft token is accepted in the traffic of `source` in the hour `at`, with the drafter
        that serves it now."""
        known = self.members.get(source.name) or self.knowledge[source.name]
        fit = known.fit * math.exp(-abs(source.place(at) - known.place))
        return LEAST_CHANCE + (MOST_CHANCE - LEAST_CHANCE) * fit

    def train_member(self, cluster: str, begin: int, end: int) -> None:
        """Simulates training an additional drafter for one cluster on the cluster's traffic of hours [begin, end). The
        new drafter serves the cluster from then on. Nothing changes if the cluster had no traffic in these hours."""
        for source in self.sources:
            tokens, place = self._content(source, begin, end)
            if source.name == cluster and tokens:
                self.members[cluster] = Knowledge(TRAINED_FIT / (1 + ENOUGH_SHARE), place)

    def train(self, begin: int, end: int, *, with_replay: bool) -> dict[str, Knowledge]:
        """Computes the result of training the general drafter on the traffic of hours [begin, end). The general drafter
        serves all clusters that have no drafter of their own. Returns {cluster: how well the trained drafter fits it}.
        The trained drafter serves only after the caller has stored this result in the field `knowledge`.

        `with_replay`: True trains on general answers, too: no cluster's fit then falls below 97% of its present value.
        False makes the drafter forget clusters with little traffic in these hours."""
        contents = [self._content(source, begin, end) for source in self.sources]
        all_tokens = sum(tokens for tokens, _ in contents)
        trained = {}
        for source, (tokens, place) in zip(self.sources, contents, strict=True):
            old, share = self.knowledge[source.name], tokens / all_tokens if all_tokens else 0.0
            fit = TRAINED_FIT * share / (share + ENOUGH_SHARE)
            if with_replay and fit < KEPT * old.fit:
                trained[source.name] = Knowledge(KEPT * old.fit, old.place)
            else:
                trained[source.name] = Knowledge(fit, place if tokens else old.place)
        return trained

    def _content(self, source: Source, begin: int, end: int) -> tuple[float, float]:
        """Returns (tokens, mean position) of a source's traffic in hours [begin, end); position 0 without traffic."""
        hours = range(begin, end)
        tokens = [self._tokens.get((source.name, at), 0.0) for at in hours]
        place = float(np.average([source.place(at) for at in hours], weights=tokens)) if sum(tokens) else 0.0
        return sum(tokens), place


def tokens_per_round(chance: np.ndarray) -> np.ndarray:
    """Expected acceptance length with 7 drafts per round (NUM_DRAFTED). `chance`: array of probabilities below 1 that a
    draft is accepted if all before it are; the result has the same shape."""
    return (1 - chance ** (NUM_DRAFTED + 1)) / (1 - chance)


def make_world(scenario: str, seed: int, days: int) -> World:
    """Builds the synthetic traffic of a scenario (one of SCENARIOS), `days` days long. The seed determines on which
    weekday it starts, and when and how its content changes. Raises ConfigError for an unknown scenario."""
    draw = np.random.default_rng((seed, zlib.crc32(scenario.encode())))
    first = EPOCH + DAY * int(draw.integers(7))
    options: dict[str, Any] = {"first": first, "num_hours": days * DAY, "seed": seed}
    steady = Source("chat", 150, 0.6, _day_curve(first, 0.5))
    begins = int(DAY * (days / 2 + 1 + draw.integers(3)) + 2)
    if scenario in ("two-bases", "two-bases-drift"):
        east = Source("east", 220, 0.7, lambda at: 1.0 if at % DAY < 12 else 0.05)
        west = Source("west", 220, 0.25, lambda at: 0.05 if at % DAY < 12 else 1.0)
        if scenario == "two-bases":
            return World([east, west], **options)
        east.place = _step(begins, 1.2)
        return _with_drift(World([east, west], **options), begins, begins)
    if scenario == "slow-drift":
        ends = begins + 4 * DAY
        moving = Source("tickets", 150, 0.7, _day_curve(first, 0.5), _ramp(begins, ends, 1.2))
        return _with_drift(World([steady, moving], **options), begins, ends)
    if scenario == "new-schema":
        return _new_schema(seed, steady, begins, options)
    if scenario == "weekend":
        sign = -1 if draw.random() < 0.5 else 1
        work = Source("work", 200, 0.65, _day_curve(first, 0.7, weekend=0.3))
        work.bend = lambda at: 1 + 0.12 * sign if _is_weekend(first + at) else 1.0
        home = Source("home", 60, 0.4, _day_curve(first, 0.4, weekend=1.8))
        return World([work, home], **options)
    if scenario == "noise":
        sources = [
            Source(name, 25, fit, _day_curve(first, 0.6)) for name, fit in (("one", 0.7), ("two", 0.5), ("three", 0.3))
        ]
        return World(sources, content_sd=0.06, shocks=0.01, **options)
    if scenario != "empty-day":
        raise ConfigError(f"there is no scenario {scenario!r}: there are {', '.join(SCENARIOS)}")
    empty = DAY * int(draw.integers(days // 2, days - 2))
    daily = _day_curve(first, 0.9)
    shop = Source("shop", 120, 0.6, lambda at: 0.0 if empty <= at < empty + DAY else daily(at))
    return World([shop], **options)


def _new_schema(seed: int, steady: Source, begins: int, options: dict[str, Any]) -> World:
    """Overnight the tickets get another schema: under the same tag, or (odd seeds) under a new one."""
    curve = _day_curve(options["first"], 0.5)
    if seed % 2 == 0:
        tickets = Source("tickets", 150, 0.7, curve, _step(begins, 1.5))
        return _with_drift(World([steady, tickets], **options), begins, begins)
    before = Source("tickets", 150, 0.7, lambda at: curve(at) * (1.0 if at < begins else 0.2))
    after = Source("schema", 150, 0.15, lambda at: curve(at) * (0.0 if at < begins else 0.8))
    return World([steady, before, after], drift=Drift(begins, begins, begins), **options)


def _with_drift(world: World, begins: int, ends: int) -> World:
    """Sets the drift of a world; its onset is the hour from which on the moving cluster has lost MATERIAL."""

    def loss(source: Source, at: int) -> float:
        now, before = (tokens_per_round(np.array(world.chance(source, hour))) for hour in (at, begins - 1))
        return float(1 - now / before)

    hours = range(begins, world.num_hours)
    onset = next((at for at in hours if any(loss(source, at) >= MATERIAL for source in world.sources)), world.num_hours)
    world.drift = Drift(begins, onset, ends)
    return world


def _day_curve(first: int, depth: float, weekend: float = 1.0) -> Curve:
    """Daily curve of the request rate: peak at 14 h UTC, 1 - depth at night."""

    def factor(at: int) -> float:
        of_day = 1 - depth * (0.5 - 0.5 * math.cos(2 * math.pi * ((at % DAY) - 14) / DAY))
        return of_day * (weekend if _is_weekend(first + at) else 1.0)

    return factor


def _is_weekend(hour: int) -> bool:
    return day_and_hour(hour)[0] >= 5


def _step(begins: int, distance: float) -> Curve:
    return lambda at: distance if at >= begins else 0.0


def _ramp(begins: int, ends: int, distance: float) -> Curve:
    return lambda at: distance * min(max((at - begins) / (ends - begins), 0.0), 1.0)
