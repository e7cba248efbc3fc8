"""Which member of a pool of drafters a request gets: the one that brings most tokens per second to requests of its kind.

    router = Router()
    member, cluster = router.choose(request_id, clusters, ["general", "tickets", "none"])
    router.learn(sequences, stats, price)      # after each round
    router.ended(request_id)

A bandit for each cluster of requests (`clusters.py`). The reward is tokens per second over those of plain decoding at the same
load: the tokens that a request's rounds brought, over what those rounds took in rounds without drafts, by the planner's learned
costs (`Planner.price`). A slow neighbour, a disturbed machine and a change of load are in neither. Plain decoding is 1.0 by
definition, so "none" is chosen where no member is faster, and needs no trial. Rounds may also check lookups, which cost nothing
and are the same whoever drafts: of members that may be equally fast, one whose own drafts bring far fewer tokens gives way.

Older requests count less (discounted UCB, Garivier and Moulines 2008), so a member that gets better or worse is found out. What
that costs is bounded: in each cluster every member gets FIRST requests, or one; CREDIT more a member, and then a share of
EXPLORED of all requests, may go to members that do not look best but may still be it. A cluster that is
pinned to a member (`pin`) chooses nothing. No PyTorch.
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
from paceline.types import LOOKUP, NONE, RoundStats

if TYPE_CHECKING:
    from paceline.types import Sequence as Request

FIRST = 2
"""Requests of a cluster that each member gets before any is preferred."""
UNPROVEN, PROVEN = 6, 1.02
"""A member that so many requests of all clusters have tried, with no gain above that in any, is tried once elsewhere."""
CREDIT = 6.0
"""And so many more for each member while it may still be the best."""
EXPLORED = 0.02
"""Share of a cluster's later requests that may go to members which do not look best."""
KEEP = 0.98
"""What is left of older requests with each new one: the latest 50 count."""
SPREAD, SPREAD_WEIGHT = 0.25, 2.0
"""Standard deviation of one request's reward, as a share of it, before any is known; and how many requests that counts for."""
PRIOR_ROUNDS = 8.0
"""Rounds that the belief of "as fast as plain decoding" counts for, and that of "its own drafts bring as much as any"."""
FAR_FEWER = 0.5
"""A member whose own drafts bring less than this share of another's tokens a round is taken only where it is clearly faster."""
WHOLE = 32
"""Tokens of a request that counts whole; a shorter one counts less."""
Price = Callable[[int, int, int], float | None]
"""`Planner.price` of one plan."""


@dataclass(slots=True)
class Arm:
    """What a member has brought to the requests of a cluster."""

    reward: Ratio = field(default_factory=Ratio)
    """Tokens over rounds' prices."""
    squares: Ratio = field(default_factory=Ratio)
    """Squared deviations of single requests from it, as shares: a member that brings nothing hardly deviates."""
    own: Ratio = field(default_factory=Ratio)
    """Its own drafts that stood, over rounds; those that were found in the text are not its own."""
    weight: float = 0.0
    """Requests that this is from, older ones counting less."""
    num_given: int = 0
    num_running: int = 0

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.reward.near(1.0, PRIOR_ROUNDS)

    @property
    def most(self) -> float:
        """What its gain may well be."""
        return self.gain * (1.0 + self._doubt(self.weight + self.num_running))

    @property
    def least(self) -> float:
        """What its gain surely is: two standard deviations below."""
        return self.gain * max(1.0 - 2.0 * self._doubt(self.weight), 0.0)

    def _doubt(self, weight: float) -> float:
        """Standard deviation of the gain after so many requests, as a share of it."""
        return math.sqrt(self.squares.near(SPREAD**2, SPREAD_WEIGHT) / max(weight, 1e-3))

    def add(self, num_tokens: int, price: float, num_own: int = 0, num_rounds: int = 0) -> None:
        """A request's rounds."""
        self.own.add(num_own, num_rounds, 1.0)
        weight = min(num_tokens / WHOLE, 1.0)
        self.weight += weight
        self.reward.add(num_tokens, price, 1.0)
        if price:
            self.squares.add(weight * (num_tokens / price / self.gain - 1.0) ** 2, weight, 1.0)

    def fade(self) -> None:
        """Another request of the cluster is over."""
        self.weight *= KEEP
        self.reward.add(0.0, 0.0, KEEP)
        self.squares.add(0.0, 0.0, KEEP)
        self.own.add(0.0, 0.0, KEEP)


@dataclass(slots=True)
class Cluster:
    """The members' arms for one kind of request."""

    arms: dict[str, Arm] = field(default_factory=dict)
    pinned: str | None = None
    """The member that its requests get without a choice, while that may be faster than plain decoding."""
    credit: float = 0.0
    num_requests: int = 0

    def choose(self, members: list[str], first: Callable[[str], int]) -> str:
        """A member of those, in the order in which they are preferred while nothing is known; each is tried `first` times."""
        for name in members:
            if name != NONE and name not in self.arms:
                self.arms[name], self.credit = Arm(), self.credit + CREDIT
        if self.pinned in members and (self.pinned == NONE or self.arms[self.pinned].most >= 1.0):
            return self.pinned
        arms = {name: self.arms[name] for name in members if name != NONE}
        new = [name for name, arm in arms.items() if arm.num_given < FIRST and arm.num_given < first(name)]
        if new and len(members) > 1:
            return min(new, key=lambda name: arms[name].num_given)
        self.credit = min(self.credit + EXPLORED, CREDIT * len(arms))
        best, others = self._best(arms, NONE in members)
        bound = 1.0 if best == NONE else arms[best].most
        other = max(others, key=lambda name: arms[name].most, default=best)
        if other != best and self.credit >= 1.0 and arms[other].most > bound:
            self.credit -= 1.0
            return other
        return best

    def _best(self, arms: dict[str, Arm], may_be_none: bool) -> tuple[str, list[str]]:
        """The member that looks best, and those that may be better."""
        top = max((arm.own.near(0.0, PRIOR_ROUNDS) for arm in arms.values()), default=0.0)
        own = {name: arm.own.near(top, PRIOR_ROUNDS) for name, arm in arms.items()}
        looks = max(arms, key=lambda name: arms[name].gain, default=NONE)
        if looks == NONE or (may_be_none and arms[looks].gain < 1.0):
            return NONE, [name for name in arms if own[name] >= FAR_FEWER * max(own.values())]
        even = [name for name, arm in arms.items() if arm.most >= arms[looks].least]
        least = FAR_FEWER * max(own[name] for name in even)
        best = max((name for name in even if own[name] >= least), key=lambda name: arms[name].gain)
        return best, [name for name in arms if name != best and own[name] >= FAR_FEWER * own[best]]

    def add(self, member: str, num_tokens: int, price: float, num_own: int = 0, num_rounds: int = 0) -> None:
        """A request of this cluster is over."""
        for arm in self.arms.values():
            arm.fade()
        if arm := self.arms.get(member):
            arm.add(num_tokens, price, num_own, num_rounds)


@dataclass(slots=True)
class _Stay:
    """A request that runs: what it got, and what its rounds have brought and taken."""

    cluster: str
    member: str
    num_tokens: int = 0
    price: float = 0.0
    num_own: int = 0
    """Its member's own drafts that stood."""
    num_rounds: int = 0


class Router:
    """Chooses members for requests, and learns from their rounds. Belongs to the thread of the engine."""

    def __init__(self) -> None:
        self.clusters: dict[str, Cluster] = {}
        self._kinds = Clusters()
        self._stays: dict[int, _Stay] = {}

    def begin(self) -> None:
        """With a new engine: requests that ran in another are not heard of any more."""
        self._stays.clear()
        for cluster in self.clusters.values():
            for arm in cluster.arms.values():
                arm.num_running = 0

    def choose(self, key: int, clusters: Sequence[str], members: list[str]) -> tuple[str, str]:
        """The member for a request, of the pool's open ones, and the cluster it counts as; `clusters` as of `clusters_of`."""
        name = self._kinds.of(clusters)
        if self._kinds.left:
            self.clusters.pop(self._kinds.left, None)
        cluster = self.clusters.setdefault(name, Cluster())
        cluster.num_requests += 1
        if len(members) <= 2 and members[0] != NONE and cluster.pinned is None:
            return members[0], name  # nothing to choose, and nothing to learn
        member = cluster.choose(members, self._first)
        self._stays[key] = _Stay(name, member)
        arm = cluster.arms.setdefault(member, Arm())
        arm.num_given, arm.num_running = arm.num_given + 1, arm.num_running + 1
        return member, name

    def pin(self, cluster: str, member: str | None) -> None:
        """Requests of this cluster, or of the one with this label, get that member from now on; with None one is chosen again.

        Raises ConfigError when there is no such cluster.
        """
        found = next((each for name, each in self.clusters.items() if cluster in (name, label(name))), None)
        if found is None:
            known = ", ".join(map(label, self.clusters)) or "none"
            raise ConfigError(f"there is no cluster {cluster!r} here: there are {known}")
        found.pinned = member

    def _first(self, member: str) -> int:
        """How often it is tried in a cluster of which nothing is known."""
        arms = [cluster.arms[member] for cluster in self.clusters.values() if member in cluster.arms]
        is_proven = any(arm.gain > PROVEN for arm in arms)
        return FIRST if is_proven or sum(arm.num_given for arm in arms) < UNPROVEN else 1

    def learn(self, sequences: Sequence[Request], stats: RoundStats, price: Price) -> None:
        """A round of these sequences is over."""
        alike = Counter(seq.cluster for seq in sequences)  # they would draft together if the member were the cluster's best
        for place, seq in enumerate(sequences):
            stay = self._stays.get(seq.request_id)
            paid = price(place, stats.num_checked_B[place], alike[seq.cluster]) if stay else None
            if stay and paid is not None and not seq.params.lossy:
                stay.num_tokens += 1 + stats.num_accepted_B[place]
                stay.price += paid
                stay.num_rounds += 1
                if stats.source_B[place] not in (NONE, LOOKUP):
                    stay.num_own += stats.num_accepted_B[place]

    def ended(self, key: int) -> None:
        """A request is over, however it ended."""
        stay = self._stays.pop(key, None)
        cluster = self.clusters.get(stay.cluster) if stay else None
        if stay and cluster:
            if arm := cluster.arms.get(stay.member):
                arm.num_running -= 1
            cluster.add(stay.member, stay.num_tokens, stay.price, stay.num_own, stay.num_rounds)

    def forget(self, member: str) -> None:
        """Another drafter has this name from now on, or none: what was learned of it holds no more."""
        for cluster in self.clusters.values():
            cluster.arms.pop(member, None)
        for stay in self._stays.values():
            if stay.member == member:
                stay.member = ""
