"""Decides how to react to an alarm (lasting drop of acceptance in one cluster of requests), and explains the decision.
Pure functions.

The first action that is possible is chosen: nothing while a training runs; the best available drafter, once all have
been scored; a second drafter for a periodic cluster mix (shares of the clusters in the traffic); a training, if it pays
off within the horizon and the cool-down is over; without an alarm, a drafter for a large customer (requests with one
tag) whose acceptance is far below that of other traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.loop.adapt.config import PolicyConfig, PriceConfig
from paceline.loop.adapt.traffic.hours import DAY

Action = Literal["none", "too little", "score", "route", "propose", "retrain"]
IDLE: tuple[Action, ...] = ("none", "too little")
"""Actions that change nothing: acceptance is normal, or the baseline is not known yet."""
ENOUGH = 0.5
"""Share of a loss that another drafter must recover to be preferred over a training."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Confirmed alarm about one cluster (group of similar requests), which calls for an action. It has one of two
    reasons:
    - The cluster's acceptance length has stayed below its usual value at this hour of the day and week.
    - The clusters' shares of the traffic have changed, and the change has lasted. The alarm then names the cluster that
      would save the most rounds if its acceptance length were as high as the best cluster's."""

    cluster: str
    loss: float
    """Drop of acceptance length, as a share."""
    tokens_per_round: float
    """Current acceptance length with the serving drafter."""
    tokens_per_hour: float
    members: Mapping[str, float] | None = field(default_factory=dict)
    """Name -> predicted acceptance length, for the other drafters on the server that passed the gate (comparison with
    the serving drafter) on the newest traces. None: not scored yet."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Cluster mix (each cluster's share of the traffic) at the end of an hour: whether it has changed lastingly,
    whether it repeats daily or weekly, and how much the acceptance length of all traffic varies with it. If it does not
    repeat, only `has_moved` is set."""

    has_moved: bool = False
    """True if the alarm about the mix is confirmed: the mix has differed from its usual daily and weekly course for the
    days that PolicyConfig sets."""
    period: int | None = None
    """Hours after which the mix repeats; None if it does not."""
    swing: float = 0.0
    """Drop of acceptance from the mix's best hours to its worst, as a share."""
    weakest: str | None = None
    """Cluster that would save the most rounds if its acceptance length were as high as the best cluster's. The fields
    `tokens_per_round` (acceptance length) and `tokens_per_hour` are this cluster's."""
    tokens_per_round: float = 1.0
    tokens_per_hour: float = 0.0
    best: float = 1.0
    """Highest acceptance length of a cluster."""


@dataclass(frozen=True, slots=True)
class Customer:
    """Acceptance length of one customer, compared with the rest of the traffic. A customer is the sender of all
    requests with one tag; if its acceptance is low, it may get a separate drafter. The policy creates no `Customer`
    while an alarm about this tag is active, or while the tag's usual acceptance length is unknown."""

    cluster: str
    """The tag."""
    share: float
    """Share of all tokens."""
    gap: float
    """Gap of acceptance length to that of the rest of the traffic, as a share: the lower end of its 95% interval."""
    tokens_per_round: float
    tokens_per_hour: float
    others: float
    """Acceptance length of the rest of the traffic."""


@dataclass(frozen=True, slots=True)
class View:
    """Input of `decide` at the end of an hour: alarms, cluster mix, customers, and the state of earlier trainings."""

    hour: int
    alarms: Sequence[Alarm] = ()
    mix: Mix = Mix()
    customers: Sequence[Customer] = ()
    is_training: bool = False
    trained_at: int | None = None
    """Hour in which the latest training ended."""
    proposed: frozenset[str] = frozenset()
    """Clusters for which a separate drafter has already been proposed."""
    too_little: str = ""
    """Traffic so far, as "10 requests, 1 hour", while it is too little for a baseline; otherwise empty."""
    falling: tuple[str, ...] = ()
    """Clusters whose acceptance is lower than usual, but not for long enough to be an alarm."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of the policy for one hour: an action, the clusters (groups of similar requests) that it is for, and the
    reasons for it and against other actions."""

    action: Action = "none"
    clusters: tuple[str, ...] = ()
    member: str | None = None
    """Drafter to which a `route` action sends the cluster."""
    why: str = ""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Action -> reason why it was not chosen."""

    @property
    def is_idle(self) -> bool:
        return self.action in IDLE


def saving(prices: PriceConfig, horizon_days: float, tokens_per_hour: float, before: float, after: float) -> float:
    """Returns the serving cost saved within `horizon_days` if acceptance length rises from `before` to `after`, in the
    currency of `prices`; 0 if it does not rise.

    Rounds saved = tokens generated in these days x (1 / before - 1 / after). Each round costs `prices.round_ms` on
    `prices.units` cores or GPUs."""
    rounds = tokens_per_hour * DAY * horizon_days * max(1 / before - 1 / after, 0.0)
    return rounds * prices.round_ms / 3.6e6 * prices.units * prices.serving_price


def decide(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision:
    """Chooses the policy's action for this hour, but does not execute it. Returns the action with its reason, and the
    reasons against other actions. The actions are:
    - "score": measure the other drafters on the server on a cluster's stored requests.
    - "route": send a cluster's requests to one of these drafters.
    - "propose": train an additional drafter for one cluster.
    - "retrain": train a new version of the serving drafter.
    - "none": do nothing.
    - "too little": do nothing, because there is too little traffic to judge."""
    declined: dict[str, str] = {}
    if view.is_training:
        return Decision(why="a training is running", declined={"retrain": "one is running already"})
    for alarm in view.alarms:
        if alarm.members is None:
            why = f"what the other members would bring to {alarm.cluster!r} is found out first"
            return Decision("score", (alarm.cluster,), why=why)
        wanted = alarm.tokens_per_round * (1 + ENOUGH * alarm.loss / (1 - alarm.loss))
        best = max(alarm.members, key=alarm.members.__getitem__, default=None)
        if best is not None and alarm.members[best] >= wanted:
            why = f"{best} brings {alarm.members[best]:.2f} tokens a round there, {alarm.tokens_per_round:.2f} now"
            return Decision("route", (alarm.cluster,), best, why, {"retrain": "a member that is there is good enough"})
    declined["route"] = "no member is good enough" if view.alarms else "no cluster fell"
    proposal = _proposal(view, config, prices)
    if isinstance(proposal, Decision):
        return proposal
    declined["propose"] = proposal
    training = _training(view, config, prices)
    if isinstance(training, Decision):
        return replace(training, declined=declined)
    declined["retrain"] = training
    if view.alarms:
        return Decision(why=training, declined=declined)
    if view.too_little:
        why = f"{view.too_little}; what is usual is known after more than two days of traffic"
        return Decision("too little", why=why, declined=declined)
    if view.customers:
        customer = _customer(view, config, prices)
        if isinstance(customer, Decision):
            return customer
        declined["propose"] += f"; {customer}"
    return Decision(why=_calm(view), declined=declined)


def _calm(view: View) -> str:
    if not view.falling:
        return "acceptance is as it usually is"
    names = ", ".join(map(repr, view.falling))
    return f"acceptance is lower than usual on {names}; it must last before anything is done"


def _proposal(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision | str:
    """Proposes a second drafter for the weakest cluster; otherwise returns the reason against it."""
    mix = view.mix
    if mix.period is None:
        return "the mix of clusters returns with no period"
    if mix.swing < config.least_swing:
        return f"acceptance swings by {mix.swing:.0%} with the mix, a second member needs {config.least_swing:.0%}"
    if mix.weakest is None or mix.weakest in view.proposed:
        return "it was proposed before"
    after = mix.tokens_per_round + config.recovered * max(mix.best - mix.tokens_per_round, 0.0)
    gain = saving(prices, config.horizon_days, mix.tokens_per_hour, mix.tokens_per_round, after)
    if gain <= prices.training_hours * prices.training_price:
        return f"a second member would save {gain:.2f} in {config.horizon_days:g} days, less than its training costs"
    why = (
        f"the mix returns every {mix.period} hours and takes acceptance down by {mix.swing:.0%}: a member of its own "
        f"for {mix.weakest!r} ({mix.tokens_per_round:.2f} tokens a round) serves those hours; a retrained one would "
        "lose the others"
    )
    return Decision("propose", (mix.weakest,), why=why, declined={"retrain": "what returns with a period is no drift"})


def _customer(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision | str:
    """Proposes a drafter for the large customer whose bad acceptance costs most, or returns the reason against it."""
    if waits := _cooling(view, config):
        return waits
    large = [one for one in view.customers if one.share >= config.least_customer and one.cluster not in view.proposed]
    badly_served = [one for one in large if one.gap >= config.least_gap]
    if not badly_served:
        return (
            f"no tag with {config.least_customer:.0%} of all tokens, but those proposed before, is surely "
            f"{config.least_gap:.0%} below other traffic"
        )

    def gain_of(one: Customer) -> float:
        after = one.tokens_per_round + config.recovered * (one.others - one.tokens_per_round)
        return saving(prices, config.horizon_days, one.tokens_per_hour, one.tokens_per_round, after)

    worst = max(badly_served, key=gain_of)
    gain, cost = gain_of(worst), prices.training_hours * prices.training_price
    sums = f"save {gain:.2f} in {config.horizon_days:g} days and cost {cost:.2f}"
    if gain <= cost:
        return f"a member of its own for {worst.cluster!r} would {sums}"
    why = (
        f"{worst.cluster!r}, {worst.share:.0%} of all tokens, gets {worst.tokens_per_round:.2f} tokens a round, other "
        f"traffic {worst.others:.2f}: a member of its own would {sums}"
    )
    return Decision("propose", (worst.cluster,), why=why, declined={"retrain": "no alarm holds"})


def _cooling(view: View, config: PolicyConfig) -> str:
    """Returns why no training may begin so soon after the last one; empty if it may."""
    since = None if view.trained_at is None else view.hour - view.trained_at
    if since is None or since >= config.cool_down_days * DAY:
        return ""
    return f"the last training ended {since} hours ago, {config.cool_down_days * DAY:g} must pass"


def _training(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision | str:
    """Decides on a training for all clusters with alarms; otherwise returns the reason against it."""
    if not view.alarms:
        return "the mix moved, but no cluster fell" if view.mix.has_moved else "no alarm holds"
    if waits := _cooling(view, config):
        return waits
    gain, cost = 0.0, prices.training_hours * prices.training_price
    for alarm in view.alarms:
        now = alarm.tokens_per_round
        after = now * (1 + config.recovered * alarm.loss / (1 - alarm.loss))
        gain += saving(prices, config.horizon_days, alarm.tokens_per_hour, now, after)
    if gain <= cost:
        return f"it would save {gain:.2f} in {config.horizon_days:g} days and cost {cost:.2f}"
    names = tuple(alarm.cluster for alarm in view.alarms)
    lost = ", ".join(f"{alarm.cluster!r} lost {alarm.loss:.0%}" for alarm in view.alarms)
    why = f"{lost}; it saves {gain:.2f} in {config.horizon_days:g} days and costs {cost:.2f}"
    return Decision("retrain", names, why=why)
