"""Routing: chooses the drafter of a pool that brings each request cluster the most tokens per second. Imports no
PyTorch.

    router = Router()
    drafter, cluster = router.choose(request_id, clusters, ["general", "tickets", "none"])
    router.learn(sequences, stats, price)      # after each round
    router.ended(request_id)

The router is a multi-armed bandit for each cluster (group of similar requests, `clusters.py`), with the drafters as
arms. The reward is the speed relative to plain decoding at the same load: the tokens of a request's rounds over the
prices of these rounds. A price (`Planner.price`) is a round's estimated duration in units of a round without drafts. It
does not depend on other requests, machine noise or load. Plain decoding has the reward 1.0 by definition: "none" is
chosen if no drafter is faster, and needs no trial. Rounds may also verify prompt lookup drafts, which are free and the
same for every drafter: of drafters that may be equally fast, one whose own drafts bring far fewer tokens is not chosen.

Older requests count less (discounted UCB, Garivier and Moulines 2008), so changes in a drafter's quality are detected.
Exploration is bounded. In each cluster every drafter first gets FIRST requests, or one if UNPROVEN requests of all
clusters brought no gain. After that, a drafter that does not have the best estimate but may be the best gets a request
only from an exploration budget of CREDIT requests per drafter, to which each later request adds EXPLORED. A cluster
that is pinned to a drafter (`pin`) does not explore.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.plan.chances import Ratio
from paceline.plan.clusters import Clusters, label
from paceline.types import COPYING, NONE, RoundStats

if TYPE_CHECKING:
    from paceline.types import Sequence as Request

FIRST = 2
"""Requests of a cluster that each drafter gets before the router prefers one."""
UNPROVEN, PROVEN = 6, 1.02
"""A drafter that got UNPROVEN requests, and is in no cluster more than PROVEN times as fast as plain decoding, is tried
only once in further clusters."""
CREDIT = 6.0
"""Exploration budget of a cluster, in requests for each drafter. They may go to a drafter that is not the best by
estimate."""
EXPLORED = 0.02
"""Share of a cluster's later requests that may go to drafters without the best estimate."""
KEEP = 0.98
"""Factor on the weight of older requests at each new one: about the latest 50 requests count."""
SPREAD, SPREAD_WEIGHT = 0.25, 2.0
"""Initial estimate of the relative standard deviation of one request's reward, and its weight in requests."""
PRIOR_ROUNDS = 8.0
"""Weight, in rounds, of a drafter's initial estimates: as fast as plain decoding, and with as many accepted drafts per
round as the best drafter."""
FAR_FEWER = 0.5
"""A drafter with less than this share of another's accepted drafts per round is chosen only if it is clearly faster."""
WHOLE = 32
"""Answer length, in tokens, from which a request has full weight in the statistics; a shorter answer counts less."""
Price = Callable[[int, int, int], float | None]
"""Function `Planner.price` for one plan: (row's index, its verified drafts, rows that share its drafting) -> the
round's time for this row, in units of a round without drafts; None if unknown."""


@dataclass(slots=True)
class Arm:
    """Statistics of one drafter in one cluster (group of similar requests). The name is that of an option in a
    multi-armed bandit."""

    reward: Ratio = field(default_factory=Ratio)
    """Generated tokens divided by the estimated time of the rounds that generated them; the unit of time is a round
    without drafts."""
    squares: Ratio = field(default_factory=Ratio)
    """Mean squared relative deviation of a single request's reward from the average."""
    own: Ratio = field(default_factory=Ratio)
    """Accepted drafts per round of the drafter itself, without those of prompt lookup."""
    weight: float = 0.0
    """Number of finished requests, where older and short ones count less."""
    num_given: int = 0
    num_running: int = 0

    @property
    def gain(self) -> float:
        """Estimated speed: tokens per second divided by those of plain decoding."""
        return self.reward.near(1.0, PRIOR_ROUNDS)

    @property
    def most(self) -> float:
        """Upper confidence bound of the gain: the estimate plus one standard deviation."""
        # Running requests count as ended ones, so that a burst does not send all to one uncertain drafter.
        return self.gain * (1.0 + self._doubt(self.weight + self.num_running))

    @property
    def least(self) -> float:
        """Lower confidence bound of the gain: the estimate minus two standard deviations."""
        return self.gain * max(1.0 - 2.0 * self._doubt(self.weight), 0.0)

    def _doubt(self, weight: float) -> float:
        """Returns the relative standard deviation of the gain after `weight` requests."""
        return math.sqrt(self.squares.near(SPREAD**2, SPREAD_WEIGHT) / max(weight, 1e-3))

    def add(self, num_tokens: int, price: float, num_own: int = 0, num_rounds: int = 0) -> None:
        """Add a finished request with `num_tokens` generated tokens. `price`: estimated time of its rounds, in units of
        a round without drafts. `num_own`: accepted drafts that this drafter made; those copied from a text by prompt
        lookup or a prediction do not count. `num_rounds`: number of its rounds."""
        self.own.add(num_own, num_rounds, 1.0)
        weight = min(num_tokens / WHOLE, 1.0)
        self.weight += weight
        self.reward.add(num_tokens, price, 1.0)
        if price:
            self.squares.add(weight * (num_tokens / price / self.gain - 1.0) ** 2, weight, 1.0)

    def fade(self) -> None:
        """Multiply the weight of all requests so far by 0.98 (KEEP), so that newer ones count more."""
        self.weight *= KEEP
        for ratio in (self.reward, self.squares, self.own):
            ratio.add(0.0, 0.0, KEEP)


@dataclass(slots=True)
class Cluster:
    """Statistics of each drafter in one cluster (group of similar requests); chooses the drafter of each new
    request."""

    arms: dict[str, Arm] = field(default_factory=dict)
    pinned: str | None = None
    """Drafter for all requests, unless it is clearly slower than plain decoding. None: the router chooses."""
    credit: float = 0.0
    """Exploration budget: number of requests that may still try a drafter other than the one with the best estimate."""
    num_requests: int = 0

    def choose(self, drafters: list[str], first: Callable[[str], int]) -> tuple[str, float]:
        """Chooses the drafter of a new request among `drafters`, listed in initial order of preference. The first rule
        that applies decides:

        - If this cluster is pinned to a drafter (`Router.pin`): that one, unless it is clearly slower than plain
          decoding.
        - A drafter that is new to this cluster: it gets `first(name)` requests as trials, at most 2 (FIRST).
        - The drafter with the best estimates, or sometimes another one that may be faster. The latter costs 1.0 of the
          exploration credit, to which every request adds a little.

        `first`: function (drafter's name) -> number of trial requests that it gets in each cluster. Returns (drafter,
        credit that was spent: 1.0 or 0.0).
        """
        for name in drafters:
            if name != NONE and name not in self.arms:
                self.arms[name], self.credit = Arm(), self.credit + CREDIT
        if self.pinned in drafters and (self.pinned == NONE or self.arms[self.pinned].most >= 1.0):
            return self.pinned, 0.0
        arms = {name: self.arms[name] for name in drafters if name != NONE}
        new = [name for name, arm in arms.items() if arm.num_given < FIRST and arm.num_given < first(name)]
        if new and len(drafters) > 1:
            return min(new, key=lambda name: arms[name].num_given), 0.0
        self.credit = min(self.credit + EXPLORED, CREDIT * len(arms))
        best, others = self._best(arms, NONE in drafters)
        bound = 1.0 if best == NONE else arms[best].most
        other = max(others, key=lambda name: arms[name].most, default=best)
        if other != best and self.credit >= 1.0 and arms[other].most > bound:
            self.credit -= 1.0
            return other, 1.0
        return best, 0.0

    def _best(self, arms: dict[str, Arm], may_be_none: bool) -> tuple[str, list[str]]:
        """Returns the drafter with the best estimate, and those that may be better."""
        top = max((arm.own.near(0.0, PRIOR_ROUNDS) for arm in arms.values()), default=0.0)
        # Few rounds: nearly `top`, so that no drafter is ruled out by its own drafts before it was tried.
        own = {name: arm.own.near(top, PRIOR_ROUNDS) for name, arm in arms.items()}
        fastest = max(arms, key=lambda name: arms[name].gain, default=NONE)
        if fastest == NONE or (may_be_none and arms[fastest].gain < 1.0):
            return NONE, [name for name in arms if own[name] >= FAR_FEWER * max(own.values())]
        even = [name for name, arm in arms.items() if arm.most >= arms[fastest].least]
        least = FAR_FEWER * max(own[name] for name in even)
        best = max((name for name in even if own[name] >= least), key=lambda name: arms[name].gain)
        return best, [name for name in arms if name != best and own[name] >= FAR_FEWER * own[best]]

    def add(self, drafter: str, num_tokens: int, price: float, num_own: int = 0, num_rounds: int = 0) -> None:
        """Add a finished request of this cluster that used `drafter`; other arguments: see `Arm.add`."""
        for arm in self.arms.values():
            arm.fade()
        if arm := self.arms.get(drafter):
            arm.add(num_tokens, price, num_own, num_rounds)


@dataclass(slots=True)
class _Session:
    """A running request, and the sums over its rounds."""

    cluster: Cluster
    drafter: str
    credit: float = 0.0
    """Part of the cluster's exploration budget that it took."""
    num_tokens: int = 0
    price: float = 0.0
    num_own: int = 0
    """Accepted drafts of its own drafter."""
    num_rounds: int = 0


class Router:
    """Chooses a drafter for each request, by the request's cluster (group of similar requests), and updates its
    estimates from finished rounds. Used only by the engine's thread."""

    def __init__(self) -> None:
        self.clusters: dict[str, Cluster] = {}
        self._classes = Clusters()
        self._pins: dict[str, str] = {}
        """Cluster -> the drafter that it is pinned to, also while the cluster is evicted."""
        self._sessions: dict[int, _Session] = {}

    def begin(self) -> None:
        """Drop the records of running requests, because a new engine was started. Statistics of finished requests
        remain."""
        self._sessions.clear()
        for cluster in self.clusters.values():
            for arm in cluster.arms.values():
                arm.num_running = 0

    def choose(self, key: int, clusters: Sequence[str], drafters: list[str]) -> tuple[str, str]:
        """Returns (drafter, cluster) for a new request. `key`: its request id. `clusters`: its classes, from
        `clusters_of`. `drafters`: names to choose from, the default first. If these are only the default and "none",
        the default is returned, unless the cluster is pinned."""
        name = self._classes.of(clusters)
        if self._classes.evicted:
            self.clusters.pop(self._classes.evicted, None)
        cluster = self.clusters.setdefault(name, Cluster(pinned=self._pins.get(name)))
        cluster.num_requests += 1
        if len(drafters) <= 2 and drafters[0] != NONE and cluster.pinned is None:
            return drafters[0], name  # no choice, so no statistics either
        drafter, credit = cluster.choose(drafters, self._first)
        self._sessions[key] = _Session(cluster, drafter, credit)
        arm = cluster.arms.setdefault(drafter, Arm())
        arm.num_given, arm.num_running = arm.num_given + 1, arm.num_running + 1
        return drafter, name

    def pin(self, cluster: str, drafter: str | None) -> tuple[str, Cluster]:
        """Pin a cluster to a drafter: all its new requests get this drafter, unless it is clearly slower than plain
        decoding. None: let the router choose again. `cluster`: the cluster's name, or its label in metrics. Returns its
        name and statistics; they are empty while the cluster is evicted. Raises ConfigError for an unknown cluster."""
        match = next((name for name in (*self.clusters, *self._pins) if cluster in (name, label(name))), None)
        if match is None:
            known = ", ".join(map(label, self.clusters)) or "none"
            raise ConfigError(f"there is no cluster {cluster!r} here: there are {known}")
        if match in self.clusters:
            self.clusters[match].pinned = drafter
        self._pins.pop(match, None)
        if drafter is not None:
            self._pins[match] = drafter
        return match, self.clusters.get(match, Cluster(pinned=drafter))

    def _first(self, drafter: str) -> int:
        """Returns how often a drafter is tried in a new cluster."""
        arms = [cluster.arms[drafter] for cluster in self.clusters.values() if drafter in cluster.arms]
        is_proven = any(arm.gain > PROVEN for arm in arms)
        return FIRST if is_proven or sum(arm.num_given for arm in arms) < UNPROVEN else 1

    def learn(self, sequences: Sequence[Request], stats: RoundStats, price: Price) -> None:
        """Add a finished round to the totals of the requests that ran in it. Requests with a lossy rule are left out. A
        request's totals enter the statistics of its cluster when it ends.

        `sequences`: the requests, in the order of the batch. `stats`: results of the round. `price`: function that
        gives the cost of a request's drafts in this round (`Planner.price`).
        """
        # Rows of a cluster would draft together if the drafter were the cluster's best.
        alike = Counter(seq.cluster for seq in sequences)
        for index, seq in enumerate(sequences):
            session = self._sessions.get(seq.request_id)
            paid = price(index, stats.num_checked_B[index], alike[seq.cluster]) if session else None
            if session and paid is not None and not seq.params.lossy:
                session.num_tokens += 1 + stats.num_accepted_B[index]
                session.price += paid
                session.num_rounds += 1
                if stats.source_B[index] not in COPYING | {NONE}:
                    session.num_own += stats.num_accepted_B[index]

    def cancel(self, key: int) -> None:
        """Undo `choose` for the request with the id `key`, because another drafter serves it instead. Exploration
        credit that it had spent is returned."""
        if (session := self._sessions.pop(key, None)) and (arm := session.cluster.arms.get(session.drafter)):
            arm.num_given, arm.num_running = arm.num_given - 1, arm.num_running - 1
            session.cluster.credit += session.credit

    def ended(self, key: int) -> None:
        """Add a finished request's totals to the statistics of its cluster. Call it for every request that ends, for
        any reason. `key`: its request id."""
        if session := self._sessions.pop(key, None):
            if arm := session.cluster.arms.get(session.drafter):
                arm.num_running -= 1
            session.cluster.add(session.drafter, session.num_tokens, session.price, session.num_own, session.num_rounds)

    def forget(self, drafter: str) -> None:
        """Discard the statistics of a drafter that was replaced or removed."""
        for cluster in self.clusters.values():
            cluster.arms.pop(drafter, None)
        for session in self._sessions.values():
            if session.drafter == drafter:
                session.drafter = ""  # its tokens must not count for a new drafter of this name
